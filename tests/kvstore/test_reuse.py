"""The hazard model against sums and searches that are written out, and what ``reuse`` remembers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.columns import Columns
from kvstore.evict.curves import BUCKETS, EDGES, bucket, gittins
from kvstore.evict.hazard import (
    NO_GAP,
    SIZE_CLASSES,
    TURN_CLASSES,
    Group,
    HazardModel,
    Kind,
    size_class,
    spans,
    turn_class,
)
from kvstore.evict.reuse import Reuse
from kvstore.evict.tails import Tails
from kvstore.evict.watch import Watched
from kvstore.hints import Hints
from tests.support.policy_forest import Forest, hashes_of, slots_of

ages = st.floats(0, 2 * float(EDGES[-1]), allow_nan=False)
NEW = Kind(Group.FIRST, 0, 3, 3, NO_GAP)


def seconds_in(age: float, place: int) -> float:
    """Seconds of a chain's life up to ``age`` that fall in a bucket; the last one has no end."""
    end = age if place == BUCKETS - 1 else min(age, float(EDGES[place + 1]))
    return max(0.0, end - float(EDGES[place]))


@given(st.lists(st.tuples(ages, st.integers(0, 2)), max_size=20))
def test_spans_add_up_what_each_chain_lived_in_each_bucket(lives: list[tuple[float, int]]) -> None:
    found = spans(
        np.array([age for age, _ in lives]), np.array([kind for _, kind in lives], dtype=np.int64), 3
    )
    for kind in range(3):
        for place in range(BUCKETS):
            expected = sum(seconds_in(age, place) for age, each in lives if each == kind)
            assert found[kind, place] == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(ages)
def test_the_bucket_of_an_age_is_where_it_lies(age: float) -> None:
    place = bucket(age)
    assert EDGES[place] <= age
    assert place == BUCKETS - 1 or age < EDGES[place + 1]


@given(st.lists(st.floats(1e-8, 10), min_size=BUCKETS, max_size=BUCKETS))
def test_the_gittins_index_is_the_best_of_all_stopping_ages(rates: list[float]) -> None:
    found = gittins(np.array([rates]))[0]
    widths = np.diff(EDGES)
    for start in range(BUCKETS):
        best, alive, hits, kept = 0.0, 1.0, 0.0, 0.0
        for place in range(start, BUCKETS):
            stays = float(np.exp(-rates[place] * widths[place]))
            hits += alive * (1 - stays)
            kept += alive * (1 - stays) / rates[place]
            alive *= stays
            best = max(best, hits / kept)
        assert found.worth[start] == pytest.approx(best, rel=1e-6)
    hits, kept = found.wait
    assert hits / kept == pytest.approx(found.worth[0], rel=1e-6)


def test_a_rate_is_learned_from_what_came_and_what_did_not() -> None:
    """A chain a second, each continued with the same rate: the model finds that rate."""
    model, random, rate = HazardModel(), np.random.default_rng(3), 0.05
    number = model.number(NEW)
    for _ in range(50):
        ages_at_end = np.minimum(random.exponential(1 / rate, 200), 30.0)
        exposure = spans(ages_at_end, np.full(200, number), 1)
        places = [bucket(age) for age in ages_at_end.tolist() if age < 30.0]
        events = np.bincount(places, minlength=BUCKETS).astype(np.float64)[None]
        model.learn(events, exposure)
    found = model.rates(np.array([number]))[0, : bucket(29.0)]
    assert found == pytest.approx(rate, rel=0.15)


def test_kinds_that_come_back_are_worth_more() -> None:
    model = HazardModel()
    back, gone = (model.number(NEW._replace(turn=turn)) for turn in (1, 2))
    exposure = spans(np.full(200, 20.0), np.repeat([back, gone], 100), 2)
    events = np.zeros((2, BUCKETS))
    events[back, bucket(20.0)] = 100
    model.learn(events, exposure)
    assert model.curves.worth(back, 0.0) > 2 * model.curves.worth(gone, 0.0)


def test_watched_chains_are_counted_once_for_every_second() -> None:
    columns = Columns()
    watched = Watched(columns)
    first, second, third = (columns.take() for _ in range(3))
    watched.begin(first, 0, 0.0)
    watched.begin(second, 1, 1.0)
    events, exposure = watched.collect(3.0)
    assert not events.any()
    watched.begin(third, 0, 3.0)
    watched.end(third, 4.0, continued=False)
    watched.change(second, 2, 1.0)
    watched.end(first, 5.0, continued=True)
    watched.end(second, 6.0, continued=False)
    watched.end(second, 7.0, continued=False)
    assert (watched.waiting, watched.continued) == (3, 1)
    later_events, later = watched.collect(100.0)
    assert exposure.sum(axis=1).tolist() == pytest.approx([3.0, 2.0])
    assert later.sum(axis=1).tolist() == pytest.approx([3.0, 0.0, 3.0])
    assert later_events.sum() == 1
    assert later_events[0, bucket(5.0)] == 1
    assert not watched.collect(200.0)[1].any()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.floats(-50, 1e5, allow_nan=False), st.integers(-1, 4), st.integers(0, 2)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_many_chains_are_judged_as_each_alone(
    asked: list[tuple[int, float, int, int]],
) -> None:
    """Those whose time is yet to come too."""
    model, tails = HazardModel(), Tails()
    for turn in range(4):
        model.number(NEW._replace(turn=turn))
    events = np.zeros((4, BUCKETS))
    events[2, 3:9] = 7
    model.learn(events, spans(np.full(40, 300.0), np.repeat(np.arange(4), 10), 4))
    for unused in (0, 1, 1, 2):
        tails.count(unused, 9, 1)
    tails.refresh(fade=False)
    kinds, ages, cuts, turns = (np.array(column) for column in zip(*asked, strict=True))
    worths, shares = model.curves.worths(kinds, ages), tails.shares(cuts, turns)
    for place, (kind, age, cut, turn) in enumerate(asked):
        assert worths[place] == model.curves.worth(kind, age)
        assert shares[place] == (1.0 if cut < 0 else tails.share(cut, 9, turn))


