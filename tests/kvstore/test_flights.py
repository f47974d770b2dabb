"""Promotions from redis: shared by all who wait, ended by none who gives up, counted where they came from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvstore.block import WHOLE, BlockRows, MissCause, TierName
from kvstore.events import BlocksDropped, DropCause, RequestSettled
from kvstore.store import StoreOptions
from kvstore.tiers.base import LoadResult, Payload, Tier
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import HeldTier
from tests.support.flights import (
    DIVIDED,
    SPEC,
    damage,
    filled_tier,
    finish,
    key_of,
    rig_over,
    settle,
    step,
)
from tests.support.stores import SPLIT, FakeClock, Rig, RigOptions, fill, hash_only, make_chain, make_rig


@pytest.fixture
def redis() -> DictTier:
    return filled_tier()


@pytest.fixture
def held(redis: DictTier) -> HeldTier:
    return HeldTier(redis)


@pytest.fixture
def rig(held: HeldTier) -> Iterator[Rig]:
    with rig_over(held) as made:
        yield made
        held.open()
        made.settle()
        made.store.check()


class TestSharing:
    def test_two_requests_share_one_flight(self, rig: Rig, held: HeldTier) -> None:
        leases = [rig.store.acquire(each, make_chain(SPEC, "abcdef")) for each in ("1", "2")]
        finish(rig, held)
        assert (held.calls["match"], held.blocks["load"]) == (1, 6)
        for lease in leases:
            assert (lease.blocks, lease.pending) == (6, 0)
            rig.assert_promised(lease)
            assert settle(rig, lease).hit_tokens == {TierName.REDIS: 24}

    def test_blocks_are_promised_as_they_come(self, rig: Rig, held: HeldTier) -> None:
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        seen = []
        for _ in range(4):
            step(rig, held)
            rig.assert_promised(lease)
            rig.store.check()
            seen.append(lease.blocks)
        assert seen == [0, 2, 4, 6]

    def test_one_that_comes_while_it_is_on_its_way_joins(self, rig: Rig, held: HeldTier) -> None:
        first = rig.store.acquire("1", make_chain(SPEC, "abcdef"))
        step(rig, held, 2)
        second = rig.store.acquire("2", make_chain(SPEC, "abcdef"))
        assert second.blocks == 2
        finish(rig, held)
        assert held.calls["match"] == 1
        assert first.blocks == second.blocks == 6
        assert settle(rig, second).hit_tokens == {TierName.HOST: 8, TierName.REDIS: 16}

    def test_a_longer_prompt_joins_and_goes_on(self, rig: Rig, held: HeldTier) -> None:
        shorter = rig.store.acquire("1", make_chain(SPEC, "abc"))
        longer = rig.store.acquire("2", make_chain(SPEC, "abcdef"))
        finish(rig, held)
        assert (shorter.blocks, longer.blocks) == (3, 6)
        assert held.blocks["load"] == 6

    def test_a_diverging_prompt_joins_as_far_as_both_agree(self, rig: Rig, held: HeldTier) -> None:
        leases = [rig.store.acquire(each, make_chain(SPEC, each)) for each in ("abcdef", "abxy")]
        finish(rig, held)
        assert [lease.blocks for lease in leases] == [6, 4]
        assert held.blocks["load"] == 8
        for lease in leases:
            rig.assert_promised(lease)

    def test_one_that_diverges_where_the_first_ends_has_not_been_answered(
        self, rig: Rig, held: HeldTier
    ) -> None:
        """Redis lacks the first prompt's next block: that says nothing about the second's."""
        first = rig.store.acquire("1", make_chain(SPEC, "abz"))
        second = rig.store.acquire("2", make_chain(SPEC, "abxy"))
        finish(rig, held)
        assert (first.blocks, first.cause) == (2, MissCause.COLD)
        assert second.blocks == 4

    def test_one_that_starts_further_on_waits_for_the_first(self, rig: Rig, held: HeldTier) -> None:
        first = rig.store.acquire("1", make_chain(SPEC, "abcdef"))
        rig.write(make_chain(SPEC, "ab"))
        second = rig.store.acquire("2", make_chain(SPEC, "abcdef"))
        assert second.blocks == 2
        finish(rig, held)
        assert (first.blocks, second.blocks) == (6, 6)
        assert held.blocks["load"] == 4

    def test_what_somebody_writes_meanwhile_is_not_fetched(self, rig: Rig, held: HeldTier) -> None:
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        rig.write(make_chain(SPEC, "abcdef"))
        finish(rig, held)
        assert held.blocks["load"] == 0
        assert lease.blocks == 6
        assert settle(rig, lease).hit_tokens == {TierName.HOST: 24}

    def test_what_somebody_is_writing_is_left_to_him(self, rig: Rig, held: HeldTier) -> None:
        write = rig.store.write(make_chain(SPEC, "abc"))
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        finish(rig, held)
        assert (lease.blocks, held.blocks["load"]) == (0, 3)
        fill(write)
        write.commit()
        assert rig.resident(rig.host, make_chain(SPEC, "abcdef")) == 6


class SlowFirstLoad(HeldTier):
    """The first batch overtakes nobody: it waits until it is told to go on, the others do not."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.open()
        self.go_on = threading.Event()
        self._first = True

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        is_first, self._first = self._first, False
        if is_first:
            assert self.go_on.wait(10)
        return super().load(rows, destinations, deadline)


