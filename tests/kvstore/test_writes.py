"""Two-phase writes and computed blocks: nothing is visible before its commit, and nobody writes late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.block import WHOLE, Residency, TierName
from kvstore.errors import LeaseError, NamespaceError, WriteError
from kvstore.events import BlocksDropped, BlocksStored, DropCause
from kvstore.store import BlockStatus, StoreOptions, Write
from kvstore.tiers.memory import payload_checksum
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

SPEC = make_spec()
YOURS, PRESENT, PENDING, REFUSED = (
    BlockStatus.YOURS,
    BlockStatus.PRESENT,
    BlockStatus.PENDING,
    BlockStatus.REFUSED,
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def rig(clock: FakeClock) -> Iterator[Rig]:
    """Host tier alone: 12 blocks."""
    options = RigOptions(1, 0, 16 << 10, store=StoreOptions(write_seconds=20.0))
    with make_rig(clock, [(SPEC, (WHOLE,))], options) as made:
        yield made
        made.store.check()


@pytest.fixture
def computing(clock: FakeClock) -> Iterator[Rig]:
    """A device tier of 8 blocks above a host tier of 12."""
    options = RigOptions(1, 1, 16 << 10, device_extent_bytes=8 << 10)
    with make_rig(clock, [(SPEC, (WHOLE,))], options) as made:
        yield made
        made.store.check()


def matched(rig: Rig, letters: str) -> int:
    return rig.resident(rig.host, make_chain(SPEC, letters))


def drops(rig: Rig) -> list[tuple[int, DropCause]]:
    return [(event.blocks, event.cause) for event in rig.events.of(BlocksDropped)]


def staged_blocks(rig: Rig) -> int:
    return rig.store.usage()[TierName.HOST].staged // 1024


class TestVisibility:
    def test_blocks_are_visible_from_the_commit_on(self, rig: Rig) -> None:
        with rig.store.write(make_chain(SPEC, "abc")) as write:
            assert write.status == [YOURS] * 3
            fill(write)
            assert matched(rig, "abc") == 0
            assert rig.events.of(BlocksStored) == []
        assert matched(rig, "abc") == 3
        (event,) = rig.events.of(BlocksStored)
        assert (event.tier, event.hashes, event.payload_bytes) == (
            TierName.HOST,
            make_chain(SPEC, "abc").hashes,
            1024,
        )

    def test_an_exception_leaves_nothing(self, rig: Rig) -> None:
        """LMCache #4991: a store that fails half-way leaves nothing visible."""
        write = rig.store.write(make_chain(SPEC, "abc"))
        fill(write)
        with pytest.raises(ZeroDivisionError), write:
            raise ZeroDivisionError
        assert (matched(rig, "abc"), staged_blocks(rig)) == (0, 0)

    def test_a_writer_that_vanishes_leaves_nothing_visible(self, rig: Rig, clock: FakeClock) -> None:
        """Between stage and commit: the names are free again at the deadline, the slots are not."""
        fill(rig.store.write(make_chain(SPEC, "abc")))
        assert (matched(rig, "abc"), staged_blocks(rig)) == (0, 3)
        clock.advance(20.1)
        rig.store.tick()
        assert (matched(rig, "abc"), staged_blocks(rig)) == (0, 0)
        assert rig.store.usage()[TierName.HOST].quarantined == 3 * 1024
        assert rig.write(make_chain(SPEC, "abc")) == [YOURS] * 3

    def test_checksums_are_the_writers_or_computed(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "a"))
        write = rig.store.write(make_chain(SPEC, "b"))
        fill(write)
        write.commit([1234])
        rows = make_chain(SPEC, "a").rows(WHOLE)
        computed = rig.host.checksums(rig.host.pool.match(rows).slots)
        assert computed == [payload_checksum(payload_of(rows, 0))]
        assert rig.host.checksums(write.slots) == [1234]

    def test_a_write_that_brings_nothing_says_nothing(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "ab"))
        assert rig.write(make_chain(SPEC, "ab")) == [PRESENT] * 2
        assert len(rig.events.of(BlocksStored)) == 1
        assert rig.write(make_chain(SPEC, "", tail=3)) == []