def test_a_tail_that_continuations_leave_unused_is_worth_less() -> None:
    tails = Tails()
    for _ in range(98):
        tails.count(1, 5, 2)
    tails.refresh(fade=False)
    assert tails.share(0, 5, 2) == pytest.approx(0.01, rel=0.02)
    assert tails.share(1, 5, 2) == pytest.approx(0.99, rel=0.01)
    assert tails.droppable(0, 5, 2, 0.5) == 1
    assert tails.droppable(0, 5, 2, 1.0) > 1_000_000


def test_where_prompts_part_what_follows_is_worth_little() -> None:
    """Questions about one document: each leaves what the one before it asked, however long that was."""
    tails = Tails()
    for unused in (3, 8, 20):
        for _ in range(30):
            tails.count(unused, unused, 4)
    tails.refresh(fade=False)
    assert tails.share(5, 6, 4) < 0.02
    assert tails.share(6, 6, 4) == 1.0
    assert tails.droppable(1, 6, 4, 0.5) == 5
    assert tails.share(5, 6, 1) > 0.4, "of other turns nothing is known"


def test_what_was_not_seen_for_ever_so_long_is_unknown_again() -> None:
    """Counts that are halved again and again come to nothing, and nothing cannot be divided by."""
    tails = Tails()
    tails.count(1, 5, 2)
    for _ in range(1200):
        tails.refresh(fade=True)
    assert tails.share(9, 10, 2) == pytest.approx(0.5)
    assert tails.share(0, 10, 2) > 0


@pytest.mark.parametrize(("turn", "expected"), [(0, 0), (5, 5), (6, 6), (7, 6), (8, 7), (10**9, 12)])
def test_turns_are_told_apart_while_there_are_few(turn: int, expected: int) -> None:
    assert turn_class(turn) == expected < TURN_CLASSES - 1


@pytest.mark.parametrize(
    ("blocks", "expected"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (10**6, 11)]
)
def test_sizes_are_told_apart_by_doublings(blocks: int, expected: int) -> None:
    assert size_class(blocks) == expected < SIZE_CLASSES


def test_blocks_of_two_requests_that_are_written_late_go_to_who_asked_for_them() -> None:
    """Both are asked for before either is written, as by engines that compute for a while."""
    forest = Forest(Reuse)
    forest.request("a")
    forest.now += 1
    shared = slots_of(forest.slot["a"])
    for prompt in ("ab", "ac"):
        forest.evictor.touch(Touch(hashes_of(["a", prompt]), shared, 1, float(forest.now)))
    for prompt in ("ab", "ac"):
        forest.add(prompt)
        forest.last_used[prompt] = (forest.now, 0)
        forest.evictor.add(
            slots_of(forest.slot[prompt]), hashes_of([prompt]), int(shared[0]), float(forest.now)
        )
    assert set(forest.evict(2)) == {"ab", "ac"}
    assert forest.evict(2) == ["a"]


def test_what_said_that_it_ended_goes_first_once_that_has_proved_true() -> None:
    forest = Forest(Reuse)
    for number in range(600):
        letter = "abcdefgh"[number % 8]
        forest.request(letter * 2)
        forest.request(f"z{number}", Hints(ended=True))
    forest.request("zz", Hints(ended=True))
    forest.request("aa")
    assert forest.evict(1)[0].startswith("z")


def held_after(happens: Callable[[int], None]) -> int:
    """Bytes that 10,000 happenings take more than the first 2,000."""
    tracemalloc.start()
    for number in range(12_000):
        happens(number)
        if number == 2_000:
            before, _ = tracemalloc.get_traced_memory()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


def test_memory_does_not_grow_while_nothing_has_to_go() -> None:
    """Requests for what is there, and hints, with room for all of it."""
    forest = Forest(Reuse)
    forest.request("abc")
    found = slots_of(*(forest.slot[name] for name in ("a", "ab", "abc")))
    hashes = hashes_of(["a", "ab", "abc"])

    def happens(number: int) -> None:
        forest.evictor.touch(Touch(hashes, found, 3, float(number)))

    assert held_after(happens) < 200_000


def test_memory_does_not_grow_where_clients_only_write() -> None:
    occupancy = Occupancy(*(np.full(4, start, dtype=np.int32) for start in (0, -1, 0)))
    evictor = Reuse(occupancy)

    def happens(number: int) -> None:
        slots = evictor.victims(1) if number >= 4 else slots_of(number)
        evictor.add(slots, number.to_bytes(16), -1, float(number))

    assert held_after(happens) < 500_000


def test_memory_does_not_grow_with_the_requests() -> None:
    forest = Forest(Reuse)
    tracemalloc.start()
    for number in range(4000):
        forest.request(f"{number:06}")
        if number == 1000:
            before, _ = tracemalloc.get_traced_memory()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000
