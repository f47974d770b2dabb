"""A scripted workload on a real server with a real Valkey gives exact figures, twice, in every place.

Hits in each tier, misses of every cause that a server can be brought to, evictions and failures (cases
43-45 of what users of such systems run into).
"""

from __future__ import annotations

import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import xxhash
from prometheus_client.parser import text_string_to_metric_families

from kvstore.block import HASH_BYTES
from kvstore.v1 import admin_pb2
from tests.support.command_line import Asking
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import YOURS, Peer, Tokens, dialled, fork, spec, tokens_of
from tests.support.valkey import ValkeyServer, eventually, start_valkey

__all__ = ["start_valkey"]

POOL = "64KiB"
FULL = 13
"""Prompts of four blocks that fill the pool, whose slots are larger than the payload."""
MODEL = "golden"
Samples = dict[str, float]

GOLDEN: Samples = {
    'kvstore_asked_tokens_total{model="golden"}': (13 + FULL) * 64 + 3,
    'kvstore_hit_tokens_total{model="golden",tier="host"}': 64 + 32 + FULL * 64,
    'kvstore_hit_tokens_total{model="golden",tier="redis"}': 64,
    'kvstore_miss_tokens_total{cause="cold",model="golden"}': 64 + 32,
    'kvstore_miss_tokens_total{cause="tail",model="golden"}': 3,
    'kvstore_miss_tokens_total{cause="stale",model="golden"}': 32,
    'kvstore_miss_tokens_total{cause="collision",model="golden"}': 64,
    'kvstore_miss_tokens_total{cause="corrupt",model="golden"}': 64 + 64,
    'kvstore_miss_tokens_total{cause="version",model="golden"}': 64,
    'kvstore_miss_tokens_total{cause="evicted",model="golden"}': 64 + 32,
    'kvstore_miss_tokens_total{cause="quota",model="golden"}': 64,
    'kvstore_miss_tokens_total{cause="timeout",model="golden"}': 64,
    'kvstore_miss_tokens_total{cause="unavailable",model="golden"}': 64,
    'kvstore_tier_asked_tokens_total{tier="host"}': (13 + FULL) * 64,
    'kvstore_tier_asked_tokens_total{tier="redis"}': 11 * 64,
    # Behind each of the two damaged values, three good ones were brought up.
    'kvstore_stored_blocks_total{tier="host"}': 4 * (4 + 2 * FULL) + 4 + 3 + 3,
    'kvstore_stored_blocks_total{tier="redis"}': 4 * (4 + 2 * FULL),
    'kvstore_evicted_blocks_total{cause="corrupt",tier="redis"}': 1,
    'kvstore_dropped_blocks_total{cause="full",tier="host"}': 4,
    'kvstore_resident_bytes{model="golden",tier="host"}': 4 * FULL * 1024,
}


def values_of(server: Sidecar) -> Samples:
    """All of /metrics that is not zero, by name and labels in PromQL's form."""
    with urllib.request.urlopen(server.serving["http"] + "/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        f"{sample.name}{{{_labels(sample.labels)}}}": sample.value
        for family in families
        for sample in family.samples
        if sample.value
    }


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))


