"""Promotions from a redis that fails, lies, forgets, stalls or dies: hits are lost, requests never."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from kvstore.block import WHOLE, BlockRows, MissCause, TierName
from kvstore.events import BlocksRemoved, RemovalCause, RequestSettled
from kvstore.store import StoreOptions
from kvstore.tiers.base import TierMatch
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_value import block_key
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import Fault, FaultyTier, HeldTier
from tests.support.flights import SPEC, damage, filled_tier, finish, key_of, rig_over, settle, step
from tests.support.stores import Rig, RigOptions, fill, make_chain, make_rig, payload_of
from tests.support.valkey import ValkeyServer, start_valkey

__all__ = ["start_valkey"]


@pytest.fixture
def redis() -> DictTier:
    return filled_tier()


class TestInjected:
    @pytest.fixture
    def faulty(self, redis: DictTier) -> FaultyTier:
        return FaultyTier(redis, 0, {})

    @pytest.fixture
    def rig(self, faulty: FaultyTier) -> Iterator[Rig]:
        with rig_over(faulty) as made:
            yield made
            made.settle()
            made.store.check()

    @pytest.mark.parametrize(
        ("fault", "cause"),
        [
            (Fault.FAIL, MissCause.UNAVAILABLE),
            (Fault.SLOW, MissCause.TIMEOUT),
            (Fault.CRASH, MissCause.UNAVAILABLE),
            (Fault.LOSE, MissCause.COLD),
            (Fault.CORRUPT, MissCause.CORRUPT),
        ],
    )
    def test_it_costs_hits_and_never_the_request(
        self, rig: Rig, faulty: FaultyTier, fault: Fault, cause: MissCause, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL)
        faulty.odds = {fault: 1.0}
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        rig.settle()
        assert (lease.blocks, lease.pending) == (0, 0)
        assert settle(rig, lease).miss_tokens == {cause: 24}
        faulty.odds = {}
        with rig.store.write(make_chain(SPEC, "abcdef")) as write:
            fill(write)
        rig.assert_promised(rig.store.acquire("again", make_chain(SPEC, "abcdef")))

    def test_a_defect_in_a_tier_is_logged_and_hangs_nobody(
        self, rig: Rig, faulty: FaultyTier, caplog: pytest.LogCaptureFixture
    ) -> None:
        faulty.odds = {Fault.CRASH: 1.0}
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        rig.settle()
        assert lease.pending == 0
        assert "background work failed" in caplog.text
        assert "injected: this tier is broken" in caplog.text

    def test_a_corrupt_block_is_reported_as_gone(self, rig: Rig, redis: DictTier) -> None:
        """LMCache #4533 #4558; and what redis has behind it is kept for when the block is back."""
        damage(redis, key_of(2))
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        rig.settle()
        assert (lease.blocks, lease.cause) == (2, MissCause.CORRUPT)
        removed = [event for event in rig.events.of(BlocksRemoved) if event.tier is TierName.REDIS]
        assert [(event.hashes, event.cause) for event in removed] == [(key_of(2)[2], RemovalCause.CORRUPT)]
        rig.write(make_chain(SPEC, "abc"))
        assert rig.resident(rig.host, make_chain(SPEC, "abcdef")) == 6

    def test_what_broke_on_the_way_is_not_why_the_run_ends(self, redis: DictTier) -> None:
        """The corrupt block is computed by somebody else before the rest of the flight arrives."""
        damage(redis, key_of(2))
        held = HeldTier(redis)
        with rig_over(held) as rig:
            lease = rig.store.acquire("r", make_chain(SPEC, "abcdefgh"))
            step(rig, held, 3)
            rig.write(make_chain(SPEC, "abc"))
            finish(rig, held)
            assert lease.blocks == 6
            assert settle(rig, lease).miss_tokens == {MissCause.COLD: 8}

    def test_a_hole_in_redis_is_where_the_run_ends(self, rig: Rig, redis: DictTier) -> None:
        del redis.values[key_of(3)]
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        rig.settle()
        assert (lease.blocks, lease.cause) == (3, MissCause.COLD)
        rig.assert_promised(lease)

    def test_a_server_that_dies_half_way_has_served_the_first_blocks(self, redis: DictTier) -> None:
        served = set()
        for seed in range(10):
            with rig_over(FaultyTier(redis, seed, {Fault.SHORT: 1.0})) as rig:
                lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
                rig.settle()
                rig.assert_promised(lease)
                served.add(lease.blocks)
                settle(rig, lease)
                assert rig.store.usage()[TierName.HOST].staged == 0
        assert len(served) > 2, "the dice are to stop it at several places"

    def test_blocks_that_vanish_between_match_and_load(self, redis: DictTier) -> None:
        """Seen in LMCache 0.5.6: evicted between EXISTS and GET, and the engine hung."""
        held = HeldTier(redis)
        with rig_over(held) as rig:
            lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
            step(rig, held, 2)
            redis.values.clear()
            finish(rig, held)
            assert (lease.blocks, lease.pending, lease.cause) == (2, 0, MissCause.COLD)
            rig.assert_promised(lease)
            assert rig.store.usage()[TierName.HOST].staged == 0

    def test_a_late_answer_is_a_timeout(self, redis: DictTier) -> None:
        class LateLoads(FaultyTier):
            def match(self, rows: BlockRows, deadline: float) -> TierMatch:
                return redis.match(rows, deadline)

        late = LateLoads(redis, 0, {Fault.SLOW: 1.0})
        with rig_over(late) as slow:
            lease = slow.store.acquire("r", make_chain(SPEC, "abcdef"))
            slow.settle()
            assert settle(slow, lease).miss_tokens == {MissCause.TIMEOUT: 24}
            assert slow.store.usage()[TierName.HOST].staged == 0


