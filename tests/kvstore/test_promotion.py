"""A lease's blocks brought up to the device tier: promised throughout, cut where room ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.block import WHOLE, MissCause, TierName
from kvstore.errors import LeaseError
from kvstore.events import RequestSettled
from kvstore.lease import Lease
from tests.support.stores import SPLIT, FakeClock, Rig, RigOptions, hash_only, make_chain, make_rig, make_spec

SPEC = make_spec()
DIVIDED = make_spec("divided")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A device tier of 8 blocks above a host tier of 112."""
    options = RigOptions(host_extents=2, device_extents=1, device_extent_bytes=8 << 10)
    with make_rig(FakeClock(), [(SPEC, (WHOLE,)), (DIVIDED, SPLIT)], options) as made:
        yield made
        made.store.check()


def acquire(rig: Rig, letters: str, request: str = "r") -> Lease:
    return rig.store.acquire(request, make_chain(SPEC, letters))


def leased_bytes(rig: Rig) -> int:
    return sum(usage.leased for usage in rig.store.usage().values())


def test_blocks_go_up_and_stay_promised(rig: Rig) -> None:
    rig.write(make_chain(SPEC, "abcd"))
    lease = acquire(rig, "abcd")
    assert rig.store.promote(lease) == 4
    assert [segment.tier for segment in lease.segments[WHOLE]] == [TierName.DEVICE]
    rig.assert_promised(lease)
    usage = rig.store.usage()
    assert (usage[TierName.DEVICE].leased, usage[TierName.HOST].leased) == (4096, 0)
    assert rig.store.promote(lease) == 4
    rig.store.release(lease)
    assert leased_bytes(rig) == 0
    assert rig.events.of(RequestSettled)[0].hit_tokens == {TierName.HOST: 16}, "it came from there"


def test_two_requests_bring_the_same_blocks_up(rig: Rig) -> None:
    rig.write(make_chain(SPEC, "abcd"))
    first, second = acquire(rig, "abcd", "1"), acquire(rig, "abcd", "2")
    assert rig.store.promote(first) == 4
    assert rig.store.promote(second) == 4
    assert rig.store.usage()[TierName.DEVICE].ready == 4096
    rig.store.release(first)
    rig.assert_promised(second)
    rig.store.check()


def test_to_find_them_up_there_is_to_use_them(rig: Rig) -> None:
    for letters in ("abcd", "wxyz"):
        rig.write(make_chain(SPEC, letters))
    for each, letters in enumerate(("abcd", "wxyz", "abcd")):
        lease = acquire(rig, letters, str(each))
        rig.store.promote(lease)
        rig.store.release(lease)
    assert len(rig.store.reserve(SPEC.root.digest, 4)) == 4
    assert rig.resident(rig.top, make_chain(SPEC, "abcd")) == 4


def test_part_of_them_may_be_up_already(rig: Rig) -> None:
    rig.write(make_chain(SPEC, "abcdef"))
    lease = acquire(rig, "abcdef", "all")
    shorter = acquire(rig, "abc", "part")
    rig.store.promote(shorter)
    rig.store.release(shorter)
    assert rig.store.promote(lease) == 6
    rig.assert_promised(lease)


def test_a_device_that_is_too_small_cuts_the_run(rig: Rig) -> None:
    rig.write(make_chain(SPEC, "abcdefghijkl", tail=1))
    lease = acquire(rig, "abcdefghijkl")
    assert rig.store.promote(lease) == lease.blocks == 8
    rig.assert_promised(lease)
    assert rig.store.usage()[TierName.HOST].leased == 0
    rig.store.release(lease)
    (event,) = rig.events.of(RequestSettled)
    assert event.hit_tokens == {TierName.HOST: 32}
    assert event.miss_tokens == {MissCause.QUOTA: 16}


def test_a_device_full_of_leases_cuts_it_to_nothing(rig: Rig) -> None:
    rig.write(make_chain(SPEC, "abcdefgh"))
    rig.write(make_chain(SPEC, "xy"))
    rig.store.promote(acquire(rig, "abcdefgh", "all"))
    lease = acquire(rig, "xy")
    assert rig.store.promote(lease) == lease.blocks == 0
    assert lease.segments[WHOLE] == []


def test_a_cut_is_a_cut_for_all_ranks(rig: Rig) -> None:
    for shard in SPLIT:
        rig.write(make_chain(DIVIDED, "abcdef"), shard)
    lease = rig.store.acquire("r", make_chain(DIVIDED, "abcdef"), SPLIT)
    assert rig.store.promote(lease, SPLIT[0]) == 6
    assert rig.store.promote(lease, SPLIT[1]) == 2
    rig.assert_promised(lease)
    usage = rig.store.usage()
    assert (usage[TierName.DEVICE].leased, usage[TierName.HOST].leased) == (4096, 0)
    rig.store.release(lease)
    assert leased_bytes(rig) == 0


def test_ranks_are_promoted_one_by_one(rig: Rig) -> None:
    """What one rank brings up must not let go of what the other holds."""
    for shard in SPLIT:
        rig.write(make_chain(DIVIDED, "abc"), shard)
    lease = rig.store.acquire("r", make_chain(DIVIDED, "abc"), SPLIT)
    rig.store.promote(lease, SPLIT[0])
    usage = rig.store.usage()
    assert (usage[TierName.DEVICE].leased, usage[TierName.HOST].leased) == (3072, 3072)
    rig.assert_promised(lease)


def test_who_knows_only_hashes_may_promote(rig: Rig) -> None:
    rig.write(make_chain(SPEC, "abc"))
    lease = rig.store.acquire("r", hash_only(make_chain(SPEC, "abc")))
    assert rig.store.promote(lease) == 3
    assert rig.resident(rig.top, make_chain(SPEC, "abc")) == 3


def test_what_is_over_is_not_promoted(rig: Rig) -> None:
    """Its slots may hold anything by now, and it would be copied under the old names."""
    rig.write(make_chain(SPEC, "abc"))
    lease = acquire(rig, "abc")
    rig.store.release(lease)
    with pytest.raises(LeaseError, match="is over"):
        rig.store.promote(lease)


def test_without_a_device_there_is_nothing_to_do() -> None:
    with make_rig(FakeClock(), [(SPEC, (WHOLE,))]) as rig:
        rig.write(make_chain(SPEC, "abc"))
        lease = acquire(rig, "abc")
        assert rig.store.promote(lease) == 3
        rig.assert_promised(lease)
