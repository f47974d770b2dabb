"""Write-through, device to host to redis: behind the request, bounded, and heads before tails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest
import xxhash

from kvstore.block import WHOLE, TierName
from kvstore.events import BlocksDropped, BlocksRemoved, BlocksStored, BytesMoved, DropCause
from kvstore.store import BlockStatus, StoreOptions
from kvstore.tiers.base import Tier
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import Fault, FaultyTier, HeldTier
from tests.support.stores import (
    SPLIT,
    FakeClock,
    Rig,
    RigOptions,
    make_chain,
    make_rig,
    make_spec,
    payload_of,
)

SPEC = make_spec()
DIVIDED = make_spec("divided")
OPTIONS = StoreOptions(batch_bytes=4096, threads=1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def redis() -> DictTier:
    return DictTier()


@pytest.fixture
def held(redis: DictTier) -> HeldTier:
    return HeldTier(redis)


Maker = Callable[..., AbstractContextManager[Rig]]


@pytest.fixture
def make() -> Maker:
    """Makes stores with a device tier of 8 blocks and a host tier of 24."""

    def make(redis: Tier, *, device: int = 1, host: int = 2, store: StoreOptions = OPTIONS) -> object:
        options = RigOptions(host, device, 16 << 10, 8 << 10, redis, store)
        return make_rig(FakeClock(), [(SPEC, (WHOLE,)), (DIVIDED, SPLIT)], options)

    return make  # type: ignore[return-value]


@pytest.fixture
def rig(make: Maker, redis: DictTier) -> Iterator[Rig]:
    with make(redis) as made:
        yield made
        made.settle()
        made.store.check()
        assert all(usage.leased == 0 for usage in made.store.usage().values())


def compute(rig: Rig, letters: str, *, first_block: int = 0, request: str = "r") -> None:
    """Publish a prompt's blocks from the first one on, under a lease that ends at once."""
    lease = rig.store.acquire(request, make_chain(SPEC, letters))
    assert rig.publish(lease, first_block, len(letters)) == []
    rig.store.release(lease)