def test_what_comes_before_its_turn_is_kept_for_it(redis: DictTier) -> None:
    """Nobody can lease a tail whose head is still on its way, so the flight itself holds it."""
    slow = SlowFirstLoad(redis)
    options = RigOptions(1, 0, 16 << 10, redis=slow, store=StoreOptions(batch_bytes=2048, threads=3))
    with make_rig(FakeClock(), [(SPEC, (WHOLE,))], options) as rig:
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        tail = make_chain(SPEC, "abcdef").rows(WHOLE, 2)
        while len(rig.host.pool.match(tail).slots) < 4:
            assert rig.woken.acquire(timeout=10)
            rig.store.pump()
        assert lease.blocks == 0
        rig.write(make_chain(SPEC, "0123456789"))
        rig.store.check()
        slow.go_on.set()
        rig.settle()
        assert lease.blocks == 6
        rig.assert_promised(lease)


class TestGivingUp:
    def test_a_waiter_that_goes_does_not_end_a_flight(self, rig: Rig, held: HeldTier) -> None:
        gone = rig.store.acquire("1", make_chain(SPEC, "abcdef"))
        stays = rig.store.acquire("2", make_chain(SPEC, "abcdef"))
        step(rig, held, 2)
        rig.store.release(gone)
        finish(rig, held)
        assert (stays.blocks, gone.blocks) == (6, 2)
        rig.store.release(stays)
        assert rig.store.usage()[TierName.HOST].leased == 0

    def test_nor_does_the_last_one(self, rig: Rig, held: HeldTier) -> None:
        rig.store.release(rig.store.acquire("1", make_chain(SPEC, "abcdef")))
        finish(rig, held)
        assert rig.store.usage()[TierName.HOST].leased == 0
        assert rig.store.acquire("2", make_chain(SPEC, "abcdef")).blocks == 6

    def test_who_comes_back_under_the_same_id_is_another_waiter(self, rig: Rig, held: HeldTier) -> None:
        chain = make_chain(SPEC, "abcdef")
        rig.store.release(rig.store.acquire("r", chain))
        again = rig.store.acquire("r", chain)
        finish(rig, held)
        assert (again.blocks, again.pending) == (6, 0)
        assert len(rig.events.of(RequestSettled)) == 1

    def test_a_wait_ends_with_its_budget(self, held: HeldTier) -> None:
        """LMCache #4945 #5255: a stalled redis costs the budget and no more."""
        with make_rig(time.monotonic, [(SPEC, (WHOLE,))], RigOptions(redis=held)) as rig:
            lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
            began = time.monotonic()
            rig.store.wait(lease, 0.1)
            assert 0.1 <= time.monotonic() - began < 2
            assert (lease.blocks, lease.pending) == (0, 1)
            held.open()
            rig.store.wait(lease, 10)
            assert (lease.blocks, lease.pending) == (6, 0)
            began = time.monotonic()
            rig.store.wait(lease, 10)
            assert time.monotonic() - began < 1

    def test_a_store_closes_in_mid_flight(self, held: HeldTier) -> None:
        with rig_over(held) as rig:
            lease = rig.store.acquire("1", make_chain(SPEC, "abcdef"))
            rig.write(make_chain(SPEC, "mnopqrst"))
            step(rig, held)
            other = rig.store.acquire("2", make_chain(SPEC, "xyz"))
            rig.store.pump()
            held.open()
            rig.store.close()
            assert rig.store.idle
            assert lease.pending == other.pending == 0
            rig.store.check()