class TestLateWriters:
    def late(self, rig: Rig, clock: FakeClock, letters: str = "abc") -> Write:
        write = rig.store.write(make_chain(SPEC, letters))
        clock.advance(20.1)
        rig.store.tick()
        return write

    def test_a_commit_after_the_deadline_is_an_error(self, rig: Rig, clock: FakeClock) -> None:
        write = self.late(rig, clock)
        assert drops(rig) == [(3, DropCause.DEADLINE)]
        with pytest.raises(WriteError, match="deadline has passed and its slots are given back"):
            write.commit()
        assert matched(rig, "abc") == 0
        assert rig.store.usage()[TierName.HOST].quarantined == 0

    def test_also_when_nobody_has_looked_at_the_clock_yet(self, rig: Rig, clock: FakeClock) -> None:
        write = rig.store.write(make_chain(SPEC, "abc"))
        fill(write)
        clock.advance(20.1)
        with pytest.raises(WriteError, match="deadline"):
            write.commit()
        assert (matched(rig, "abc"), staged_blocks(rig)) == (0, 0)

    def test_its_slots_are_nobodys_until_it_says_that_it_is_done(self, rig: Rig, clock: FakeClock) -> None:
        """A writer that wakes up late still has the memory mapped, and writes to it."""
        write = self.late(rig, clock)
        lease = None
        for number in range(6):
            chain = make_chain(SPEC, f"{number}xyz")
            rig.write(chain)
            lease = rig.store.acquire(f"r{number}", chain)
            for payload in write.payloads:
                payload[:] = 0xA5
            rig.assert_promised(lease)
            rig.store.release(lease)
        assert rig.store.usage()[TierName.HOST].quarantined == 3 * 1024
        write.abort()
        assert rig.store.usage()[TierName.HOST].quarantined == 0
        assert rig.write(make_chain(SPEC, "".join(map(chr, range(97, 109))))).count(YOURS) == 12

    def test_somebody_else_may_write_its_blocks_meanwhile(self, rig: Rig, clock: FakeClock) -> None:
        write = self.late(rig, clock)
        rig.write(make_chain(SPEC, "abc"))
        with pytest.raises(WriteError):
            write.commit()
        lease = rig.store.acquire("r", make_chain(SPEC, "abc"))
        assert lease.blocks == 3
        rig.assert_promised(lease)


class TestTwoWriters:
    def test_each_is_told_what_the_other_does(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "a"))
        first = rig.store.write(make_chain(SPEC, "abc"))
        second = rig.store.write(make_chain(SPEC, "abcd"))
        assert first.status == [PRESENT, YOURS, YOURS]
        assert second.status == [PRESENT, PENDING, PENDING, YOURS]
        fill(second)
        second.commit()
        assert matched(rig, "abcd") == 1
        fill(first)
        first.commit()
        assert matched(rig, "abcd") == 4

    def test_what_one_gives_up_the_next_may_write(self, rig: Rig) -> None:
        first = rig.store.write(make_chain(SPEC, "abc"))
        second = rig.store.write(make_chain(SPEC, "abcd"))
        fill(second)
        second.commit()
        first.abort()
        assert matched(rig, "abcd") == 0
        assert rig.write(make_chain(SPEC, "abcd")) == [YOURS, YOURS, YOURS, PRESENT]
        assert matched(rig, "abcd") == 4


class TestRoom:
    def test_a_full_pool_refuses_the_tail_with_a_cause(self, rig: Rig) -> None:
        """LMCache #2942, Mooncake #3331 #403."""
        letters = "".join(map(chr, range(97, 112)))
        assert rig.write(make_chain(SPEC, letters)) == [YOURS] * 12 + [REFUSED] * 3
        assert matched(rig, letters) == 12
        assert drops(rig) == [(3, DropCause.FULL)]

    def test_nothing_is_evicted_that_the_new_blocks_hang_from(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "abcd"))
        rig.write(make_chain(SPEC, "stuvwxyz"))
        rig.write(make_chain(SPEC, "abcdefgh"), first_block=4)
        assert matched(rig, "abcdefgh") == 8

    def test_what_they_hang_from_may_go_before_the_commit(self, rig: Rig) -> None:
        """Without a lease nobody keeps it: the write goes through, and the policy is not confused."""
        rig.write(make_chain(SPEC, "abcd"))
        write = rig.store.write(make_chain(SPEC, "abcdef"), first_block=4)
        assert rig.host.pool.evict(write.space.slot_class, 4) == 4
        rig.write(make_chain(SPEC, "stuvwx"))
        fill(write)
        write.commit()
        rig.store.check()
        assert rig.host.pool.evict(write.space.slot_class, 100) == 8
        assert rig.store.usage()[TierName.HOST].ready == 0

    def test_a_write_starts_where_it_says(self, rig: Rig) -> None:
        write = rig.store.write(make_chain(SPEC, "abcd"), first_block=2)
        assert (write.status, write.positions.tolist()) == ([YOURS] * 2, [0, 1])
        fill(write)
        write.commit()
        assert matched(rig, "abcd") == 0
        rig.write(make_chain(SPEC, "ab"))
        assert matched(rig, "abcd") == 4


