"""LRU by requests equals a list of single blocks in which a request's tail is used before its head."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.lru import LRU

SLOTS = 40
ROOT = -1

prompts = st.text("abc", min_size=1, max_size=6)


def slots_of(*numbers: int) -> SlotArray:
    return np.array(numbers, dtype=np.int64)


@dataclass
class Forest:
    """What a pool would tell the policy: which blocks are resident, how they hang together, who is pinned.

    ``last_used`` is the whole of the slow model: per block, when it was used, and how deep it is.
    """

    parent: dict[str, str] = field(default_factory=dict)
    slot: dict[str, int] = field(default_factory=dict)
    last_used: dict[str, tuple[int, int]] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.occupancy = Occupancy(
            children=np.zeros(SLOTS, dtype=np.int32),
            parent=np.full(SLOTS, ROOT, dtype=np.int32),
            pins=np.zeros(SLOTS, dtype=np.int32),
        )
        self.lru = LRU(self.occupancy)

    def request(self, prompt: str) -> None:
        """Use a prompt's blocks, named by all letters up to them, and bring those that are missing."""
        names = [prompt[:end] for end in range(1, len(prompt) + 1)]
        hits = sum(name in self.slot for name in names)
        while len(self.slot) + len(names) - hits > SLOTS:
            self.evict(1)
            hits = sum(name in self.slot for name in names)
        for name in names[hits:]:
            self.add(name)
        self.now += 1
        for depth, name in enumerate(names):
            self.last_used[name] = (self.now, -depth)
        slots = slots_of(*(self.slot[name] for name in names))
        self.lru.touch(Touch(prompt.encode(), slots[:hits], hits, float(self.now)))
        if hits < len(names):
            self.lru.add(slots[hits:], b"", int(slots[hits - 1]) if hits else ROOT, float(self.now))

    def add(self, name: str) -> None:
        slot = min(set(range(SLOTS)) - set(self.slot.values()))
        self.slot[name] = slot
        parent = self.slot.get(name[:-1], ROOT)
        self.occupancy.parent[slot] = parent
        if parent != ROOT:
            self.occupancy.children[parent] += 1

    def remove(self, name: str) -> None:
        slot = self.slot.pop(name)
        del self.last_used[name]
        assert not self.children(name), "a block was taken from under its children"
        parent = self.occupancy.parent[slot]
        if parent != ROOT:
            self.occupancy.children[parent] -= 1
        self.occupancy.parent[slot] = ROOT

    def lose(self, name: str) -> None:
        """Remove a block from under its children, as a pool does when it is corrupt or reclaimed."""
        slot = self.slot[name]
        orphans = slots_of(*(self.slot[child] for child in self.children(name)))
        self.lru.forget(slots_of(slot))
        self.occupancy.parent[orphans] = ROOT
        self.occupancy.children[slot] = 0
        self.occupancy.children[self.occupancy.parent[slot]] -= 1
        del self.slot[name], self.last_used[name]
        self.lru.orphan(orphans)

    def evict(self, count: int) -> list[str]:
        """Free ``count`` blocks as a pool does, and say which."""
        names = {slot: name for name, slot in self.slot.items()}
        freed: list[str] = []
        while len(freed) < count:
            victims = self.lru.victims(count - len(freed)).tolist()
            if not victims:
                break
            assert len(victims) <= count - len(freed)
            for slot in victims:
                assert self.occupancy.pins[slot] == 0, "what is pinned was offered"
                self.remove(names[slot])
                freed.append(names[slot])
        return freed

    def expected(self) -> str:
        """The leaf that was used longest ago; of one request's blocks, the deepest."""
        leaves = [name for name in self.slot if not self.children(name)]
        return min(leaves, key=self.last_used.__getitem__)

    def children(self, name: str) -> list[str]:
        return [each for each in self.slot if each[:-1] == name]


@given(st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=40))
def test_the_order_is_that_of_single_blocks(steps: list[tuple[str, int]]) -> None:
    forest = Forest()
    for prompt, evictions in steps:
        forest.request(prompt)
        for _ in range(min(evictions, len(forest.slot))):
            expected = forest.expected()
            assert forest.evict(1) == [expected]


@given(st.lists(prompts, max_size=20), st.integers(1, SLOTS))
def test_many_at_once_are_the_same_as_one_by_one(asked: list[str], count: int) -> None:
    at_once, singly = Forest(), Forest()
    for prompt in asked:
        at_once.request(prompt)
        singly.request(prompt)
    assert at_once.evict(count) == [name for _ in range(count) for name in singly.evict(1)]


@given(st.lists(prompts, min_size=1, max_size=20), st.lists(st.integers(0, SLOTS - 1), max_size=5))
def test_everything_goes_that_neither_is_pinned_nor_leads_to_what_is(
    asked: list[str], picks: list[int]
) -> None:
    """Mooncake #3599 #2187: eviction always finds what nobody leases."""
    forest = Forest()
    for prompt in asked:
        forest.request(prompt)
    pinned = {sorted(forest.slot)[pick % len(forest.slot)] for pick in picks}
    for name in pinned:
        forest.occupancy.pins[forest.slot[name]] += 1
    kept = {name for name in forest.slot if any(each.startswith(name) for each in pinned)}
    forest.evict(SLOTS)
    assert set(forest.slot) == kept
    for name in pinned:
        forest.occupancy.pins[forest.slot[name]] -= 1
    forest.evict(SLOTS)
    assert not forest.slot


def test_what_is_pinned_when_its_turn_comes_is_in_use_now() -> None:
    forest = Forest()
    forest.request("a")
    forest.request("b")
    forest.occupancy.pins[forest.slot["a"]] += 1
    forest.request("c")
    assert forest.evict(1) == ["b"]
    forest.occupancy.pins[forest.slot["a"]] -= 1
    assert forest.evict(2) == ["c", "a"]


def test_what_was_freed_behind_its_back_is_not_offered() -> None:
    forest = Forest()
    forest.request("ab")
    forest.request("c")
    forest.lru.forget(slots_of(forest.slot["ab"]))
    forest.remove("ab")
    assert forest.evict(5) == ["a", "c"]


def test_orphans_and_what_hangs_from_them_go_before_anything_else() -> None:
    forest = Forest()
    forest.request("xyz")
    forest.request("abcd")
    forest.lose("ab")
    assert forest.evict(2) == ["abcd", "abc"]
    assert forest.evict(4) == ["xyz", "xy", "x", "a"]


def test_a_slot_that_changed_hands_is_not_offered_for_its_old_request() -> None:
    forest = Forest()
    forest.request("a")
    forest.request("b")
    assert forest.evict(1) == ["a"]
    forest.request("c")
    assert forest.evict(2) == ["b", "c"]


def test_memory_does_not_grow_with_the_requests() -> None:
    """What records no longer own is dropped: hot prompts are touched for ever."""
    forest = Forest()
    forest.request("abcdef")
    slots = slots_of(*(forest.slot["abcdef"[:end]] for end in range(1, 7)))
    tracemalloc.start()
    for number in range(20_000):
        forest.lru.touch(Touch(b"", slots.copy(), 6, float(number)))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 500_000
    assert forest.evict(6) == ["abcdef"[:end] for end in range(6, 0, -1)]