class TestRoom:
    def test_a_pool_full_of_leases_is_a_shorter_prefix_and_no_wait(self, redis: DictTier) -> None:
        with rig_over(redis, host_extents=1) as rig:
            rig.write(make_chain(SPEC, "0123456789"))
            rig.settle()
            rig.store.acquire("holds", make_chain(SPEC, "0123456789"))
            lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
            rig.settle()
            assert (lease.blocks, lease.cause) == (2, MissCause.QUOTA)
            rig.assert_promised(lease)
            assert settle(rig, lease).miss_tokens == {MissCause.QUOTA: 16}
            assert (4, DropCause.FULL) in [
                (event.blocks, event.cause) for event in rig.events.of(BlocksDropped)
            ]


class TestRanks:
    def test_a_run_is_as_long_as_the_shortest(self, rig: Rig, held: HeldTier, redis: DictTier) -> None:
        """LMCache #1467 #1379 #2903."""
        del redis.values[key_of(2, spec=DIVIDED, shard=SPLIT[1])]
        lease = rig.store.acquire("r", make_chain(DIVIDED, "abcd"), SPLIT)
        finish(rig, held)
        assert (lease.blocks, lease.pending, lease.cause) == (2, 0, MissCause.COLD)
        rig.assert_promised(lease)

    @pytest.mark.parametrize("first", [0, 1])
    def test_the_cause_is_that_of_the_rank_that_broke_first(
        self, rig: Rig, held: HeldTier, redis: DictTier, first: int
    ) -> None:
        """Whichever lands last; and redis is not asked again for what it has answered."""
        damage(redis, key_of(1, spec=DIVIDED, shard=SPLIT[first]))
        del redis.values[key_of(3, spec=DIVIDED, shard=SPLIT[1 - first])]
        lease = rig.store.acquire("r", make_chain(DIVIDED, "abcd"), SPLIT)
        finish(rig, held)
        assert settle(rig, lease).miss_tokens == {MissCause.CORRUPT: 12}
        assert held.calls["match"] == 2


class TestCounting:
    def test_every_token_is_counted_in_the_tier_that_it_came_from(self, rig: Rig, held: HeldTier) -> None:
        """vllm #30522: what a tier was asked for is its own denominator."""
        rig.write(make_chain(SPEC, "abc"))
        first = rig.store.acquire("1", make_chain(SPEC, "a"))
        rig.store.promote(first)
        lease = rig.store.acquire("2", make_chain(SPEC, "abcdefgh", tail=3))
        finish(rig, held)
        event = settle(rig, lease)
        assert event.hit_tokens == {TierName.DEVICE: 4, TierName.HOST: 8, TierName.REDIS: 12}
        assert event.miss_tokens == {MissCause.COLD: 8, MissCause.TAIL: 3}
        assert event.tier_asked == {TierName.DEVICE: 32, TierName.HOST: 28, TierName.REDIS: 20}

    def test_a_promotion_to_the_device_does_not_change_where_it_came_from(
        self, rig: Rig, held: HeldTier
    ) -> None:
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        finish(rig, held)
        assert rig.store.promote(lease) == 6
        assert settle(rig, lease).hit_tokens == {TierName.REDIS: 24}

    def test_who_knows_only_hashes_is_not_served_from_redis(self, rig: Rig, held: HeldTier) -> None:
        """A block is kept under its tokens, and nobody here has them."""
        lease = rig.store.acquire("r", hash_only(make_chain(SPEC, "abcdef")))
        assert (lease.pending, held.calls["match"]) == (0, 0)

    def test_a_lookup_counts_what_follows_in_redis(self, rig: Rig, held: HeldTier, redis: DictTier) -> None:
        held.open()
        rig.write(make_chain(SPEC, "ab"))
        rig.settle()
        found = rig.store.lookup(make_chain(SPEC, "abcdefgh"), tiers=set(TierName))
        assert (found.matched, found.verified) == (24, 8)
        assert found.served == {TierName.HOST: 8, TierName.REDIS: 16}
        assert found.alone[TierName.REDIS] == 24
        redis.discard(make_chain(SPEC, "a").rows(WHOLE), 0.0)
        found = rig.store.lookup(make_chain(SPEC, "abcdefgh"), tiers=set(TierName))
        assert found.matched == 24, "redis lost the head, which is here, and has the rest"
        assert found.alone[TierName.REDIS] == 0
