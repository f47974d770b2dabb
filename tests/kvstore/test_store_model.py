"""The store against a model, over any sequence of requests, writes, faults and delays."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.block import Chain, MissCause, TierName
from kvstore.events import BlocksDropped, BlocksRemoved, BlocksStored, DropCause, RemovalCause, RequestSettled
from kvstore.store import Demotion
from tests.support.faulty_tier import Fault
from tests.support.store_model import SPECS, StoreModel
from tests.support.stores import make_chain

# A capital collides with its small letter: prompts share beginnings, for real and by accident.
TEXTS = ("abcdabcd", "abcdabcd", "abcdbbcd", "abcDabcd")
LENGTHS = (8, 8, 6, 2, 0)
ENDS = ("commit", "commit", "commit", "abort", "raise")
USES = ("promote", "promote", "compute", "release", "release", "renew")
PAUSES = (0.5, 11.0, 21.0, 31.0)
MOST_OF_A_KIND = 3
"""Leases, open writes and the like at one time: with more, all that happens is that the pools are full."""


def make_prompt(model: str, text: str, blocks: int, tail: int) -> Chain:
    return make_chain(SPECS[model], text[:blocks], tail=tail, colliding=True)


prompts = st.builds(
    make_prompt,
    st.sampled_from(sorted(SPECS)),
    st.sampled_from(TEXTS),
    st.sampled_from(LENGTHS),
    st.integers(0, 3),
)
picks = st.integers(0, 30)
numbers = st.integers(0, 6)


def use(model: StoreModel, pick: int, how: str, number: int) -> None:
    request = model.requests[pick % len(model.requests)]
    if how == "promote":
        model.promote(request, number)
    elif how == "compute":
        model.compute(request, number)
    elif how == "renew":
        model.renew(request)
    else:
        model.release(request, number if number else None)


class StoreMachine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest sequence that breaks the model."""

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.model = StoreModel(seed)

    @precondition(lambda self: len(self.model.requests) < MOST_OF_A_KIND)
    @rule(chain=prompts, first_block=st.just(0) | numbers)
    def acquire(self, chain: Chain, first_block: int) -> None:
        self.model.acquire(chain, first_block)

    @precondition(lambda self: self.model.requests)
    @rule(pick=picks, how=st.sampled_from(USES), number=numbers)
    def use(self, pick: int, how: str, number: int) -> None:
        use(self.model, pick, how, number)

    @rule(seconds=st.sampled_from(PAUSES))
    def let_time_pass(self, seconds: float) -> None:
        self.model.let_time_pass(seconds)

    @rule(chain=prompts)
    def put(self, chain: Chain) -> None:
        self.model.put(chain)

    @rule(model=st.sampled_from(["small", "large"]))
    def flood(self, model: str) -> None:
        self.model.flood(model)

    @precondition(lambda self: len(self.model.writes) < MOST_OF_A_KIND)
    @rule(chain=prompts, rank=numbers, first_block=numbers)
    def begin_write(self, chain: Chain, rank: int, first_block: int) -> None:
        self.model.begin_write(chain, rank, first_block)

    @precondition(lambda self: self.model.writes)
    @rule(pick=picks, how=st.sampled_from(ENDS))
    def end_write(self, pick: int, how: str) -> None:
        self.model.end_write(self.model.writes[pick % len(self.model.writes)], how)

    @precondition(lambda self: self.model.writes)
    @rule(pick=picks)
    def scribble(self, pick: int) -> None:
        self.model.scribble(self.model.writes[pick % len(self.model.writes)])

    @precondition(lambda self: len(self.model.reserved) < MOST_OF_A_KIND)
    @rule(model=st.sampled_from(["small", "large"]), blocks=numbers)
    def reserve(self, model: str, blocks: int) -> None:
        self.model.reserve(model, blocks)

    @precondition(lambda self: self.model.reserved)
    @rule(blocks=numbers)
    def unreserve(self, blocks: int) -> None:
        self.model.unreserve(blocks)

    @rule(calls=st.sampled_from([1, 2, 4, 1000]))
    def deliver(self, calls: int) -> None:
        self.model.deliver(calls)

    @rule(odds=st.dictionaries(st.sampled_from([*Fault]), st.sampled_from([0.1, 0.6]), max_size=2))
    def go_wrong(self, odds: dict[Fault, float]) -> None:
        self.model.faulty.odds = odds

    @precondition(lambda self: self.model.remote.values)
    @rule(pick=picks)
    def flip_a_byte(self, pick: int) -> None:
        self.model.flip_a_byte(pick)

    @rule()
    def lose_everything(self) -> None:
        """Redis restarts, and it kept nothing."""
        self.model.remote.values.clear()

    @invariant()
    def all_is_well(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.finish()


StoreMachine.TestCase.settings = settings(stateful_step_count=60)
TestStoreMachine = StoreMachine.TestCase


class Walk:
    """A seeded random walk over the same model: no shrinking, but deep and wide."""

    def __init__(self, seed: int) -> None:
        self.model = StoreModel(seed)
        self._random = random.Random(seed)

    def prompt(self) -> Chain:
        one_of = self._random.choice
        return make_prompt(one_of(sorted(SPECS)), one_of(TEXTS), one_of(LENGTHS), self._random.randrange(4))

    def step(self) -> None:
        steps: tuple[tuple[int, Callable[[], None]], ...] = (
            (35, lambda: self.model.deliver(self._random.choice([1, 2, 5, 1000]))),
            (25, self.go_on_reading),
            (20, self.begin_to_read),
            (8, lambda: self.model.put(self.prompt())),
            (8, lambda: self.model.flood(self._random.choice(["small", "large"]))),
            (8, self.go_on_writing),
            (6, self.make_trouble),
            (5, self.begin_to_write),
            (4, lambda: self.model.let_time_pass(self._random.choice(PAUSES))),
            (3, self.change_reserve),
        )
        weights = [weight for weight, _ in steps]
        self._random.choices(steps, weights)[0][1]()

    def begin_to_read(self) -> None:
        if len(self.model.requests) < MOST_OF_A_KIND:
            self.model.acquire(self.prompt(), self._random.choice([0, 0, 0, 1, 2]))

    def go_on_reading(self) -> None:
        if self.model.requests:
            use(self.model, self._random.randrange(30), self._random.choice(USES), self._random.randrange(7))

    def begin_to_write(self) -> None:
        if len(self.model.writes) < MOST_OF_A_KIND:
            first_block = self._random.choice([0, 0, 1, 4])
            self.model.begin_write(self.prompt(), self._random.randrange(2), first_block)

    def go_on_writing(self) -> None:
        if not self.model.writes:
            return
        write = self._random.choice(self.model.writes)
        if self._random.random() < 0.3:
            self.model.scribble(write)
        else:
            self.model.end_write(write, self._random.choice(ENDS))

    def change_reserve(self) -> None:
        if len(self.model.reserved) < MOST_OF_A_KIND:
            self.model.reserve(self._random.choice(["small", "large"]), self._random.randrange(6))
        else:
            self.model.unreserve(self._random.randrange(7))

    def make_trouble(self) -> None:
        trouble = self._random.random()
        if trouble < 0.1:
            self.model.remote.values.clear()
        elif trouble < 0.4 and self.model.remote.values:
            self.model.flip_a_byte(self._random.randrange(10_000))
        else:
            faults = self._random.sample([*Fault], self._random.randrange(3))
            self.model.faulty.odds = {fault: self._random.choice([0.1, 0.6]) for fault in faults}


def test_random_walks_keep_the_promise_and_reach_everything(caplog: pytest.LogCaptureFixture) -> None:
    """The second half of the assertions is about the test: what it no longer reaches, it no longer tests."""
    caplog.set_level(logging.CRITICAL)  # what a tier raises is logged, and here tiers raise on purpose
    hits: Counter[TierName] = Counter()
    misses: Counter[MissCause] = Counter()
    faults: Counter[Fault] = Counter()
    removals: set[tuple[TierName, RemovalCause]] = set()
    drops: set[tuple[TierName, DropCause]] = set()
    copied: Counter[Demotion] = Counter()
    for seed in range(10):
        walk = Walk(seed)
        for _ in range(500):
            walk.step()
            walk.model.check()
        walk.model.finish()
        faults += walk.model.faulty.struck
        for event in walk.model.rig.events.of(RequestSettled):
            hits.update(event.hit_tokens)
            misses.update(event.miss_tokens)
        removals |= {(event.tier, event.cause) for event in walk.model.rig.events.of(BlocksRemoved)}
        copied[walk.model.mode] += sum(
            event.tier is TierName.REDIS for event in walk.model.rig.events.of(BlocksStored)
        )
        drops |= {(event.tier, event.cause) for event in walk.model.rig.events.of(BlocksDropped)}
    assert set(hits) == {TierName.DEVICE, TierName.HOST, TierName.REDIS}
    assert set(misses) >= {
        MissCause.COLD,
        MissCause.TAIL,
        MissCause.COLLISION,
        MissCause.CORRUPT,
        MissCause.STALE,
        MissCause.TIMEOUT,
        MissCause.UNAVAILABLE,
        MissCause.QUOTA,
    }
    assert set(faults) == {*Fault}
    assert min(copied[mode] for mode in Demotion) > 0
    for tier in (TierName.DEVICE, TierName.HOST):
        assert {(tier, RemovalCause.CAPACITY), (tier, RemovalCause.RECLAIMED)} <= removals
    assert (TierName.REDIS, RemovalCause.CORRUPT) in removals
    assert {cause for _, cause in drops} >= {
        DropCause.FULL,
        DropCause.DEADLINE,
        DropCause.QUEUE,
        DropCause.COLLISION,
        DropCause.UNAVAILABLE,
    }