@pytest.mark.redis
class TestRealServer:
    def rig(self, url: str) -> AbstractContextManager[Rig]:
        tier = RedisTier(RedisOptions(url), time.monotonic)
        options = StoreOptions(probe_seconds=1.0, flight_seconds=1.0)
        return make_rig(time.monotonic, [(SPEC, (WHOLE,))], RigOptions(redis=tier, store=options))

    def ask(self, rig: Rig, request: str, letters: str = "abcdef") -> RequestSettled:
        lease = rig.store.acquire(request, make_chain(SPEC, letters))
        rig.store.wait(lease, 5)
        rig.assert_promised(lease)
        return settle(rig, lease)

    def test_a_second_process_finds_what_the_first_has_computed(
        self, start_valkey: Callable[..., ValkeyServer]
    ) -> None:
        server = start_valkey()
        with self.rig(server.url) as first:
            first.write(make_chain(SPEC, "abcdef"))
            assert first.store.drain(5)
        with self.rig(server.url) as second:
            assert self.ask(second, "r").hit_tokens == {TierName.REDIS: 24}
            assert self.ask(second, "again").hit_tokens == {TierName.HOST: 24}
            second.store.check()

    def test_a_server_that_comes_goes_and_stalls(self, start_valkey: Callable[..., ValkeyServer]) -> None:
        """LMCache #3565 #4945 #5255: hits are lost, requests are not, and nothing has to be restarted."""
        server = start_valkey()
        with self.rig(server.url) as rig:
            rig.write(make_chain(SPEC, "abcdef"))
            assert rig.store.drain(5)
            rig.host.pool.evict(rig.host.pool.extents.classes()[0], 6)
            server.stop()
            lease = rig.store.acquire("stalled", make_chain(SPEC, "abcdef"))
            began = time.monotonic()
            rig.store.wait(lease, 0.2)
            assert time.monotonic() - began < 2, "a stalled server costs the budget of the wait"
            rig.store.release(lease)
            server.resume()
            assert rig.store.usage()[TierName.HOST].leased == 0
            server.kill()
            assert self.ask(rig, "dead").hit_tokens == {}
            server.restart()
            deadline = time.monotonic() + 10
            while TierName.REDIS not in rig.events.of(RequestSettled)[-1].hit_tokens:
                assert time.monotonic() < deadline, "it was not found again"
                rig.write(make_chain(SPEC, "abcdef"))
                rig.store.drain(2)
                rig.host.pool.evict(rig.host.pool.extents.classes()[0], 6)
                self.ask(rig, f"back at {time.monotonic()}")
            rig.store.check()

    def test_one_flipped_byte_is_one_miss(self, start_valkey: Callable[..., ValkeyServer]) -> None:
        """LMCache #4533 #4558."""
        server = start_valkey()
        with self.rig(server.url) as first:
            first.write(make_chain(SPEC, "abc"))
            assert first.store.drain(5)
        rows = make_chain(SPEC, "abc").rows(WHOLE)
        key = block_key("kv", rows, 2)
        flipped = bytes([payload_of(rows, 2)[-1] ^ 1])
        server.client.setrange(key, server.client.strlen(key) - 1, flipped)
        with self.rig(server.url) as second:
            event = self.ask(second, "r", "abc")
            assert event.hit_tokens == {TierName.REDIS: 8}
            assert event.miss_tokens == {MissCause.CORRUPT: 4}
        assert server.client.exists(key) == 0
