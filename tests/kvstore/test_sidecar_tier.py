"""A sidecar as the lowest tier of a worker's store: away, stopped, restarted, full, of a tenant."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hashing import Extras
from kvstore.block import WHOLE, BlockRows, Chain, MissCause, TierName
from kvstore.service.client import Client, ClientOptions
from kvstore.service.client.tier import SidecarTier
from kvstore.service.operator import Operator
from kvstore.spec import NamespaceSpec
from kvstore.tiers.base import SaveOutcome, TierMatch
from tests.support.clients import MAPPED, STREAMED, Kind, eventually
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import RigOptions, make_chain, make_rig, make_spec, payload_of
from tests.support.tenants import Entry, write_tenants
from tests.support.tier_cases import Case
from tests.support.valkey import ValkeyServer, shared_valkey

__all__ = ["shared_valkey"]

SPEC = make_spec()
ROWS = make_chain(SPEC, "abcd").rows(WHOLE)
SLACK_SECONDS = 2.0
UNAVAILABLE = TierMatch(0, MissCause.UNAVAILABLE)

both_ways = pytest.mark.parametrize("kind", [MAPPED, STREAMED], ids=str)


@contextmanager
def tier_of(
    address: str,
    *,
    kind: Kind = MAPPED,
    token: str | None = None,
    spec: NamespaceSpec = SPEC,
    reconnect_seconds: float = 0.1,
) -> Iterator[Case]:
    options = ClientOptions(rpc_seconds=5.0, reconnect_seconds=reconnect_seconds, map_pool=kind.mapped)
    tier = SidecarTier(Client(address, token=token, options=options), [spec], time.monotonic)
    try:
        yield Case(tier, lambda rows, block: None)
    finally:
        tier.close()


@contextmanager
def stopped(server: Sidecar) -> Iterator[None]:
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.resume()


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    """Any test may kill it and start it again; each has a model of its own."""
    with sidecar(log_level="error") as running:
        yield running


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> NamespaceSpec:
    return make_spec(request.node.name)


def in_a_moment() -> float:
    return time.monotonic() + 0.1


def rows_of(spec: NamespaceSpec, letters: str) -> BlockRows:
    return make_chain(spec, letters).rows(WHOLE)


def causes_of(case: Case, rows: BlockRows) -> set[MissCause | None]:
    return set(case.load(rows)[0].causes)


def leases_of(server: Sidecar) -> int:
    with Operator(server.address) as operator:
        return operator.status().leases


def test_it_is_away_from_the_start_and_comes(
    server: Sidecar, spec: NamespaceSpec, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(spec, "abcd")
    server.kill()
    with tier_of(server.address, spec=spec) as case, caplog.at_level(logging.WARNING):
        assert isinstance(case.tier, SidecarTier)
        assert case.tier.status().healthy, "nobody has asked yet"
        began = time.monotonic()
        case.tier.greet(5.0)
        assert not case.tier.status().healthy
        for _ in range(20):
            assert case.tier.match(rows, began + 5) == UNAVAILABLE
            assert causes_of(case, rows) == {MissCause.UNAVAILABLE}
            assert set(case.save(rows)) == {SaveOutcome.UNAVAILABLE}
        assert time.monotonic() - began < SLACK_SECONDS
        assert len(caplog.records) == 1
        assert server.address in case.tier.status().reason
        server.restart()
        eventually(lambda: case.save(rows) == [SaveOutcome.STORED] * 4)
        case.assert_holds(rows)
        assert case.tier.status().healthy
        assert len(caplog.records) == 2, "it answers again"


def test_it_is_killed_and_started_again(server: Sidecar, spec: NamespaceSpec) -> None:
    """The blocks are in the pool that the next one takes over; the client finds it by itself."""
    rows = rows_of(spec, "abcd")
    with tier_of(server.address, spec=spec) as case:
        assert case.save(rows.slice(0, 2)) == [SaveOutcome.STORED] * 2
        server.kill()
        assert case.match(rows) == 0
        assert causes_of(case, rows) <= {MissCause.UNAVAILABLE, MissCause.STALE}
        server.restart()
        eventually(lambda: case.match(rows) == 2)
        assert case.save(rows) == [SaveOutcome.PRESENT] * 2 + [SaveOutcome.STORED] * 2
        case.assert_holds(rows)


@both_ways
def test_the_deadline_holds_where_it_does_not_answer(
    server: Sidecar, spec: NamespaceSpec, kind: Kind
) -> None:
    rows = rows_of(spec, "abcd")
    payloads = [payload_of(rows, block) for block in range(4)]
    with tier_of(server.address, kind=kind, spec=spec, reconnect_seconds=0.4) as case:
        assert case.save(rows) == [SaveOutcome.STORED] * 4
        with stopped(server):
            destinations = [payload.copy() for payload in payloads]
            began = time.monotonic()
            assert case.tier.match(rows, in_a_moment()) == TierMatch(0, MissCause.TIMEOUT)
            assert set(case.tier.load(rows, destinations, in_a_moment()).causes) == {MissCause.TIMEOUT}
            assert set(case.tier.save(rows, payloads, [0] * 4, in_a_moment())) == {SaveOutcome.TIMEOUT}
            assert time.monotonic() - began < 0.3 + SLACK_SECONDS
            assert not case.tier.status().healthy, "given up after three calls, which then take no time"
            assert case.tier.match(rows, time.monotonic() + 5) == UNAVAILABLE
        eventually(lambda: case.match(rows) == 4)
        case.assert_holds(rows)
        assert case.tier.status().healthy
    eventually(lambda: leases_of(server) == 0)


def test_loads_leave_no_lease(server: Sidecar, spec: NamespaceSpec) -> None:
    rows = rows_of(spec, "abcd")
    with tier_of(server.address, spec=spec) as case:
        case.save(rows)
        case.assert_holds(rows)
        assert leases_of(server) == 0


def test_it_is_full(server: Sidecar) -> None:
    """Tails are refused, heads are taken: as from any tier."""
    spec = make_spec("large", payload_bytes=900 << 10)
    rows = rows_of(spec, "".join(chr(0x4E00 + number) for number in range(40)))
    payloads = [payload_of(rows, block, 900 << 10) for block in range(40)]
    with Operator(server.address) as operator:
        operator.clear()
    with tier_of(server.address, spec=spec) as case:
        outcomes = case.save(rows, payloads)
        stored = outcomes.count(SaveOutcome.STORED)
        assert outcomes == [SaveOutcome.STORED] * stored + [SaveOutcome.FULL] * (40 - stored)
        assert 0 < stored < 40
        assert case.match(rows) == stored


def test_what_it_was_not_told_of(server: Sidecar, spec: NamespaceSpec) -> None:
    """Another model's blocks, and blocks that nobody knows the prompt of."""
    with tier_of(server.address, spec=spec) as case:
        assert case.tier.match(ROWS, time.monotonic() + 5) == TierMatch(0, MissCause.COLD)
        assert causes_of(case, ROWS) == {MissCause.COLD}
        assert set(case.save(ROWS)) == {SaveOutcome.REFUSED}
        orphans = replace(rows_of(spec, "abcd"), chain=None)
        assert case.match(orphans) == 0
        assert causes_of(case, orphans) == {MissCause.UNKNOWN}
        assert set(case.save(orphans)) == {SaveOutcome.REFUSED}
        assert case.tier.status().healthy


