"""The HTTP port of a sidecar: exact counters of a scripted workload, and what probes are told."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.metric_table import METRICS
from kvstore.v1 import admin_pb2, block_pb2, lookup_pb2
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import Credentials, Peer, Raw, dialled, fork, refused, spec, tokens_of
from tests.support.tenants import Entry, write_tenants
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, valkey

__all__ = ["shared_valkey", "valkey"]

PROMPT = tokens_of(8, tail=3)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(server: Sidecar, path: str) -> tuple[int, str]:
    """(Status, body)."""
    try:
        with urllib.request.urlopen(server.serving["http"] + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(server: Sidecar) -> Samples:
    """Values by name and labels; times at which series began are left out."""
    families = text_string_to_metric_families(get(server, "/metrics")[1])
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def said(server: Sidecar) -> dict[str, float]:
    """Counts and gauges of /metrics, all models together."""
    found: dict[str, float] = {}
    for (name, labels), value in scrape(server).items():
        if not name.endswith(("_bucket", "_sum", "_count")):
            key = f"{name}{sorted(pair for pair in labels if pair[0] != 'model')}"
            found[key] = found.get(key, 0.0) + value
    return found


def told(server: Sidecar) -> dict[str, float]:
    """What the page is told."""
    samples = json.loads(get(server, "/live.json")[1])["samples"]
    return {f"{each['name']}{sorted(each['labels'].items())}": each["value"] for each in samples}


class Counted:
    """What is counted from here on."""

    def __init__(self, server: Sidecar) -> None:
        self._server = server
        self._before = scrape(server)

    def of(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Differences that are not zero of one metric, by the values of the labels that are not given."""
        now = scrape(self._server)
        changes: dict[tuple[str, ...], float] = {}
        for (found, pairs), value in now.items():
            change = value - self._before.get((found, pairs), 0.0)
            if found == name and change and labels.items() <= dict(pairs).items():
                changes[tuple(text for label, text in pairs if label not in labels)] = change
        return changes


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    settings = {"client_leases": 1, "client_staged_bytes": "8KiB", "client_streams": 1}
    with sidecar(pool_bytes="4MiB", **settings) as server:
        yield server


@pytest.fixture(scope="module")
def raw(server: Sidecar) -> Iterator[Raw]:
    with dialled(server.address) as raw:
        yield raw


@pytest.fixture
def peer(raw: Raw, request: pytest.FixtureRequest) -> Peer:
    """Of a model of its own, whose one prompt is resident."""
    peer = raw.register(spec(request.node.name))
    peer.write(PROMPT)
    return peer


