"""A block is loaded from redis only when that is expected to be faster than to compute it.

A second request with a Redis hit was slower than the first without (LMCache #914 #1239 #1238).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.block import WHOLE, BlockRows, Chain, MissCause, Shard, TierName
from kvstore.events import BytesMoved, RequestSettled
from kvstore.lease import Lease
from kvstore.spec import NamespaceSpec
from kvstore.store import StoreOptions
from kvstore.store.load_gate import LoadGate
from kvstore.tiers.base import LoadResult, Payload
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.v1 import admin_pb2
from tests.support.clients import MAPPED, client_of, put
from tests.support.clients import eventually as until
from tests.support.dict_tier import DictTier
from tests.support.observed import Counted
from tests.support.proxy import Behaviour, Proxy
from tests.support.sidecars import sidecar
from tests.support.stores import SPLIT, FakeClock, Rig, RigOptions, make_chain, make_rig, make_spec
from tests.support.stubs import dialled
from tests.support.valkey import ValkeyServer, shared_valkey, start_valkey, valkey

__all__ = ["shared_valkey", "start_valkey", "valkey"]

SPEC = make_spec(payload_bytes=8192)
FAST = Behaviour()
DRIPPING = Behaviour(delay_seconds=0.005, piece_bytes=2048)
"""400 kB/s: a block takes 20 ms."""
TOKENS_PER_SECOND = 1000.0
"""A block takes 4 ms."""
PATIENT = StoreOptions(probe_seconds=5.0, recompute_tokens_per_second=TOKENS_PER_SECOND)
PROMPTS = [make_chain(SPEC, "abcdef" + 3 * chr(0x4E00 + number)) for number in range(12)]
"""Of nine blocks, of which the first six are the same."""


class TestModel:
    def test_nothing_known_is_no_reason_to_wait(self) -> None:
        gate = LoadGate(1000.0, FakeClock())
        assert gate.expected_seconds(1 << 30) == 0.0
        assert gate.allows(1 << 30, 1)

    def test_a_load_takes_a_round_trip_and_time_for_each_byte(self) -> None:
        gate = LoadGate(1000.0, FakeClock())
        gate.answered(0.010)
        gate.loaded(1000, 0.110)
        assert gate.expected_seconds(1000) == pytest.approx(0.110)
        assert gate.expected_seconds(10_000) == pytest.approx(1.010)
        assert gate.allows(1000, 111)
        assert not gate.allows(1000, 110)

    def test_a_short_load_may_not_be_worth_the_round_trip(self) -> None:
        gate = LoadGate(1000.0, FakeClock())
        gate.answered(0.100)
        gate.loaded(10_000, 0.110)
        assert not gate.allows(100, 16), "100 ms against 16"
        assert gate.allows(10_000, 1600)

    def test_measures_change_by_orders_of_magnitude(self) -> None:
        gate = LoadGate(1000.0, FakeClock())
        gate.loaded(1000, 1e-3)
        gate.loaded(1000, 1.0)
        assert gate.expected_seconds(1000) == pytest.approx(0.0316, rel=0.01)
        for _ in range(3):
            gate.loaded(1000, 1e-3)
        assert gate.expected_seconds(1000) < 2e-3

    @pytest.mark.parametrize("seconds", [0.0, 1e-12])
    def test_what_took_no_time_is_fast(self, seconds: float) -> None:
        gate = LoadGate(1e9, FakeClock())
        gate.answered(seconds)
        gate.loaded(1 << 40, seconds)
        assert 0 < gate.expected_seconds(1 << 40) < 1e-3

    def test_without_a_rate_everything_is_let_through(self) -> None:
        gate = LoadGate(None, FakeClock())
        gate.loaded(1, 1e6)
        assert gate.allows(1 << 40, 0)

    def test_loads_for_their_own_sake_are_short_and_rare(self) -> None:
        clock = FakeClock()
        gate = LoadGate(1000.0, clock)
        gate.loaded(1 << 20, 0.02)
        assert gate.explored_blocks(1 << 18, 100) == 16, "four MiB"
        gate.loaded(1 << 20, 20.0)
        clock.advance(1.5)
        assert gate.explored_blocks(1 << 16, 100) == 0, "they took 80 ms"
        clock.advance(0.2)
        assert gate.explored_blocks(1 << 16, 100) == 2, "of 40 ms each"
        clock.advance(1.5)
        assert gate.explored_blocks(1 << 20, 100) == 0
        clock.advance(0.2)
        assert gate.explored_blocks(1 << 20, 100) == 1, "at least a block"
        clock.advance(12.6)
        assert gate.explored_blocks(1 << 20, 100) == 0
        clock.advance(0.2)
        assert gate.explored_blocks(1 << 16, 1) == 1, "no more than there are"

    def test_an_outage_that_is_over_is_not_waited_for_again(self) -> None:
        """What was expected to take ten seconds would forbid another one for minutes; it was short."""
        clock = FakeClock()
        gate = LoadGate(1000.0, clock)
        gate.loaded(1 << 20, 10.0)
        assert gate.explored_blocks(1 << 20, 100) == 1
        clock.advance(0.01)
        gate.loaded(1 << 20, 0.01)
        assert gate.explored_blocks(1 << 20, 100) == 0
        clock.advance(1.0)
        assert gate.explored_blocks(1 << 20, 100) == 1


class StallingTier(DictTier):
    """Loads end when the test lets them go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        assert self.go_on.wait(10)
        return super().load(rows, destinations, deadline)


