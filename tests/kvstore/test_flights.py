"""Promotions from redis: shared by all who wait, ended by none who gives up, and whatever redis does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

from kvstore.block import WHOLE, BlockRows, MissCause, TierName
from kvstore.events import BlocksDropped, BlocksRemoved, DropCause, RemovalCause, RequestSettled
from kvstore.lease import Lease
from kvstore.store import StoreOptions
from kvstore.tiers.base import LoadResult, Payload, Tier
from kvstore.tiers.redis import RedisOptions, RedisTier
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import Fault, FaultyTier, HeldTier
from tests.support.stores import (
    SPLIT,
    FakeClock,
    Rig,
    RigOptions,
    fill,
    hash_only,
    make_chain,
    make_rig,
    make_spec,
    payload_of,
)
from tests.support.valkey import ValkeyServer, start_valkey

__all__ = ["start_valkey"]

SPEC = make_spec()
DIVIDED = make_spec("divided")
BATCH_OF_TWO = StoreOptions(batch_bytes=2048, threads=1)


@pytest.fixture
def redis() -> DictTier:
    """Holds the prompts ``abcdef`` and ``abxy`` of one rank, ``abcd`` of two."""
    tier = DictTier()
    with rig_over(tier)() as writer:
        for letters in ("abcdef", "abxy"):
            writer.write(make_chain(SPEC, letters))
        for shard in SPLIT:
            writer.write(make_chain(DIVIDED, "abcd"), shard)
        writer.settle()
    assert len(tier.values) == 8 + 2 * 4
    return tier


def rig_over(tier: Tier, **changed: int) -> Callable[[], AbstractContextManager[Rig]]:
    """Makes stores with a device tier of 8 blocks and a host tier of 24, empty, above ``tier``."""

    def make() -> AbstractContextManager[Rig]:
        sizes = {"host_extents": 2, "device_extents": 1, "extent_bytes": 16 << 10} | changed
        options = RigOptions(**sizes, device_extent_bytes=8 << 10, redis=tier, store=BATCH_OF_TWO)
        return make_rig(FakeClock(), [(SPEC, (WHOLE,)), (DIVIDED, SPLIT)], options)

    return make


@pytest.fixture
def held(redis: DictTier) -> HeldTier:
    return HeldTier(redis)


@pytest.fixture
def rig(held: HeldTier) -> Iterator[Rig]:
    with rig_over(held)() as made:
        yield made
        held.open()
        made.settle()
        made.store.check()


def step(rig: Rig, held: HeldTier, calls: int = 1) -> None:
    """Let calls through and collect what they brought."""
    for _ in range(calls):
        held.let_one_through()
        assert rig.woken.acquire(timeout=10)
        rig.store.pump()


def finish(rig: Rig, held: HeldTier) -> None:
    held.open()
    rig.settle()


def settle(rig: Rig, lease: Lease) -> RequestSettled:
    rig.store.release(lease)
    event = rig.events.of(RequestSettled)[-1]
    assert event.asked_tokens == sum(event.hit_tokens.values()) + sum(event.miss_tokens.values())
    return event


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
    options = RigOptions(1, 0, 16 << 10, redis=slow, store=StoreOptions(batch_bytes=2048, threads=2))
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
            assert 0.1 <= time.monotonic() - began < 0.6
            assert (lease.blocks, lease.pending) == (0, 1)
            held.open()
            rig.store.wait(lease, 10)
            assert (lease.blocks, lease.pending) == (6, 0)
            began = time.monotonic()
            rig.store.wait(lease, 10)
            assert time.monotonic() - began < 1

    def test_a_store_closes_in_mid_flight(self, held: HeldTier) -> None:
        with rig_over(held)() as rig:
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


class TestTrouble:
    @pytest.fixture
    def faulty(self, redis: DictTier) -> FaultyTier:
        return FaultyTier(redis, 0, {})

    @pytest.fixture
    def rig(self, faulty: FaultyTier) -> Iterator[Rig]:
        with rig_over(faulty)() as made:
            yield made
            made.settle()
            made.store.check()

    @pytest.mark.parametrize(
        ("fault", "cause"),
        [
            (Fault.FAIL, MissCause.COLD),
            (Fault.SLOW, MissCause.COLD),
            (Fault.CRASH, MissCause.COLD),
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
        third = make_chain(SPEC, "abcdef").rows(WHOLE).hash_at(2)
        key = (SPEC.root.digest, str(WHOLE), third)
        redis.values[key] = redis.values[key]._replace(payload=bytes(1024))
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        rig.settle()
        assert (lease.blocks, lease.cause) == (2, MissCause.CORRUPT)
        removed = [event for event in rig.events.of(BlocksRemoved) if event.tier is TierName.REDIS]
        assert [(event.hashes, event.cause) for event in removed] == [(third, RemovalCause.CORRUPT)]
        rig.write(make_chain(SPEC, "abc"))
        assert rig.resident(rig.host, make_chain(SPEC, "abcdef")) == 6

    def test_what_broke_on_the_way_is_not_why_the_run_ends(self, redis: DictTier) -> None:
        """The corrupt block is computed by somebody else before the rest of the flight arrives."""
        key = (SPEC.root.digest, str(WHOLE), make_chain(SPEC, "abcdef").rows(WHOLE).hash_at(2))
        redis.values[key] = redis.values[key]._replace(payload=bytes(1024))
        held = HeldTier(redis)
        with rig_over(held)() as rig:
            lease = rig.store.acquire("r", make_chain(SPEC, "abcdefgh"))
            step(rig, held, 3)
            rig.write(make_chain(SPEC, "abc"))
            finish(rig, held)
            assert lease.blocks == 6
            assert settle(rig, lease).miss_tokens == {MissCause.COLD: 8}

    def test_a_server_that_dies_half_way_has_served_the_first_blocks(
        self, rig: Rig, faulty: FaultyTier, redis: DictTier
    ) -> None:
        del redis.values[(SPEC.root.digest, str(WHOLE), make_chain(SPEC, "abcdef").rows(WHOLE).hash_at(3))]
        lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
        rig.settle()
        assert (lease.blocks, lease.cause) == (3, MissCause.COLD)
        rig.assert_promised(lease)

    def test_blocks_that_vanish_between_match_and_load(self, redis: DictTier) -> None:
        """Seen in LMCache 0.5.6: evicted between EXISTS and GET, and the engine hung."""
        held = HeldTier(redis)
        with rig_over(held)() as rig:
            lease = rig.store.acquire("r", make_chain(SPEC, "abcdef"))
            step(rig, held, 2)
            redis.values.clear()
            finish(rig, held)
            assert (lease.blocks, lease.pending, lease.cause) == (2, 0, MissCause.COLD)
            rig.assert_promised(lease)
            assert rig.store.usage()[TierName.HOST].staged == 0

    def test_a_late_answer_is_a_timeout(self, rig: Rig, redis: DictTier) -> None:
        class LateLoads(FaultyTier):
            def match(self, rows: object, deadline: float) -> int:
                return redis.match(rows, deadline)  # type: ignore[arg-type]

        late = LateLoads(redis, 0, {Fault.SLOW: 1.0})
        with rig_over(late)() as slow:
            lease = slow.store.acquire("r", make_chain(SPEC, "abcdef"))
            slow.settle()
            assert settle(slow, lease).miss_tokens == {MissCause.TIMEOUT: 24}
            assert slow.store.usage()[TierName.HOST].staged == 0


class TestRoom:
    def test_a_pool_full_of_leases_is_a_shorter_prefix_and_no_wait(self, redis: DictTier) -> None:
        with rig_over(redis, host_extents=1)() as rig:
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
        del redis.values[
            (DIVIDED.root.digest, str(SPLIT[1]), make_chain(DIVIDED, "abcd").rows(SPLIT[1]).hash_at(2))
        ]
        lease = rig.store.acquire("r", make_chain(DIVIDED, "abcd"), SPLIT)
        finish(rig, held)
        assert (lease.blocks, lease.pending, lease.cause) == (2, 0, MissCause.COLD)
        rig.assert_promised(lease)

    @pytest.mark.parametrize("first", [0, 1])
    def test_the_cause_is_that_of_the_rank_that_broke_first(
        self, rig: Rig, held: HeldTier, redis: DictTier, first: int
    ) -> None:
        """Whichever lands last; and redis is not asked again for what it has answered."""
        breaks = {SPLIT[first]: 1, SPLIT[1 - first]: 3}
        for shard, block in breaks.items():
            key = (DIVIDED.root.digest, str(shard), make_chain(DIVIDED, "abcd").rows(shard).hash_at(block))
            redis.values[key] = redis.values[key]._replace(payload=bytes(1024 if block == 1 else 512))
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
        found = rig.store.lookup(make_chain(SPEC, "abcdefgh"))
        assert (found.matched, found.verified) == (24, 8)
        assert found.served == {TierName.HOST: 8, TierName.REDIS: 16}
        assert found.alone[TierName.REDIS] == 24
        redis.discard(make_chain(SPEC, "a").rows(WHOLE), 0.0)
        found = rig.store.lookup(make_chain(SPEC, "abcdefgh"))
        assert found.matched == 24, "redis lost the head, which is here, and has the rest"
        assert found.alone[TierName.REDIS] == 0


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
            assert time.monotonic() - began < 0.7
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
        third = make_chain(SPEC, "abc").rows(WHOLE).hash_at(2).hex().encode()
        (key,) = [key for key in server.client.scan_iter() if bytes(key).endswith(third)]
        size = server.client.strlen(key)
        server.client.setrange(
            key, size - 1, bytes([payload_of(make_chain(SPEC, "abc").rows(WHOLE), 2)[-1] ^ 1])
        )
        with self.rig(server.url) as second:
            event = self.ask(second, "r", "abc")
            assert event.hit_tokens == {TierName.REDIS: 8}
            assert event.miss_tokens == {MissCause.CORRUPT: 4}
        assert server.client.exists(key) == 0