class TestWorkload:
    def test_requests_by_model_tier_and_cause(self, server: Sidecar, peer: Peer) -> None:
        """Hits and misses are what was asked, in tokens, once a request (cases 43, 44)."""
        model = peer.request.spec.model
        counted = Counted(server)
        peer.release(peer.hold(PROMPT, "all"))
        peer.release(peer.hold(PROMPT, "some"), 5)
        part = peer.acquire(fork(PROMPT, 6), "part")
        assert part.blocks == 6
        peer.acquire(fork(PROMPT, 6), "part")
        peer.release(part.lease_id)
        peer.release(part.lease_id)
        for _ in range(2):
            assert peer.acquire(tokens_of(4, seed=3), "cold").blocks == 0
        peer.acquire(tokens_of(0, tail=7), "short")
        assert counted.of("kvstore_asked_tokens_total") == {(model,): 3 * 131 + 64 + 7}
        assert counted.of("kvstore_hit_tokens_total", model=model) == {("host",): 128 + 80 + 96}
        misses = {("stale",): 48, ("cold",): 32 + 64, ("tail",): 3 * 3 + 7}
        assert counted.of("kvstore_miss_tokens_total", model=model) == misses
        assert counted.of("kvstore_tier_asked_tokens_total") == {("host",): 3 * 128 + 64}
        assert counted.of("kvstore_probe_tokens_total") == {}

    def test_blocks_and_bytes(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        raw.admin.Clear(admin_pb2.ClearRequest())
        assert eventually(lambda: scrape(server)["kvstore_pool_bytes", pool("free")] == 4 << 20)
        counted = Counted(server)
        peer.write(PROMPT)
        lease = peer.hold(PROMPT, "r")
        begun = peer.begin(tokens_of(2, seed=1))
        now = scrape(server)
        bytes_by_state = {state: now["kvstore_pool_bytes", pool(state)] for state in STATES}
        assert bytes_by_state == {
            "ready": 8192,
            "staged": 2048,
            "quarantined": 0,
            "free": (4 << 20) - 8192 - 2048,
        }
        assert (now["kvstore_leases", ()], now["kvstore_leased_bytes", (("tier", "host"),)]) == (1, 8192)
        peer.abort(begun.write_id)
        peer.release(lease)
        assert raw.admin.Clear(admin_pb2.ClearRequest()).blocks == 8
        assert counted.of("kvstore_stored_blocks_total") == {("host",): 8}
        assert counted.of("kvstore_evicted_blocks_total") == {("cleared", "host"): 8}
        now = scrape(server)
        assert (now["kvstore_leases", ()], now["kvstore_leased_bytes", (("tier", "host"),)]) == (0, 0)

    def test_look_ups_are_no_requests(self, server: Sidecar, peer: Peer) -> None:
        """They change nothing but what counts them."""
        counted, before = Counted(server), scrape(server)
        peer.look_up(PROMPT)
        peer.look_up(tokens_of(2, seed=9))
        peer.explain(PROMPT)
        assert counted.of("kvstore_probe_tokens_total") == {(): 131 + 32}
        after = scrape(server)
        changed = {name for name, labels in after if after[name, labels] != before.get((name, labels), 0.0)}
        assert changed <= {"kvstore_probe_tokens_total"} | {
            name for name, _ in after if name.startswith("kvstore_rpc_seconds")
        }

    def test_calls_by_outcome(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        counted = Counted(server)
        peer.matched(PROMPT)
        with refused(grpc.StatusCode.NOT_FOUND):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt={"model": "nobody"}))
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            raw.lookup.Lookup(lookup_pb2.LookupRequest())
        # A refusal is on its way before it is counted.
        expected = {("ok",): 1, ("not_found",): 1, ("invalid_argument",): 1}
        assert eventually(lambda: counted.of("kvstore_rpc_seconds_count", rpc="Lookup") == expected)

    def test_calls_that_were_given_up(self, server: Sidecar, raw: Raw) -> None:
        counted = Counted(server)
        watch = raw.admin.WatchEvents(admin_pb2.WatchEventsRequest())
        next(watch)
        watch.cancel()

        def cancelled() -> bool:
            return counted.of("kvstore_rpc_seconds_count", rpc="WatchEvents") == {("cancelled",): 1}

        assert eventually(cancelled), counted.of("kvstore_rpc_seconds_count")


PAGES = ("/", "/metrics", "/live.json", "/history.json")
STATES = ("free", "ready", "staged", "quarantined")


def pool(state: str) -> tuple[tuple[str, str], ...]:
    return ("state", state), ("tier", "host")


