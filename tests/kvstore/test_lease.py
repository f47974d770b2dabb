"""Leases: match and pin in one step, kept under pressure, counted once, over without a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.block import WHOLE, MissCause, Shard, TierName
from kvstore.errors import LeaseError, NamespaceError
from kvstore.events import RequestSettled, TokensProbed
from kvstore.lease import LeaseTable, Terms
from kvstore.store import BlockStatus, StoreOptions
from tests.support.stores import (
    SPLIT,
    FakeClock,
    Rig,
    RigOptions,
    hash_only,
    make_chain,
    make_rig,
    make_spec,
)

SPEC = make_spec()
DIVIDED = make_spec("divided")
OPTIONS = StoreOptions(lease_seconds=30.0)
STRANGER = make_chain(SPEC, "".join(chr(0x4E00 + each) for each in range(40)))
"""A prompt that alone fills the pool."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def rig(clock: FakeClock) -> Iterator[Rig]:
    """Host tier alone: 24 blocks."""
    with make_rig(
        clock, [(SPEC, (WHOLE,)), (DIVIDED, SPLIT)], RigOptions(1, 0, 32 << 10, store=OPTIONS)
    ) as made:
        yield made
        made.store.check()


@pytest.fixture
def two_tiers(clock: FakeClock) -> Iterator[Rig]:
    """A device tier of 8 blocks above a host tier of 112."""
    options = RigOptions(
        host_extents=2, device_extents=1, extent_bytes=64 << 10, device_extent_bytes=8 << 10, store=OPTIONS
    )
    with make_rig(clock, [(SPEC, (WHOLE,)), (DIVIDED, SPLIT)], options) as made:
        yield made
        made.store.check()


def settled(rig: Rig) -> list[RequestSettled]:
    return rig.events.of(RequestSettled)


def leased_bytes(rig: Rig) -> int:
    return sum(usage.leased for usage in rig.store.usage().values())


class TestPromise:
    def test_the_leading_run_is_pinned_and_readable(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "abcd"))
        lease = rig.store.acquire("r", make_chain(SPEC, "abcx", tail=3))
        assert (lease.blocks, lease.tokens, lease.pending) == (3, 12, 0)
        assert leased_bytes(rig) == 3 * 1024
        rig.assert_promised(lease)

    def test_it_stays_readable_under_any_pressure(self, rig: Rig) -> None:
        """LMCache #717 #911 #1686 #4133, vllm #42289."""
        rig.write(make_chain(SPEC, "abcd"))
        lease = rig.store.acquire("r", make_chain(SPEC, "abcd"))
        assert rig.write(STRANGER).count(BlockStatus.YOURS) == 24 - 4
        rig.write(make_chain(SPEC, "mnopqrst"))
        rig.assert_promised(lease)
        assert lease.blocks == 4

    def test_what_was_asked_for_last_goes_last(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "abcd"))
        rig.write(make_chain(SPEC, "wxyz"))
        rig.store.release(rig.store.acquire("r", make_chain(SPEC, "abcd")))
        rig.host.pool.evict(rig.host.pool.extents.classes()[0], 4)
        assert rig.store.lookup(make_chain(SPEC, "abcd")).matched == 16
        assert rig.store.lookup(make_chain(SPEC, "wxyz")).matched == 0

    def test_a_reader_that_overstays_finds_out_by_the_generation(self, rig: Rig) -> None:
        """local-inference-lab/vllm #480: a reused slot is never read through an old lease."""
        rig.write(make_chain(SPEC, "ab"))
        lease = rig.store.acquire("r", make_chain(SPEC, "ab"))
        slot = int(lease.segments[WHOLE][0].slots[1])
        extent = rig.host.pool.extents.containing(slot)
        seen = int(extent.table.generation[slot - extent.base])
        rig.store.release(lease)
        rig.write(STRANGER)
        assert int(extent.table.generation[slot - extent.base]) != seen

    def test_the_table_says_until_when(self, rig: Rig, clock: FakeClock) -> None:
        rig.write(make_chain(SPEC, "a"))
        lease = rig.store.acquire("r", make_chain(SPEC, "a"))
        slot = int(lease.segments[WHOLE][0].slots[0])
        extent = rig.host.pool.extents.containing(slot)
        assert extent.table.lease_until[slot - extent.base] == clock() + 30
        clock.advance(10)
        rig.store.renew(lease)
        assert extent.table.lease_until[slot - extent.base] == clock() + 30

    def test_who_knows_only_hashes_is_served(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "abc"))
        lease = rig.store.acquire("r", hash_only(make_chain(SPEC, "abcd")))
        assert lease.blocks == 3

    def test_a_prompt_shorter_than_a_block_asks_for_nothing(self, rig: Rig) -> None:
        lease = rig.store.acquire("r", make_chain(SPEC, "", tail=3))
        rig.store.release(lease)
        assert settled(rig)[0].miss_tokens == {MissCause.TAIL: 3}