def stored(rig: Rig) -> list[tuple[TierName, int]]:
    return [(event.tier, len(event.hashes) // 16) for event in rig.events.of(BlocksStored)]


def drops(rig: Rig) -> list[tuple[TierName, int, DropCause]]:
    return [(event.tier, event.blocks, event.cause) for event in rig.events.of(BlocksDropped)]


def assert_in_redis(redis: DictTier, letters: str, blocks: int) -> None:
    """The leading blocks are there, intact, and no others of the prompt."""
    rows = make_chain(SPEC, letters).rows(WHOLE)
    for block in range(len(rows)):
        value = redis.values.get((rows.namespace, str(rows.shard), rows.hash_at(block)))
        assert (value is not None) == (block < blocks)
        if value is not None:
            assert value.payload == payload_of(rows, block).tobytes()
            assert value.checksum == xxhash.xxh3_64_intdigest(value.payload)


class TestWayDown:
    def test_what_is_computed_goes_down_both_tiers(self, rig: Rig, redis: DictTier) -> None:
        compute(rig, "abcdef")
        assert (rig.resident(rig.host, make_chain(SPEC, "abcdef")), len(redis.values)) == (0, 0)
        rig.settle()
        assert rig.resident(rig.host, make_chain(SPEC, "abcdef")) == 6
        assert_in_redis(redis, "abcdef", 6)
        assert stored(rig) == [
            (TierName.DEVICE, 6),
            (TierName.HOST, 6),
            (TierName.REDIS, 4),
            (TierName.REDIS, 2),
        ]
        moved = [(event.source, event.target, event.payload_bytes) for event in rig.events.of(BytesMoved)]
        assert moved == [
            (TierName.DEVICE, TierName.HOST, 6144),
            (TierName.HOST, TierName.REDIS, 4096),
            (TierName.HOST, TierName.REDIS, 2048),
        ]

    def test_what_is_written_goes_to_redis(self, rig: Rig, redis: DictTier) -> None:
        for shard in SPLIT:
            rig.write(make_chain(DIVIDED, "ab"), shard)
        rig.write(make_chain(SPEC, "abc"))
        rig.settle()
        assert_in_redis(redis, "abc", 3)
        assert len(redis.values) == 7

    def test_without_a_device_computed_blocks_go_down_intact(self, make: Maker, redis: DictTier) -> None:
        """They have no writer to sum them, and redis must not be given a checksum that nobody made."""
        with make(redis, device=0) as rig:
            compute(rig, "abc")
            rig.settle()
        assert_in_redis(redis, "abc", 3)

    def test_without_redis_nothing_waits(self, make: Maker) -> None:
        with make(RigOptions().redis) as rig:
            compute(rig, "abc")
            rig.settle()
            assert stored(rig) == [(TierName.DEVICE, 3), (TierName.HOST, 3)]

    def test_what_a_lower_tier_has_is_not_copied_again(self, rig: Rig, redis: DictTier) -> None:
        rig.write(make_chain(SPEC, "abc"))
        rig.settle()
        compute(rig, "abcd")
        rig.settle()
        assert stored(rig)[-2:] == [(TierName.HOST, 1), (TierName.REDIS, 1)]

    def test_the_source_is_kept_until_it_has_been_copied(self, rig: Rig, redis: DictTier) -> None:
        compute(rig, "abcdef")
        assert len(rig.store.reserve(SPEC.root.digest, 8)) == 2
        rig.settle()
        assert_in_redis(redis, "abcdef", 6)
        freed = rig.store.reserve(SPEC.root.digest, 6)
        assert len(freed) == 6
        usage = rig.store.usage()[TierName.DEVICE]
        assert (usage.staged, usage.ready) == (8 * 1024, 0)

    def test_a_prompt_that_grows_is_one_prompt_to_the_policy(self, rig: Rig) -> None:
        """Each piece comes down alone; its recency is that of the whole run, so an old chain goes whole."""
        for blocks in range(1, 7):
            lease = rig.store.acquire(f"old {blocks}", make_chain(SPEC, "abcdef"[:blocks]))
            rig.publish(lease, blocks - 1, blocks)
            rig.store.release(lease)
            rig.settle()
        rig.write(make_chain(SPEC, "uvwxyz"))
        rig.settle()
        rig.host.pool.evict(rig.host.pool.extents.classes()[0], 6)
        assert rig.resident(rig.host, make_chain(SPEC, "abcdef")) == 0
        assert rig.resident(rig.host, make_chain(SPEC, "uvwxyz")) == 6

    def test_what_goes_and_comes_back_in_one_step_is_told_in_that_order(self, make: Maker) -> None:
        """Else whoever follows the events takes it for gone."""
        with make(RigOptions().redis, host=1) as rig:
            early = rig.store.acquire("early", make_chain(SPEC, "a"))
            rig.write(make_chain(SPEC, "a"))
            rig.write(make_chain(SPEC, LETTERS[1:12]))
            compute(rig, "mnopqrs")
            rig.publish(early, 0, 1)
            told = len(rig.events.events)
            rig.settle()
            follower = {make_chain(SPEC, "a").hashes}
            for event in rig.events.events[told:]:
                if isinstance(event, BlocksRemoved):
                    follower -= {event.hashes[at : at + 16] for at in range(0, len(event.hashes), 16)}
                elif isinstance(event, BlocksStored):
                    follower |= {event.hashes[at : at + 16] for at in range(0, len(event.hashes), 16)}
            assert rig.events.of(BlocksRemoved), "a was to be evicted"
            assert rig.resident(rig.host, make_chain(SPEC, "a")) == 1
            assert make_chain(SPEC, "a").hashes in follower


class TestBounds:
    def test_what_exceeds_the_queue_is_dropped_from_the_tail(
        self, make: Maker, held: HeldTier, redis: DictTier
    ) -> None:
        with make(held, device=0, store=StoreOptions(queue_bytes=4 * 1024 + 100, threads=1)) as rig:
            rig.write(make_chain(SPEC, "abcdefgh"))
            assert drops(rig) == [(TierName.REDIS, 4, DropCause.QUEUE)]
            rig.write(make_chain(SPEC, "xyz"))
            assert drops(rig)[1:] == [(TierName.REDIS, 3, DropCause.QUEUE)]
            held.open()
            rig.settle()
            assert_in_redis(redis, "abcdefgh", 4)
            rig.write(make_chain(SPEC, "mn"))
            rig.settle()
            assert_in_redis(redis, "mn", 2)

    def test_a_stalled_redis_leaves_room_to_write(self, make: Maker, held: HeldTier) -> None:
        """production-stack #923, LMCache #2017: what waits is pinned, so it may not be everything."""
        with make(held, device=0) as rig:
            for number in range(12):
                status = rig.write(make_chain(SPEC, f"{number:02}" + LETTERS[:4]))
                rig.store.pump()
                assert status.count(BlockStatus.YOURS) >= 4
            assert rig.store.usage()[TierName.HOST].leased <= 16 * 1024
            rig.store.check()
            held.open()
            rig.settle()
            assert rig.store.usage()[TierName.HOST].leased == 0

    def test_a_host_full_of_leases_drops_the_copy(self, make: Maker, redis: DictTier) -> None:
        with make(redis, host=1) as rig:
            rig.write(make_chain(SPEC, LETTERS[:11]))
            rig.settle()
            rig.store.acquire("holds", make_chain(SPEC, LETTERS[:11]))
            compute(rig, "xyz")
            rig.settle()
            assert drops(rig)[-1] == (TierName.HOST, 2, DropCause.FULL)
            assert_in_redis(redis, "xyz", 1)
            assert rig.store.usage()[TierName.DEVICE].leased == 0


class TestTrouble:
    @pytest.mark.parametrize("fault", [Fault.FAIL, Fault.SLOW, Fault.SHORT, Fault.CRASH])
    def test_a_broken_redis_costs_nothing_above_it(self, make: Maker, redis: DictTier, fault: Fault) -> None:
        """And what it did not take is counted."""
        with make(FaultyTier(redis, 1, {fault: 1.0})) as rig:
            assert rig.write(make_chain(SPEC, "abcd")) == [BlockStatus.YOURS] * 4
            compute(rig, "wxyz")
            rig.settle()
            assert rig.resident(rig.host, make_chain(SPEC, "abcd")) == 4
            assert rig.resident(rig.host, make_chain(SPEC, "wxyz")) == 4
            lost = sum(blocks for tier, blocks, cause in drops(rig) if cause is DropCause.UNAVAILABLE)
            assert lost == 8 - len(redis.values) > 0
            assert all(usage.leased == 0 for usage in rig.store.usage().values())
            rig.store.check()

    def test_drain_says_whether_all_is_down(self, make: Maker, held: HeldTier, redis: DictTier) -> None:
        with make(held) as rig:
            compute(rig, "abcdef")
            assert not rig.store.drain(0)
            held.open()
            assert rig.store.drain(10)
            assert_in_redis(redis, "abcdef", 6)

    def test_a_store_closes_with_a_queue(self, make: Maker, held: HeldTier) -> None:
        """What is queued is lost, and said to be lost; nothing stays pinned for it."""
        with make(held, device=0) as rig:
            rig.write(make_chain(SPEC, LETTERS[:12]))
            rig.store.pump()
            held.let_one_through()
            held.open()
            rig.store.close()
            assert rig.store.idle
            saved = sum(blocks for tier, blocks in stored(rig) if tier is TierName.REDIS)
            lost = sum(blocks for _, blocks, _ in drops(rig))
            assert saved + lost == 12
            assert rig.store.usage()[TierName.HOST].leased == 0
            rig.store.check()

    def test_slots_come_back_when_computing_was_in_vain(self, rig: Rig) -> None:
        slots = rig.store.reserve(SPEC.root.digest, 3)
        rig.store.unreserve(slots)
        rig.store.unreserve(np.zeros(0, dtype=np.int64))
        assert rig.store.usage()[TierName.DEVICE].staged == 0
