"""What hints do in ``reuse``, and that they cannot cost others much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.evict.base import TakesHints, Touch
from kvstore.evict.reuse import Reuse
from kvstore.hints import NO_HINTS, Hints
from kvstore.simulate import POLICIES, Instance, Workload
from tests.support.policy_forest import Forest, hashes_of, prefixes, slots_of
from tests.support.policy_workloads import sessions, workload_of

HIGH, LOW = Hints(priority=8), Hints(priority=-8)


def say(forest: Forest, prompt: str, hints: Hints) -> None:
    """A request that was made says something else of its future."""
    names = prefixes(prompt)
    slots = slots_of(*(forest.slot[name] for name in names if name in forest.slot))
    evictor = forest.evictor
    assert isinstance(evictor, TakesHints)
    evictor.hint(Touch(hashes_of(names), slots, 0, float(forest.now), hints))


def three(hints: Hints = NO_HINTS) -> Forest:
    """Prompts a, b, c, d of three blocks each, used in that order, of which c says something."""
    forest = Forest(Reuse)
    for letter in "abcd":
        forest.request(letter * 3, hints if letter == "c" else NO_HINTS)
    return forest


def order(forest: Forest) -> str:
    """In which order the prompts begin to go."""
    return "".join(dict.fromkeys(name[0] for name in forest.evict(12)))


def test_without_hints_the_oldest_goes_first() -> None:
    assert order(three()) == "abcd"


@pytest.mark.parametrize(("hints", "expected"), [(HIGH, "abdc"), (LOW, "cabd"), (Hints(priority=0), "abcd")])
def test_a_priority_moves_a_prompt(hints: Hints, expected: str) -> None:
    assert order(three(hints)) == expected


def test_a_priority_counts_for_nothing_where_most_of_the_room_has_one() -> None:
    forest = Forest(Reuse)
    for letter in "abcd":
        forest.request(letter * 3, HIGH if letter < "c" else NO_HINTS)
    assert order(forest).startswith("a")


def test_who_is_idle_for_long_goes_first_and_who_is_for_short_does_not() -> None:
    assert order(three(Hints(idle_seconds=1e6))) == "cabd"
    assert order(three(Hints(idle_seconds=0.001))) != "cabd"


def test_who_was_idle_is_young_when_its_time_has_come() -> None:
    """After 300 s those that were expected at once are old."""
    forest = three(Hints(idle_seconds=300.0))
    forest.now += 300
    forest.request("e")
    assert order(forest).rstrip("e")[-1] == "c"


def test_a_later_hint_replaces_the_first_one() -> None:
    forest = three(LOW)
    say(forest, "ccc", HIGH)
    assert order(forest) == "abdc"
    forest = three(HIGH)
    say(forest, "ccc", NO_HINTS)
    assert order(forest) == "abcd"


def test_a_hint_for_what_is_not_there_is_not_heard() -> None:
    forest = three()
    say(forest, "x", LOW)
    say(forest, "cc", LOW)
    assert order(forest) == "abcd"


def test_a_hint_is_no_use() -> None:
    """Saying it again and again makes a prompt no younger."""
    forest = three()
    for _ in range(5):
        forest.now += 60
        say(forest, "aaa", NO_HINTS)
    forest.request("e")
    assert order(forest)[0] == "a"


# -- what they can cost -------------------------------------------------------------------------------------


def lies(workload: Workload, share: float, hints: Hints) -> tuple[Workload, np.ndarray]:
    """Some requests say something that has nothing to do with what they will do; and which those are."""
    liars = np.random.default_rng(11).random(len(workload.requests)) < share
    requests = [
        replace(each, hints=hints) if lying else each
        for each, lying in zip(workload.requests, liars.tolist(), strict=True)
    ]
    return replace(workload, requests=requests), liars


def honest_hits(workload: Workload, liars: np.ndarray, blocks: int) -> float:
    """Percent of blocks that requests hit which say nothing."""
    instance = Instance(POLICIES["reuse"](workload), workload, blocks)
    hits = np.array([instance.serve(number) for number in range(len(workload.requests))])
    asked = np.array([len(ids) for ids in workload.blocks])
    return float(100 * hits[~liars].sum() / asked[~liars].sum())


@pytest.mark.parametrize(
    "hints", [HIGH, Hints(ended=True), Hints(idle_seconds=0.5)], ids=["priority", "ended", "idle"]
)
def test_others_lose_little_by_who_says_what_is_not_true(hints: Hints) -> None:
    """Measured: at most one point, where a third of all say it."""
    workload = workload_of(sessions(np.random.default_rng(5), count=500))
    told, liars = lies(workload, 1 / 3, hints)
    assert honest_hits(told, liars, 800) >= honest_hits(workload, liars, 800) - 2