def test_a_tenants_sidecar(tmp_path: Path) -> None:
    """It gives the namespace a root of its own: blocks are there under the hashes that it would compute."""
    own, other = Entry("own", "maps_pool = true\n"), Entry("other")
    extras = [None, Extras(request_salt=b"a"), Extras(request_salt=b"b")]
    prompts = [Chain.of(SPEC.root, list(range(16)), each) for each in extras]
    with sidecar(tenants_file=str(write_tenants(tmp_path / "tenants", own, other))) as server:
        with tier_of(server.address, token=own.token) as case:
            for prompt in prompts:
                assert case.match(prompt.rows(WHOLE)) == 0
                assert case.save(prompt.rows(WHOLE)) == [SaveOutcome.STORED] * 4
            for prompt in prompts:
                case.assert_holds(prompt.rows(WHOLE))
                case.assert_holds(prompt.rows(WHOLE, 2))
                assert case.match(prompt.rows(WHOLE, 2)) == 2
            with Client(server.address, token=own.token) as client:
                assert client.namespace(SPEC).lookup(list(range(16)), extras=extras[1]).matched_tokens == 16
        with tier_of(server.address, token=other.token) as case:
            assert case.match(prompts[0].rows(WHOLE)) == 0
            case.save(prompts[0].rows(WHOLE))
            case.assert_holds(prompts[0].rows(WHOLE, 1))
        with tier_of(server.address, token="no-token-of-anybody-1234") as case:
            assert case.tier.match(ROWS, time.monotonic() + 5) == UNAVAILABLE
            assert not case.tier.status().healthy
            assert "token" in case.tier.status().reason


@pytest.mark.redis
def test_the_redis_below_it(shared_valkey: ValkeyServer) -> None:
    """What has left the sidecar's memory comes back through it."""
    shared_valkey.clear()
    with sidecar(redis_url=shared_valkey.url) as server, tier_of(server.address) as case:
        case.save(ROWS)
        eventually(lambda: shared_valkey.client.dbsize() == 4)
        with Operator(server.address) as operator:
            operator.clear()
        assert case.match(ROWS) == 4
        case.assert_holds(ROWS.slice(1, 4))
        case.assert_holds(ROWS)


def test_two_stores_over_one_sidecar(server: Sidecar, spec: NamespaceSpec) -> None:
    """What one computes the other finds, and both say that it came from the sidecar."""
    chain = make_chain(spec, "abcdef", tail=1)
    with (
        tier_of(server.address, spec=spec) as first,
        tier_of(server.address, spec=spec) as second,
        make_rig(time.monotonic, [(spec, (WHOLE,))], RigOptions(redis=first.tier)) as writer,
        make_rig(time.monotonic, [(spec, (WHOLE,))], RigOptions(redis=second.tier)) as reader,
    ):
        writer.write(chain)
        assert writer.store.drain(10.0)
        found = reader.store.lookup(chain, tiers={TierName.SIDECAR})
        assert found.alone == {TierName.SIDECAR: 24}
        lease = reader.store.acquire("request", chain)
        reader.store.wait(lease, 10.0)
        reader.assert_promised(lease)
        assert lease.hit_blocks(lease.blocks) == {TierName.SIDECAR: 6}
        reader.store.release(lease)
        assert set(reader.store.status()) == {TierName.HOST, TierName.SIDECAR}