def test_a_rank_that_is_measured_answers_for_all() -> None:
    """Another rank's part is here: what the one lacks is not asked for again until its load has ended."""
    spec, redis = make_spec("ranks"), StallingTier()
    chain = make_chain(spec, "abcd")
    options = StoreOptions(recompute_tokens_per_second=1e12)
    with make_rig(time.monotonic, [(spec, SPLIT)], RigOptions(redis=redis, store=options)) as rig:
        for shard in SPLIT:
            rig.write(chain, shard)
        rig.settle()
        rig.store.clear(None)
        first = rig.store.acquire("first", chain, SPLIT[:1])
        rig.store.wait(first, 10)
        assert first.blocks == 4, "nothing was known"
        rig.store.release(first)
        rig.store.clear(None)
        rig.write(chain, SPLIT[1])
        redis.go_on.clear()
        leases = []
        for name in ("refused", "later"):
            leases.append(rig.store.acquire(name, chain, SPLIT))
            rig.store.wait(leases[-1], 0.5)
        assert [(lease.pending, lease.cause) for lease in leases] == [(0, MissCause.SLOWER)] * 2
        redis.go_on.set()
        for lease in leases:
            rig.store.release(lease)
        rig.settle()
        rig.store.check()


class Skipping:
    """The machine's clock, which a test may set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Bench:
    """Stores with empty memory above a server that has all prompts, behind a proxy."""

    def __init__(self, proxy: Proxy, clock: Skipping, rig: Rig) -> None:
        self.proxy = proxy
        self.clock = clock
        self.rig = rig

    def ask(self, chain: Chain, shards: tuple[Shard, ...] = (WHOLE,)) -> Lease:
        """A request that waits for all that comes, and compares it."""
        lease = self.rig.store.acquire("r", chain, shards)
        self.rig.store.wait(lease, 20.0)
        self.rig.assert_promised(lease)
        self.rig.store.release(lease)
        return lease

    def forget(self) -> None:
        """Nothing is in memory, and nothing on its way there."""
        self.rig.settle()
        self.rig.store.clear(None)

    @property
    def last(self) -> RequestSettled:
        return self.rig.events.of(RequestSettled)[-1]

    @property
    def loaded(self) -> int:
        """Blocks that came from redis, for whatever reason."""
        moved = [event for event in self.rig.events.of(BytesMoved) if event.source is TierName.REDIS]
        return sum(event.payload_bytes for event in moved) // 8192


@contextmanager
def bench_on(
    proxy: Proxy, options: StoreOptions, known: tuple[NamespaceSpec, tuple[Shard, ...]] = (SPEC, (WHOLE,))
) -> Iterator[Bench]:
    clock = Skipping()
    redis = RedisTier(RedisOptions(f"redis://127.0.0.1:{proxy.port}", connections=1), clock)
    with make_rig(clock, [known], RigOptions(8, redis=redis, store=options)) as rig:
        yield Bench(proxy, clock, rig)
        rig.settle()
        rig.store.check()
        assert rig.store.leases == 0


@pytest.fixture
def proxy(valkey: ValkeyServer) -> Iterator[Proxy]:
    redis = RedisTier(RedisOptions(valkey.url), time.monotonic)
    with make_rig(time.monotonic, [(SPEC, (WHOLE,))], RigOptions(32, redis=redis)) as rig:
        for chain in PROMPTS:
            rig.write(chain)
        assert rig.store.drain(10)
    valkey.client.config_resetstat()
    with Proxy(valkey.port, DRIPPING) as made:
        yield made


@pytest.fixture
def bench(proxy: Proxy) -> Iterator[Bench]:
    with bench_on(proxy, PATIENT) as made:
        yield made


@pytest.mark.redis
class TestStore:
    def test_a_load_that_is_slower_than_computing_is_made_once(
        self, bench: Bench, valkey: ValkeyServer
    ) -> None:
        first = bench.ask(PROMPTS[0])
        assert (first.blocks, bench.loaded) == (9, 9), "nothing was known"
        bench.forget()
        bench.clock.ahead += 0.5
        second = bench.ask(PROMPTS[1])
        assert (second.blocks, second.cause) == (0, MissCause.SLOWER)
        assert bench.last.miss_tokens == {MissCause.SLOWER: 36}
        assert bench.last.tier_asked[TierName.REDIS] == 36

    def test_who_is_refused_does_not_wait_for_the_load_that_measures(self, bench: Bench) -> None:
        bench.ask(PROMPTS[0])
        bench.forget()
        bench.clock.ahead += 60
        lease = bench.rig.store.acquire("r", PROMPTS[1])
        bench.rig.store.wait(lease, 20.0)
        assert (lease.blocks, lease.pending, lease.cause) == (0, 0, MissCause.SLOWER)
        assert not bench.rig.store.idle, "it goes on, for nobody"
        another = bench.rig.store.acquire("another", PROMPTS[1])
        assert (another.pending, another.cause) == (0, MissCause.SLOWER), "nor does who comes later"
        bench.rig.store.release(another)
        bench.rig.store.release(lease)
        bench.rig.settle()
        explored = bench.loaded - 9
        assert 1 <= explored < 9, "a short one"
        lease = bench.ask(PROMPTS[1])
        assert lease.hit_blocks(9) == {TierName.HOST: explored}, "and it was of use"

    def test_a_server_that_is_fast_again_is_used_again(self, bench: Bench) -> None:
        bench.ask(PROMPTS[0])
        bench.forget()
        bench.proxy.behaviour = FAST
        blocks = []
        for chain in PROMPTS[1:]:
            bench.clock.ahead += 30
            blocks.append(bench.ask(chain).blocks)
            bench.forget()
        assert blocks[0] == 0
        assert blocks[-1] == 9
        assert blocks.count(0) <= 6, blocks

    def test_a_server_that_becomes_slow_is_noticed(self, bench: Bench) -> None:
        bench.proxy.behaviour = FAST
        for chain in PROMPTS[:2]:
            assert bench.ask(chain).blocks == 9
            bench.forget()
        bench.proxy.behaviour = DRIPPING
        refused = []
        for chain in PROMPTS[2:8]:
            refused.append(bench.ask(chain).cause is MissCause.SLOWER)
            bench.forget()
        assert not refused[0]
        assert refused[-1]
        assert sum(refused) >= 3, refused

    def test_a_rest_that_is_in_memory_by_then_is_a_hit(self, bench: Bench) -> None:
        """What is here needs no load, and ends where the first load would begin."""
        bench.ask(PROMPTS[0])
        bench.forget()
        bench.clock.ahead += 0.1
        bench.rig.write(make_chain(SPEC, "ab"))
        lease = bench.ask(PROMPTS[1])
        assert (lease.blocks, lease.cause) == (2, MissCause.SLOWER)
        assert bench.last.hit_tokens == {TierName.HOST: 8}
        assert bench.last.miss_tokens == {MissCause.SLOWER: 28}

    def test_who_was_counted_before_waits_all_the_same(self, bench: Bench) -> None:
        bench.ask(PROMPTS[0])
        bench.forget()
        lease = bench.rig.store.acquire_uncounted(("", "back from a preemption"), PROMPTS[1])
        bench.rig.store.wait(lease, 20.0)
        assert (lease.blocks, lease.cause) == (0, MissCause.SLOWER)
        bench.rig.store.release(lease)

    def test_who_prefetches_does_not_wait_and_gets_it(self, bench: Bench) -> None:
        bench.ask(PROMPTS[0])
        bench.forget()
        bench.clock.ahead += 60
        lease = bench.rig.store.acquire_uncounted(("", "prefetch"), PROMPTS[1], waits=False)
        bench.rig.store.wait(lease, 20.0)
        assert lease.blocks == 9
        bench.rig.store.release(lease)

    def test_who_prefetches_while_it_is_measured_gets_all(self, bench: Bench) -> None:
        """The load that measures is short; the rest is asked for again."""
        bench.ask(PROMPTS[0])
        bench.forget()
        bench.clock.ahead += 60
        refused = bench.rig.store.acquire("r", PROMPTS[1])
        bench.rig.store.wait(refused, 20.0)
        lease = bench.rig.store.acquire_uncounted(("", "prefetch"), PROMPTS[1], waits=False)
        bench.rig.store.wait(lease, 20.0)
        assert (refused.blocks, lease.blocks) == (0, 9)
        bench.rig.store.release(lease)
        bench.rig.store.release(refused)

    def test_loads_that_come_too_late_count_as_slow(self, proxy: Proxy) -> None:
        with bench_on(proxy, replace(PATIENT, flight_seconds=0.1)) as bench:
            assert bench.ask(PROMPTS[0]).cause is MissCause.TIMEOUT
            bench.forget()
            bench.clock.ahead += 1.5
            assert bench.ask(PROMPTS[1]).cause is MissCause.SLOWER

    def test_ranks_that_load_at_once_are_not_slow(self, proxy: Proxy) -> None:
        """Eight parts of a prompt share a link: each waits for the others, and the link is no slower."""
        known = make_spec("ranks"), tuple(Shard(rank, 8) for rank in range(8))
        chains = [make_chain(known[0], letters) for letters in ("abcd", "efgh", "ijkl")]
        proxy.behaviour = FAST
        # 8 x 4 blocks of 1.4 kB take 110 ms; to compute them, 400 ms.
        options = replace(PATIENT, recompute_tokens_per_second=40.0)
        with bench_on(proxy, options, known) as bench:
            for chain in chains:
                for shard in known[1]:
                    bench.rig.write(chain, shard)
            bench.forget()
            proxy.behaviour = DRIPPING
            blocks = []
            for chain in chains:
                blocks.append(bench.ask(chain, known[1]).blocks)
                bench.forget()
            assert blocks == [4, 4, 4]

    def test_without_a_rate_all_is_loaded(self, proxy: Proxy) -> None:
        with bench_on(proxy, replace(PATIENT, recompute_tokens_per_second=None)) as bench:
            for chain in PROMPTS[:2]:
                assert bench.ask(chain).blocks == 9
                bench.forget()


@pytest.mark.redis
def test_a_sidecar_reports_what_it_did_not_load(valkey: ValkeyServer) -> None:
    spec = make_spec(payload_bytes=8192)
    chains = [make_chain(spec, letters) for letters in ("abcdef", "ghijkl")]
    with (
        Proxy(valkey.port, DRIPPING) as proxy,
        sidecar(
            redis_url=f"redis://127.0.0.1:{proxy.port}",
            redis_probe_seconds=5,
            redis_acquire_seconds=20,
            recompute_tokens_per_second=TOKENS_PER_SECOND,
        ) as server,
        dialled(server.address) as raw,
        client_of(MAPPED, server.address) as client,
    ):
        namespace = client.namespace(spec)
        for chain in chains:
            put(namespace, chain)
        until(lambda: valkey.client.dbsize() == 12 and not raw.pool().leased_bytes)
        raw.admin.Clear(admin_pb2.ClearRequest())
        counted = Counted(raw)
        answers = []
        for chain in chains:
            with namespace.acquire(chain, wait_seconds=20) as lease:
                answers.append((lease.blocks, lease.cause))
        assert answers == [(6, None), (0, MissCause.SLOWER)]
        assert counted.tokens == (48, {"redis": 24}, {"slower": 24})