@dataclass
class Script:
    """The workload, on one server. Each prompt has four blocks and a seed of its own."""

    peer: Peer
    valkey: ValkeyServer
    asked: int = 0

    def run(self) -> None:
        for part in (self.hits, self.stale, self.collision, self.damage, self.evicted, self.quota):
            part()
        self.outage()

    def hits(self) -> None:
        """Cold, then from the host, then from redis; then a prompt of which the second half is new."""
        prompt = tokens_of(4, seed=1, tail=3)
        assert self.ask(prompt) == "cold"
        self.store(prompt[:64])
        assert self.ask(prompt[:64]) == ""
        self.forget()
        assert self.ask(prompt[:64]) == ""

    def stale(self) -> None:
        lease = self.peer.hold(tokens_of(4, seed=1), "stale")
        self.peer.release(lease, 2)

    def collision(self) -> None:
        """Other tokens under the hashes of a prompt that is there."""
        prompt = tokens_of(4, seed=1)
        message = self.peer.prompt(fork(prompt, 0), block_hashes=self.peer.chain(prompt).hashes)
        assert self.ask(prompt, prompt=message) == "collision"

    def damage(self) -> None:
        """A value with a wrong byte; asked for again it is still the damage that it is missed for."""
        prompt = tokens_of(4, seed=2)
        self.store(prompt)
        self.forget()
        key = self.keys(prompt)[0]
        value = self.valkey.value(key)
        self.valkey.client.set(key, value[:-1] + bytes([value[-1] ^ 1]))
        assert self.ask(prompt) == "corrupt"
        assert self.ask(prompt) == "corrupt"
        prompt = tokens_of(4, seed=3)
        self.store(prompt)
        self.forget()
        key = self.keys(prompt)[0]
        self.valkey.client.set(key, of_next_version(self.valkey.value(key)))
        assert self.ask(prompt) == "version"

    def evicted(self) -> None:
        """Pushed out of memory and then out of redis; the second time with two new blocks behind two old."""
        prompt = tokens_of(4, seed=4)
        self.store(prompt)
        for seed in range(100, 100 + FULL):
            self.store(tokens_of(4, seed=seed))
        self.valkey.client.delete(*self.keys(prompt))
        assert self.ask(prompt) == "evicted"
        assert self.ask(fork(prompt, 2)) == "evicted"

    def quota(self) -> None:
        """No slot is left to bring anything up into."""
        self.forget()
        held: list[int] = []
        for seed in range(200, 200 + FULL):
            assert self.peer.write(tokens_of(4, seed=seed)) == [YOURS] * 4
            held.append(self.peer.hold(tokens_of(4, seed=seed), f"full-{seed}"))
        assert self.ask(tokens_of(4, seed=100)) == "quota"
        for lease in held:
            self.peer.release(lease)

    def outage(self) -> None:
        """A redis that is silent, then one that is not there."""
        with self.valkey.frozen():
            assert self.ask(tokens_of(4, seed=5)) == "timeout"
        self.valkey.kill()
        assert self.ask(tokens_of(4, seed=6)) == "unavailable"

    def ask(self, tokens: Tokens, **fields: object) -> str:
        """One request, settled with all that it got; why it got no more."""
        self.asked += 1
        found = self.peer.acquire(tokens, f"ask-{self.asked}", wait_seconds=10.0, **fields)
        if found.lease_id:
            self.peer.release(found.lease_id)
        cause: str = found.cause
        return cause

    def store(self, tokens: Tokens) -> None:
        """Written, and in redis as well."""
        self.peer.write(tokens)
        assert eventually(lambda: len(self.keys(tokens)) == len(self.peer.chain(tokens)))

    def keys(self, tokens: Tokens) -> list[bytes]:
        """Those in Valkey, in chain order."""
        chain = self.peer.chain(tokens)
        present: list[bytes] = self.valkey.run("KEYS", "*")
        known = {key.rpartition(b":")[2].decode(): key for key in present}
        names = [chain.hashes[at : at + HASH_BYTES].hex() for at in range(0, len(chain.hashes), HASH_BYTES)]
        return [known[name] for name in names if name in known]

    def forget(self) -> None:
        self.peer.raw.admin.Clear(admin_pb2.ClearRequest())


def of_next_version(value: bytes) -> bytes:
    """The value as a later version of the format would begin it."""
    magic, version, length = struct.unpack_from("<4sHH", value)
    start = struct.pack("<4sHH", magic, version + 1, length)
    checksum = xxhash.xxh3_64_intdigest(start + value[16:length])
    return start + checksum.to_bytes(8, "little") + value[16:]


@contextmanager
def golden_server(valkey: ValkeyServer) -> Iterator[Sidecar]:
    """With little room."""
    with sidecar(pool_bytes=POOL, extent_bytes=POOL, redis_url=valkey.url) as server:
        yield server


