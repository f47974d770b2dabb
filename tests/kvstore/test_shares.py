"""A group keeps what it is guaranteed, whatever the others do; without guarantees nothing changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import WHOLE, BlockRows, Residency, SlotArray
from kvstore.evict.order import runs_by_use
from kvstore.index import Space
from kvstore.integrity import check_pool
from kvstore.pool import BlockPool
from kvstore.spec import NamespaceSpec
from tests.support.stores import FakeClock, make_chain, make_device, make_spec

EXTENT = 16 << 10
POOL = 4 * EXTENT
ANN, BOB = 1, 2


@dataclass
class Tenant:
    """A share group with blocks of 1 KiB and of 4 KiB, in four extents that it shares with others."""

    pool: BlockPool
    clock: FakeClock
    group: int
    name: str
    pinned: list[SlotArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.small = make_spec(f"{self.name} small", payload_bytes=1024)
        self.large = make_spec(f"{self.name} large", payload_bytes=4096, block_size=8)
        for spec in (self.small, self.large):
            self.pool.open_space(
                spec.root.digest, WHOLE, spec.payload_bytes_on(), spec.block_size, group=self.group
            )

    @property
    def bytes(self) -> int:
        return self.pool.group_bytes(self.group)

    def space(self, spec: NamespaceSpec) -> Space:
        space = self.pool.space(spec.root.digest, WHOLE)
        assert space is not None
        return space

    def rows(self, letters: str, *, large: bool = False) -> BlockRows:
        return make_chain(self.large if large else self.small, letters).rows(WHOLE)

    def put(self, letters: str, *, large: bool = False) -> int:
        """Write a prompt, as far as there is room; its blocks that are there."""
        self.clock.advance(1)
        rows = self.rows(letters, large=large)
        lacking = np.flatnonzero([is_ is Residency.MISS for is_ in self.pool.residency(rows)])
        slots = self.pool.stage(
            self.space(self.large if large else self.small), len(lacking), rows.pick(lacking)
        )
        self.pool.commit(slots, rows.pick(lacking[: len(slots)]), None, time=self.clock())
        return self.has(letters, large=large)

    def has(self, letters: str, *, large: bool = False) -> int:
        return len(self.pool.match(self.rows(letters, large=large)).slots)

    def pin(self, letters: str) -> None:
        slots = self.pool.match(self.rows(letters)).slots
        self.pool.pin(slots, until=9.0)
        self.pinned.append(slots)

    def unpin(self) -> None:
        if self.pinned:
            self.pool.unpin(self.pinned.pop())


@dataclass
class Town:
    """One pool, and those who share it."""

    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.pool = make_device(self.clock, extents=POOL // EXTENT, extent_bytes=EXTENT).pool
        self.ann = Tenant(self.pool, self.clock, ANN, "ann")
        self.bob = Tenant(self.pool, self.clock, BOB, "bob")
        self.others = Tenant(self.pool, self.clock, 0, "others")
        self.guests = Tenant(self.pool, self.clock, 0, "guests")


@pytest.fixture
def town() -> Town:
    return Town()


def many(count: int, first: int = 0x4E00) -> str:
    """A prompt of so many blocks."""
    return "".join(chr(first + number) for number in range(count))


class TestGuarantee:
    def test_those_without_one_share_one_order_of_use(self, town: Town) -> None:
        town.others.put(many(40))
        town.guests.put(many(24))
        town.guests.put(many(24, 0x5000))
        assert town.others.has(many(40)) == 16
        assert town.guests.has(many(24)) == town.guests.has(many(24, 0x5000)) == 24
        check_pool(town.pool)

    def test_others_take_only_what_is_beyond_it(self, town: Town) -> None:
        town.pool.guarantee(BOB, 20 << 10)
        town.bob.put(many(40))
        for number in range(4):
            town.ann.put(many(60, 0x5000 + 100 * number))
        assert town.bob.bytes == 20 << 10
        assert town.bob.has(many(40)) == 20, "tails went first"
        assert town.ann.bytes == POOL - (20 << 10)
        check_pool(town.pool)

    def test_one_that_has_less_takes_from_whoever_has_more(self, town: Town) -> None:
        town.pool.guarantee(BOB, 32 << 10)
        town.pool.guarantee(ANN, 16 << 10)
        town.ann.put(many(64))
        assert town.bob.put(many(32)) == 32
        assert town.ann.bytes == 32 << 10
        check_pool(town.pool)

    def test_also_when_that_is_in_blocks_of_another_size_that_are_in_use_more(self, town: Town) -> None:
        town.pool.guarantee(BOB, 48 << 10)
        town.bob.put(many(8))
        town.ann.put(many(12), large=True)
        town.ann.put(many(12), large=True)
        assert town.bob.put(many(40, 0x5000)) == 40
        assert town.bob.bytes >= 40 << 10
        check_pool(town.pool)

    def test_what_a_group_has_beyond_its_own_guarantee_is_taken_from_itself_too(self, town: Town) -> None:
        town.pool.guarantee(BOB, 16 << 10)
        town.bob.put(many(48))
        town.ann.put(many(16))
        town.bob.put(many(16, 0x5000))
        assert town.ann.bytes == 16 << 10, "bob has 32 KiB more than he is guaranteed, ann 16"
        check_pool(town.pool)

    def test_two_that_have_too_much_shrink_together(self, town: Town) -> None:
        town.pool.guarantee(BOB, 8 << 10)
        town.bob.put(many(32))
        town.ann.put(many(32))
        town.others.put(many(20))
        assert town.others.bytes == 20 << 10
        # Beyond their guarantees bob had 24 KiB and ann 32.
        assert abs((town.bob.bytes - (8 << 10)) - town.ann.bytes) <= 2 << 10
        check_pool(town.pool)

    def test_a_group_at_its_guarantee_goes_on_by_itself(self, town: Town) -> None:
        for group in (ANN, BOB):
            town.pool.guarantee(group, POOL // 2)
        town.ann.put(many(32))
        town.bob.put(many(32))
        assert town.ann.put(many(20, 0x5000)) == 20
        assert town.bob.bytes == POOL // 2
        assert town.ann.bytes == POOL // 2
        check_pool(town.pool)

    def test_an_extent_is_not_taken_for_another_size_when_it_holds_guaranteed_blocks(
        self, town: Town
    ) -> None:
        town.pool.guarantee(BOB, 40 << 10)
        town.bob.put(many(40))
        town.ann.put(many(24))
        assert town.ann.put(many(8), large=True) >= 3
        assert town.bob.bytes >= 40 << 10
        check_pool(town.pool)

    def test_it_can_be_taken_back(self, town: Town) -> None:
        town.pool.guarantee(BOB, POOL)
        town.bob.put(many(64))
        assert town.ann.put(many(8)) == 0
        town.pool.guarantee(BOB, 0)
        assert town.ann.put(many(8)) == 8

    def test_pinned_blocks_beyond_a_guarantee_stop_nobody_else(self, town: Town) -> None:
        town.pool.guarantee(BOB, 1 << 10)
        town.ann.put(many(16))
        town.bob.put(many(40))
        town.bob.pin(many(40))
        assert town.others.put(many(20, 0x5000)) == 20
        assert town.bob.bytes == 40 << 10
        check_pool(town.pool)


class TestRegroup:
    def test_blocks_move_in_the_order_in_which_they_were_used(self, town: Town) -> None:
        for letters in ("abcd", "wxyz", "abef"):
            town.others.put(letters)
        space = town.others.space(town.others.small)
        town.pool.regroup(space, BOB)
        assert (town.pool.group_bytes(0), town.bob.bytes) == (0, 10 << 10)
        check_pool(town.pool)
        gone = []
        while town.pool.evict(space.slot_class, 1, BOB):
            gone.append(tuple(town.others.has(each) for each in ("abcd", "wxyz", "abef")))
            check_pool(town.pool)
        assert gone[:6] == [(3, 4, 4), (2, 4, 4), (2, 3, 4), (2, 2, 4), (2, 1, 4), (2, 0, 4)]
        assert gone[6:] == [(2, 0, 3), (2, 0, 2), (1, 0, 1), (0, 0, 0)]

    def test_new_blocks_go_to_the_new_group(self, town: Town) -> None:
        town.others.put("abcd")
        space = town.others.space(town.others.small)
        town.pool.regroup(space, BOB)
        town.others.put("abcdefgh")
        assert town.bob.bytes == 8 << 10
        town.pool.regroup(space, BOB)
        town.pool.regroup(space, 0)
        assert (town.pool.group_bytes(0), town.bob.bytes) == (8 << 10, 0)
        assert town.pool.evict(space.slot_class, 100) == 8
        check_pool(town.pool)

    def test_a_space_that_is_opened_again_stays_where_it_is(self, town: Town) -> None:
        spec = town.bob.small
        town.pool.open_space(spec.root.digest, WHOLE, spec.payload_bytes_on(), spec.block_size)
        town.bob.put("abcd")
        assert town.bob.bytes == 4 << 10


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("ann", "bob", "others")),
        st.sampled_from(("put", "put", "put large", "pin", "unpin", "give up", "take on")),
        st.integers(0, 3),
        st.integers(1, 24),
    ),
    max_size=30,
)


class TestWhateverHappens:
    @given(OPERATIONS, st.sampled_from((0, 8, 20, 40, 64)), st.sampled_from((8, 24)))
    def test_nobody_pushes_another_below_what_it_is_guaranteed(
        self, steps: list[tuple[str, str, int, int]], bobs: int, anns: int
    ) -> None:
        town = Town()
        guaranteed = {BOB: bobs << 10, ANN: anns << 10}
        for group, size in guaranteed.items():
            town.pool.guarantee(group, size)
        for name, what, prompt, count in steps:
            actor: Tenant = getattr(town, name)
            acting = {actor.group, town.pool.group_of(actor.space(actor.small))}
            before = {group: town.pool.group_bytes(group) for group in guaranteed}
            step(town, actor, what, many(count, 0x5000 + prompt * 64))
            for group, size in guaranteed.items():
                if group not in acting and what not in ("give up", "take on"):
                    assert town.pool.group_bytes(group) >= min(size, before[group])
            check_pool(town.pool)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24), st.booleans()), max_size=20))
    def test_a_group_alone_is_served_like_everybody_without_groups(
        self, prompts: list[tuple[int, int, bool]]
    ) -> None:
        """Which is how simulations replay, whose results are golden."""
        alone, grouped = Town(), Town()
        for prompt, count, large in prompts:
            letters = many(count, 0x5000 + prompt * 64)
            assert alone.others.put(letters, large=large) == grouped.bob.put(letters, large=large)
            assert alone.pool.usage() == grouped.pool.usage()


def step(town: Town, actor: Tenant, what: str, letters: str) -> None:
    if what == "pin":
        actor.pin(letters)
    elif what == "unpin":
        actor.unpin()
    elif what == "give up" and actor is town.others:
        town.pool.regroup(actor.space(actor.small), ANN)
    elif what == "take on" and actor is town.others:
        town.pool.regroup(actor.space(actor.small), 0)
    else:
        actor.put(letters, large=what == "put large")


class TestOrderOfUse:
    @given(st.data(), st.integers(1, 30))
    def test_a_run_follows_all_that_hangs_from_it(self, data: st.DataObject, count: int) -> None:
        """Compared with the definition, block by block."""
        slots = np.array(data.draw(st.permutations(range(count + 5)))[:count], dtype=np.int64)
        above = [data.draw(st.integers(-1, place - 1)) for place in range(count)]
        parents = np.array([slots[at] if at >= 0 else -1 for at in above], dtype=np.int64)
        used = np.array([data.draw(st.integers(0, 4)) for _ in range(count)], dtype=np.float64)
        lost = np.array([at < 0 and data.draw(st.booleans()) for at in above])
        below = {place: {place} for place in range(count)}
        for place in reversed(range(count)):
            if above[place] >= 0:
                below[above[place]] |= below[place]
        latest = {place: max(used[each] for each in below[place]) for place in range(count)}
        runs = runs_by_use(slots, parents, used, lost)
        place_of = {int(slot): place for place, slot in enumerate(slots)}
        seen: set[int] = set()
        ranks = []
        for time, run in runs:
            places = [place_of[slot] for slot in run.tolist()]
            assert [above[place] for place in places[1:]] == places[:-1], "a run is a chain"
            assert {latest[place] for place in places} == {time}
            for place in reversed(places):
                seen.add(place)
                assert below[place] <= seen, "a block goes before one that hangs from it"
            top = places[0]
            while above[top] >= 0:
                top = above[top]
            ranks.append((not lost[top], time))
        assert ranks == sorted(ranks)
        assert sorted(np.concatenate([run for _, run in runs]).tolist()) == sorted(slots.tolist())