class TestShards:
    def test_ranks_never_disagree(self, rig: Rig) -> None:
        """LMCache #1467 #1379 #2903: a hit is the minimum over ranks."""
        rig.write(make_chain(DIVIDED, "abcd"), SPLIT[0])
        rig.write(make_chain(DIVIDED, "ab"), SPLIT[1])
        lease = rig.store.acquire("r", make_chain(DIVIDED, "abcd"), SPLIT)
        assert lease.blocks == 2
        assert leased_bytes(rig) == 4 * 1024
        rig.assert_promised(lease)
        rig.store.release(lease)
        assert settled(rig)[0].hit_tokens == {TierName.HOST: 8}

    def test_one_rank_without_anything_is_a_miss_for_all(self, rig: Rig) -> None:
        rig.write(make_chain(DIVIDED, "abcd"), SPLIT[0])
        lease = rig.store.acquire("r", make_chain(DIVIDED, "abcd"), SPLIT)
        assert (lease.blocks, leased_bytes(rig)) == (0, 0)

    @pytest.mark.parametrize("shards", [(), (Shard(0, 4),)])
    def test_a_shard_that_is_not_registered_is_an_error(self, rig: Rig, shards: tuple[Shard, ...]) -> None:
        with pytest.raises(NamespaceError, match="shard"):
            rig.store.acquire("r", make_chain(SPEC, "a"), shards)
        assert rig.store.leases == 0


class TestRequests:
    def test_the_same_request_gets_the_same_lease(self, rig: Rig, clock: FakeClock) -> None:
        first = rig.store.acquire("r", make_chain(SPEC, "ab"))
        clock.advance(29)
        assert rig.store.acquire("r", make_chain(SPEC, "ab")) is first
        clock.advance(29)
        rig.store.tick()
        assert not first.over, "to ask again is to want it still"
        assert rig.store.leases == 1

    def test_another_prompt_under_one_id_is_an_error(self, rig: Rig) -> None:
        rig.store.acquire("r", make_chain(SPEC, "ab"))
        with pytest.raises(LeaseError, match="'r' already holds lease 1 on another prompt"):
            rig.store.acquire("r", make_chain(SPEC, "ac"))

    def test_ids_are_their_owners(self, rig: Rig) -> None:
        mine = rig.store.acquire("r", make_chain(SPEC, "ab"), owner="me")
        assert rig.store.acquire("r", make_chain(SPEC, "cd"), owner="you") is not mine

    def test_a_namespace_has_to_be_registered(self, rig: Rig) -> None:
        with pytest.raises(NamespaceError, match="is not registered; register its spec first"):
            rig.store.acquire("r", make_chain(make_spec("stranger"), "a"))

    def test_a_block_size_that_is_not_the_namespaces_names_both(self, rig: Rig) -> None:
        """dynamo #1233 #659."""
        chain = make_chain(SPEC, "ab")
        root = type(chain.root)(chain.root.digest, 8, chain.root.algorithm)
        with pytest.raises(NamespaceError, match="request has block size 8, its namespace has 4"):
            rig.store.acquire("r", type(chain)(root, chain.hashes, 16))


class TestEnd:
    def test_release_is_idempotent_and_counts_once(self, rig: Rig) -> None:
        """LMCache #1260 #2574 #2912 #4216: hits and misses add up to what was asked."""
        rig.write(make_chain(SPEC, "ab"))
        lease = rig.store.acquire("r", make_chain(SPEC, "abc", tail=2))
        rig.store.release(lease)
        rig.store.release(lease)
        assert leased_bytes(rig) == 0
        (event,) = settled(rig)
        assert event.asked_tokens == 14
        assert event.hit_tokens == {TierName.HOST: 8}
        assert event.miss_tokens == {MissCause.COLD: 4, MissCause.TAIL: 2}
        assert event.tier_asked == {TierName.HOST: 12}

    def test_what_the_reader_found_stale_is_a_miss(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "abc"))
        rig.store.release(rig.store.acquire("r", make_chain(SPEC, "abc")), used_blocks=1)
        assert settled(rig)[0].hit_tokens == {TierName.HOST: 4}
        assert settled(rig)[0].miss_tokens == {MissCause.STALE: 8}

    def test_nobody_renews_and_it_is_over(self, rig: Rig, clock: FakeClock) -> None:
        """LMCache #1756 #3381 #5090, sglang #40334: a client that dies leaves no pin."""
        rig.write(make_chain(SPEC, "ab"))
        lease = rig.store.acquire("r", make_chain(SPEC, "ab"))
        clock.advance(29.9)
        rig.store.tick()
        assert not lease.over
        clock.advance(0.1)
        rig.store.tick()
        assert lease.over
        assert (rig.store.leases, leased_bytes(rig), len(settled(rig))) == (0, 0, 1)
        with pytest.raises(LeaseError, match="lease 1 of request 'r' is over; acquire again"):
            rig.store.renew(lease)

    def test_what_ran_out_in_a_queue_is_taken_again(self, rig: Rig, clock: FakeClock) -> None:
        """LMCache #4691, Mooncake #3076: the same blocks if they are there, else a shorter prefix."""
        chain = make_chain(SPEC, "abcd")
        rig.write(chain)
        rig.store.acquire("r", chain)
        clock.advance(31)
        rig.store.tick()
        again = rig.store.acquire("r", chain)
        assert again.blocks == 4
        clock.advance(31)
        rig.store.tick()
        rig.host.pool.evict(rig.host.pool.extents.classes()[0], 3)
        assert rig.store.acquire("r", chain).blocks == 1

    def test_all_counts_are_zero_in_the_end(self, rig: Rig, clock: FakeClock) -> None:
        """LMCache #987 #1034 #1130: after release, expiry and a renewed lease alike."""
        rig.write(make_chain(SPEC, "abcd"))
        leases = [rig.store.acquire(f"r{each}", make_chain(SPEC, "abcd"[:each])) for each in range(5)]
        rig.store.release(leases[2])
        clock.advance(20)
        rig.store.renew(leases[3])
        clock.advance(20)
        rig.store.tick()
        assert [lease.over for lease in leases] == [True, True, True, False, True]
        rig.store.release(leases[3])
        assert leased_bytes(rig) == 0