def test_every_figure_is_exact_and_the_same_twice(start_valkey: Callable[..., ValkeyServer]) -> None:
    runs = []
    for _ in range(2):
        valkey = start_valkey()
        with golden_server(valkey) as server, dialled(server.address) as raw:
            Script(raw.register(spec(MODEL)), valkey).run()
            asked = GOLDEN['kvstore_asked_tokens_total{model="golden"}']
            # Ghosts follow beside the server.
            assert eventually(
                lambda: values_of(server)['kvstore_whatif_asked_tokens_total{scale="1"}'] == asked  # noqa: B023
            )
            found = values_of(server)
            assert {name: found.get(name) for name in GOLDEN} == GOLDEN
            assert token_counters(found) == token_counters(GOLDEN)
            assert_same_figures(Asking(server.address).facts("status"), found)
            runs.append({name: value for name, value in found.items() if is_exact(name)})
    assert runs[0] == runs[1]


def token_counters(values: Samples) -> Samples:
    """What was asked, hit and missed: nothing but what the script says."""
    names = ("kvstore_asked", "kvstore_hit", "kvstore_miss")
    return {name: value for name, value in values.items() if name.startswith(names)}


def is_exact(name: str) -> bool:
    """What does not depend on times: no sums of seconds, and no buckets of them."""
    return not any(part in name for part in ("seconds", "_created", "clients", "redis_errors", "build_info"))


def assert_same_figures(facts: dict[str, Any], values: Samples) -> None:
    """``status --json`` and /metrics are two views of one thing."""

    def by(name: str, label: str) -> Samples:
        found = {}
        for key, value in values.items():
            if key.startswith(f"{name}{{") and f'{label}="' in key:
                found[key.partition(f'{label}="')[2].partition('"')[0]] = value
        return found

    assert facts["asked_tokens"] == sum(by("kvstore_asked_tokens_total", "model").values())
    assert facts["hit_tokens"] == by("kvstore_hit_tokens_total", "tier")
    assert facts["miss_tokens"] == by("kvstore_miss_tokens_total", "cause")
    [host] = [tier["pool"] for tier in facts["tiers"] if tier["tier"] == "host"]
    states = {state: host[f"{state}_bytes"] for state in ("free", "staged", "ready", "quarantined")}
    assert {state: size for state, size in states.items() if size} == by("kvstore_pool_bytes", "state")
    assert host["unread_bytes"] == by("kvstore_unread_bytes", "tier").get("host", 0)
    assert host["leased_bytes"] == by("kvstore_leased_bytes", "tier").get("host", 0)
    [busiest] = facts["busiest_namespaces"]
    assert {busiest["model"]: busiest["payload_bytes"]} == by("kvstore_resident_bytes", "model")
    asked, missed = (by(f"kvstore_whatif_{what}_tokens_total", "scale") for what in ("asked", "missed"))
    for each in facts["what_if"]:
        scale = f"{each['scale']:g}"
        assert each["capacity_bytes"] == values[f'kvstore_whatif_capacity_bytes{{scale="{scale}"}}']
        assert each["asked_tokens"] == asked[scale]
        assert each["hit_tokens"] == asked[scale] - missed[scale]


@pytest.mark.parametrize(("seconds", "cause"), [("1s", "expired"), ("1h", "evicted")])
def test_what_redis_forgot_by_its_time_to_live_is_expired(
    start_valkey: Callable[..., ValkeyServer], seconds: str, cause: str
) -> None:
    """A key that is gone before that was evicted there."""
    valkey = start_valkey()
    with sidecar(redis_url=valkey.url, redis_ttl_seconds=seconds) as server, dialled(server.address) as raw:
        peer = raw.register(spec("expiring"))
        script = Script(peer, valkey)
        prompt = tokens_of(4)
        script.store(prompt)
        script.forget()
        if cause == "evicted":
            valkey.client.flushall()

        def causes() -> set[str]:
            return {each.cause for each in peer.explain(prompt).blocks}

        assert eventually(lambda: causes() == {cause}, 10.0), causes()
        assert script.ask(prompt) == cause
        assert dict(raw.status().miss_tokens) == {cause: 64}


def test_without_redis_what_was_cleared_is_unknown() -> None:
    with sidecar() as server, dialled(server.address) as raw:
        peer = raw.register(spec("cleared"))
        peer.write(tokens_of(4))
        raw.admin.Clear(admin_pb2.ClearRequest())
        assert peer.acquire(tokens_of(4), "r").cause == "unknown"
        assert peer.acquire(tokens_of(4, seed=1), "s").cause == "cold"
        assert dict(raw.status().miss_tokens) == {"unknown": 64, "cold": 64}