class TestRefusals:
    def test_each_limit_is_counted(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        counted = Counted(server)
        lease = peer.hold(PROMPT, "r")
        with refused(EXHAUSTED):
            peer.acquire(PROMPT, "s")
        with refused(EXHAUSTED):
            peer.begin(tokens_of(9, seed=1))
        empty = lookup_pb2.LookupRequest()
        with refused(EXHAUSTED):
            raw.lookup.BatchLookup(lookup_pb2.BatchLookupRequest(requests=[empty] * 1025))
        peer.release(lease)
        assert counted.of("kvstore_refused_requests_total") == {
            ("leases",): 1,
            ("staged_bytes",): 1,
            ("batch",): 1,
        }

    def test_streams(self) -> None:
        settings = {"pool_bytes": "64MiB", "extent_bytes": "32MiB", "client_streams": 1}
        with sidecar(**settings) as server, dialled(server.address) as raw:
            peer = raw.register(spec("streams", payload_bytes=1_500_000))
            prompt = tokens_of(16)
            peer.write(prompt)
            lease = peer.hold(prompt, "r")
            counted = Counted(server)
            pieces = raw.blocks.ReadBlocks(block_pb2.ReadBlocksRequest(**peer.me, lease_id=lease))
            next(pieces)
            with refused(EXHAUSTED):
                peer.read(lease)
            assert counted.of("kvstore_refused_requests_total") == {("streams",): 1}
            pieces.cancel()
            peer.release(lease)

    def test_messages_that_are_too_long(self, server: Sidecar, raw: Raw) -> None:
        counted = Counted(server)
        with refused(EXHAUSTED):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt={"token_ids": bytes(17 << 20)}))
        assert counted.of("kvstore_refused_requests_total") == {("message",): 1}

    def test_credentials(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = write_tenants(tmp_path_factory.mktemp("t") / "tenants.toml", Entry("search"))
        with sidecar(tenants_file=str(path)) as server:
            counted = Counted(server)
            with dialled(server.address) as raw, refused(grpc.StatusCode.UNAUTHENTICATED):
                raw.status()
            with (
                dialled(server.address, Credentials(Entry("search").token)) as raw,
                refused(grpc.StatusCode.PERMISSION_DENIED),
            ):
                raw.status()
            assert counted.of("kvstore_refused_requests_total") == {("credentials",): 2}
            with dialled(server.address, Credentials(Entry("search").token)) as raw:
                raw.register(spec("m")).write(PROMPT)
            shown = "".join(get(server, page)[1] for page in PAGES)
            assert '"m"' in shown
            for secret in (Entry("search").token, Entry("search").salt.hex(), '"search"'):
                assert secret not in shown


class TestPages:
    def test_every_metric_is_in_the_table_and_nothing_else(self, server: Sidecar, peer: Peer) -> None:
        peer.release(peer.hold(PROMPT, "r"))
        families = list(text_string_to_metric_families(get(server, "/metrics")[1]))
        named = {family.name + ("_total" if family.type == "counter" else "") for family in families}
        assert {name for name in named if not name.endswith("_created")} == set(METRICS)

    def test_nothing_that_identifies_a_prompt_or_a_tenant(self, server: Sidecar, peer: Peer) -> None:
        text = "".join(get(server, page)[1] for page in PAGES)
        assert peer.request.spec.model in text
        for secret in (peer.answer.namespace, peer.chain(PROMPT).hashes[:16]):
            assert secret.hex() not in text

    def test_models_are_bounded(self, server: Sidecar, raw: Raw) -> None:
        for at in range(60):
            raw.register(spec(f"m-{at}")).acquire(tokens_of(1), "r")
        models = {
            dict(labels)["model"] for name, labels in scrape(server) if name == "kvstore_asked_tokens_total"
        }
        assert len(models) == 51
        assert "other" in models

    def test_the_page_is_told_what_metrics_say(self, server: Sidecar, peer: Peer) -> None:
        """Every count and gauge, all models together; nothing that /metrics does not have."""
        peer.release(peer.hold(PROMPT, "r"))
        # What beside the store follows is counted a moment later.
        assert eventually(lambda: told(server) == said(server)), (told(server), said(server))
        live = json.loads(get(server, "/live.json")[1])
        assert (live["state"], live["ready"]) == ("serving", True)
        models = {use["model"]: use for use in live["namespaces"]}
        use = models[peer.request.spec.model]
        assert (use["blocks"], use["bytes"], use["block_size"]) == (8, 8192, 16)

    def test_an_hour_of_them_is_remembered(self, server: Sidecar) -> None:
        first, later = (json.loads(get(server, page)[1]) for page in ("/history.json", "/live.json"))
        assert first["instance"] == later["instance"]
        names = {series["name"] for series in first["series"]}
        assert "kvstore_pool_bytes" in names
        assert {len(series["values"]) for series in first["series"]} == {len(first["ages_seconds"])}

    def test_health(self, server: Sidecar) -> None:
        assert get(server, "/healthz") == (200, "ok\n")

    def test_readiness_names_each_tier(self, server: Sidecar) -> None:
        status, body = get(server, "/readyz")
        found: dict[str, Any] = json.loads(body)
        assert (status, found["ready"], found["state"]) == (200, True, "serving")
        assert set(found["tiers"]) == {"host", "redis"}

    @pytest.mark.parametrize(
        ("accept", "kind"),
        [
            ("application/openmetrics-text;version=1.0.0,text/plain;q=0.3", "application/openmetrics-text"),
            ("application/openmetrics-text;version=new;escaping==", "application/openmetrics-text"),
            ("text/plain;version=1.x.0, */*", "text/plain"),
            ("\xff;;,=,", "text/plain"),
        ],
    )
    def test_any_accept_header_is_answered(self, server: Sidecar, accept: str, kind: str) -> None:
        request = urllib.request.Request(f"{server.serving['http']}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers.get_content_type() == kind
            assert b"kvstore_build_info" in answer.read()

    def test_what_is_not_there(self, server: Sidecar) -> None:
        status, body = get(server, "/env")
        assert status == 404
        assert all(path in body for path in ("/, ", *PAGES[1:], "/healthz", "/readyz"))

    def test_no_port_is_wanted(self) -> None:
        with sidecar(http_listen="none") as server, dialled(server.address) as raw:
            assert server.serving["http"] is None
            assert raw.register(spec("m")).matched(PROMPT) == 0


def test_a_scrape_while_it_drains() -> None:
    """The last counts are there until the end; the page says what goes on."""
    with sidecar(pool_bytes="4MiB") as server, dialled(server.address) as raw:
        peer = raw.register(spec("m"))
        peer.write(PROMPT)
        lease = peer.hold(PROMPT, "r")
        server.process.terminate()
        assert eventually(lambda: json.loads(get(server, "/live.json")[1])["state"] == "draining")
        assert [get(server, page)[0] for page in (*PAGES, "/healthz")] == [200] * 5
        assert get(server, "/readyz")[0] == 503
        assert scrape(server)["kvstore_leases", ()] == 1
        peer.release(lease)
        assert server.process.wait(20) == 0


@pytest.mark.redis
class TestRedis:
    def test_a_tier_that_is_down_is_named_and_the_server_stays_ready(self, valkey: ValkeyServer) -> None:
        """Redis costs hits, never the service; it comes back by itself (cases 25, 26)."""
        with sidecar(redis_url=valkey.url) as server, dialled(server.address) as raw:

            def tier() -> dict[str, Any]:
                status, body = get(server, "/readyz")
                assert status == 200
                found: dict[str, Any] = json.loads(body)["tiers"]["redis"]
                return found

            peer = raw.register(spec("m"))
            peer.write(PROMPT)
            assert eventually(lambda: valkey.client.dbsize() == 8)
            assert tier() == {"healthy": True, "reason": ""}
            healthy = ("kvstore_tier_healthy", (("tier", "redis"),))
            assert scrape(server)[healthy] == 1

            def ask(seed: int) -> None:
                peer.acquire(tokens_of(2, seed=seed), f"r{seed}", wait_seconds=0.1)

            valkey.stop()
            try:
                assert eventually(_repeatedly(ask, lambda: not tier()["healthy"]), 20)
                assert tier()["reason"]
                assert scrape(server)[healthy] == 0
            finally:
                valkey.resume()
            assert eventually(_repeatedly(ask, lambda: tier()["healthy"]), 20)
            assert peer.write(tokens_of(3, seed=1000))
            assert eventually(lambda: valkey.client.dbsize() == 11)
            assert scrape(server)[healthy] == 1


def _repeatedly(act: Callable[[int], None], condition: Callable[[], bool]) -> Callable[[], bool]:
    """A condition that is looked at after acting once more."""
    seeds = iter(range(2000, 1_000_000))

    def acted() -> bool:
        act(next(seeds))
        return condition()

    return acted