class TestLookup:
    def test_a_probe_changes_nothing(self, rig: Rig) -> None:
        """Mooncake #3599 #2187: no recency, no lease, no hit."""
        rig.write(make_chain(SPEC, "abcd"))
        rig.write(make_chain(SPEC, "wxyz"))
        found = rig.store.lookup(make_chain(SPEC, "abcdef"))
        assert (found.matched, found.verified) == (16, 16)
        assert found.served == found.alone == {TierName.HOST: 16}
        assert (leased_bytes(rig), settled(rig)) == (0, [])
        assert [event.tokens for event in rig.events.of(TokensProbed)] == [24]
        rig.host.pool.evict(rig.host.pool.extents.classes()[0], 4)
        assert rig.store.lookup(make_chain(SPEC, "abcd")).matched == 0
        assert rig.store.lookup(make_chain(SPEC, "wxyz")).matched == 16

    def test_what_was_found_by_hash_alone_is_not_verified(self, rig: Rig) -> None:
        rig.write(make_chain(SPEC, "ab"))
        found = rig.store.lookup(hash_only(make_chain(SPEC, "ab")))
        assert (found.matched, found.verified) == (8, 0)

    def test_each_block_is_served_from_its_fastest_tier(self, two_tiers: Rig) -> None:
        two_tiers.write(make_chain(SPEC, "abcd"))
        lease = two_tiers.store.acquire("r", make_chain(SPEC, "ab"))
        two_tiers.store.promote(lease)
        found = two_tiers.store.lookup(make_chain(SPEC, "abcd"))
        assert found.served == {TierName.DEVICE: 8, TierName.HOST: 8}
        assert found.alone == {TierName.DEVICE: 8, TierName.HOST: 16}


class TestTable:
    def test_a_lease_is_found_by_its_owner_only(self) -> None:
        table = LeaseTable()
        lease = table.open(("me", "r"), make_chain(SPEC, "a"), (WHOLE,), 10.0, Terms())
        assert table.get(lease.id, "me") is lease
        with pytest.raises(LeaseError, match=f"lease {lease.id} is not held by 'you'"):
            table.get(lease.id, "you")
        table.close(lease)
        with pytest.raises(LeaseError, match="acquire again"):
            table.get(lease.id, "me")

    def test_renewed_leases_are_not_overdue(self) -> None:
        table = LeaseTable()
        chain = make_chain(SPEC, "a")
        leases = [table.open(("", str(each)), chain, (WHOLE,), 10.0 + each, Terms()) for each in range(3)]
        table.renew(leases[0], 20.0)
        assert table.overdue(11.5) == [leases[1]]
        table.close(leases[1])
        assert table.overdue(20.0) == [leases[2], leases[0]]

    def test_many_that_end_together_are_found_in_linear_time(self) -> None:
        table = LeaseTable()
        chain = make_chain(SPEC, "a")
        for number in range(20_000):
            lease = table.open(("", str(number)), chain, (WHOLE,), 10.0, Terms())
            table.renew(lease, 11.0)
        began = time.perf_counter()
        assert len(table.overdue(12.0)) == 20_000
        assert time.perf_counter() - began < 1.5


def test_what_was_released_is_promised_to_nobody_after_a_restart(rig: Rig) -> None:
    """A block that is found damaged then must not be kept by a promise that is over."""
    rig.write(make_chain(SPEC, "abcd"))
    first, second = (rig.store.acquire(name, make_chain(SPEC, "abcd")) for name in "xy")
    [extent] = rig.host.pool.extents.extents()
    rig.store.release(first)
    assert np.count_nonzero(extent.table.lease_until) == 4
    rig.store.release(second)
    assert not extent.table.lease_until.any()