class TestWrongUse:
    @pytest.mark.parametrize("first_block", [-1, 4])
    def test_a_first_block_beyond_the_chain(self, rig: Rig, first_block: int) -> None:
        with pytest.raises(WriteError, match=f"first_block is {first_block}, but the chain has 3 blocks"):
            rig.store.write(make_chain(SPEC, "abc"), first_block=first_block)

    def test_blocks_without_tokens(self, rig: Rig) -> None:
        with pytest.raises(WriteError, match="a write must carry its token ids"):
            rig.store.write(hash_only(make_chain(SPEC, "abc")))

    def test_a_shard_that_is_not_registered(self, rig: Rig) -> None:
        with pytest.raises(NamespaceError, match=r"has no shard 0\.2\.0\.1 here; register it"):
            rig.store.write(make_chain(SPEC, "abc"), SPLIT[0])

    def test_the_wrong_number_of_checksums(self, rig: Rig) -> None:
        write = rig.store.write(make_chain(SPEC, "abc"))
        with pytest.raises(WriteError, match="2 checksums for 3 blocks to fill"):
            write.commit([1, 2])
        write.abort()
        assert staged_blocks(rig) == 0

    def test_a_write_that_is_over(self, rig: Rig) -> None:
        write = rig.store.write(make_chain(SPEC, "abc"))
        write.abort()
        with pytest.raises(WriteError, match="committed or aborted already"):
            write.commit()


class TestComputedBlocks:
    def test_they_are_held_by_the_request_that_computed_them(self, computing: Rig) -> None:
        lease = computing.store.acquire("r", make_chain(SPEC, "abcd"))
        assert computing.publish(lease, 0, 2) == []
        assert computing.publish(lease, 2, 4) == []
        assert computing.resident(computing.top, make_chain(SPEC, "abcd")) == 4
        assert computing.store.usage()[TierName.DEVICE].leased == 4 * 1024
        computing.store.release(lease)
        computing.settle()
        assert computing.store.usage()[TierName.DEVICE].leased == 0

    def test_two_that_compute_the_same_block_keep_one(self, computing: Rig) -> None:
        one = computing.store.acquire("1", make_chain(SPEC, "ab"))
        two = computing.store.acquire("2", make_chain(SPEC, "ab"))
        computing.publish(one, 0, 1)
        kept = computing.publish(two, 0, 2)
        assert len(kept) == 1
        assert computing.store.usage()[TierName.DEVICE].staged == 1024
        computing.store.unreserve(np.array(kept))

    def test_a_request_that_is_over_cannot_hold_what_it_computed(self, computing: Rig) -> None:
        lease = computing.store.acquire("r", make_chain(SPEC, "ab"))
        computing.store.release(lease)
        slots = computing.store.reserve(SPEC.root.digest, 2)
        with pytest.raises(LeaseError, match="is over"):
            computing.store.publish(lease, lease.chain.rows(WHOLE), slots)
        assert computing.resident(computing.top, make_chain(SPEC, "ab")) == 0
        computing.store.unreserve(slots)

    @pytest.mark.parametrize("letters", ["abc", "a"])
    def test_one_identity_a_slot(self, computing: Rig, letters: str) -> None:
        lease = computing.store.acquire("r", make_chain(SPEC, "abc"))
        slots = computing.store.reserve(SPEC.root.digest, 2)
        with pytest.raises(WriteError, match=f"{len(letters)} identities for 2 slots"):
            computing.store.publish(lease, make_chain(SPEC, letters).rows(WHOLE), slots)
        computing.store.unreserve(slots)

    def test_reserved_slots_are_refused_when_all_is_in_use(self, computing: Rig) -> None:
        slots = computing.store.reserve(SPEC.root.digest, 100)
        assert len(slots) == 8 == computing.store.room(SPEC.root.digest)
        assert len(computing.store.reserve(SPEC.root.digest, 1)) == 0
        computing.store.unreserve(slots)

    def test_a_named_writer_goes_first(self, rig: Rig) -> None:
        """Without a device, computed blocks go where writers write."""
        chain = make_chain(SPEC, "ab")
        write = rig.store.write(chain)
        lease = rig.store.acquire("r", chain)
        kept = rig.publish(lease, 0, 2)
        assert len(kept) == 2
        fill(write)
        write.commit()
        assert rig.host.pool.residency(chain.rows(WHOLE)) == [Residency.READY] * 2
        rig.store.unreserve(np.array(kept))
