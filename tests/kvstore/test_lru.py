"""LRU by requests equals a list of single blocks in which a request's tail is used before its head."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvstore.evict.base import Touch
from kvstore.evict.lru import LRU
from tests.support.policy_forest import SLOTS, Forest, slots_of

prompts = st.text("abc", min_size=1, max_size=6)


def forest_of() -> Forest:
    return Forest(LRU)


@given(st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=40))
def test_the_order_is_that_of_single_blocks(steps: list[tuple[str, int]]) -> None:
    forest = forest_of()
    for prompt, evictions in steps:
        forest.request(prompt)
        for _ in range(min(evictions, len(forest.slot))):
            expected = forest.expected()
            assert forest.evict(1) == [expected]


@given(st.lists(prompts, max_size=20), st.integers(1, SLOTS))
def test_many_at_once_are_the_same_as_one_by_one(asked: list[str], count: int) -> None:
    at_once, singly = forest_of(), forest_of()
    for prompt in asked:
        at_once.request(prompt)
        singly.request(prompt)
    assert at_once.evict(count) == [name for _ in range(count) for name in singly.evict(1)]


@given(st.lists(prompts, min_size=1, max_size=20), st.lists(st.integers(0, SLOTS - 1), max_size=5))
def test_everything_goes_that_neither_is_pinned_nor_leads_to_what_is(
    asked: list[str], picks: list[int]
) -> None:
    """Mooncake #3599 #2187: eviction always finds what nobody leases."""
    forest = forest_of()
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
    forest = forest_of()
    forest.request("a")
    forest.request("b")
    forest.occupancy.pins[forest.slot["a"]] += 1
    forest.request("c")
    assert forest.evict(1) == ["b"]
    forest.occupancy.pins[forest.slot["a"]] -= 1
    assert forest.evict(2) == ["c", "a"]


def test_what_was_freed_behind_its_back_is_not_offered() -> None:
    forest = forest_of()
    forest.request("ab")
    forest.request("c")
    forest.evictor.forget(slots_of(forest.slot["ab"]))
    forest.remove("ab")
    assert forest.evict(5) == ["a", "c"]


def test_orphans_and_what_hangs_from_them_go_before_anything_else() -> None:
    forest = forest_of()
    forest.request("xyz")
    forest.request("abcd")
    forest.lose("ab")
    assert forest.evict(2) == ["abcd", "abc"]
    assert forest.evict(4) == ["xyz", "xy", "x", "a"]


def test_a_slot_that_changed_hands_is_not_offered_for_its_old_request() -> None:
    forest = forest_of()
    forest.request("a")
    forest.request("b")
    assert forest.evict(1) == ["a"]
    forest.request("c")
    assert forest.evict(2) == ["b", "c"]


def test_memory_does_not_grow_with_the_requests() -> None:
    """What records no longer own is dropped: hot prompts are touched for ever."""
    forest = forest_of()
    forest.request("abcdef")
    slots = slots_of(*(forest.slot["abcdef"[:end]] for end in range(1, 7)))
    tracemalloc.start()
    for number in range(20_000):
        forest.evictor.touch(Touch(b"", slots.copy(), 6, float(number)))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 500_000
    assert forest.evict(6) == ["abcdef"[:end] for end in range(6, 0, -1)]
