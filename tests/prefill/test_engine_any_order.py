"""Any order of calls, on a device that is too small: right answers, balanced books, nothing left over.

Cases 18 and 49 of what users of such systems run into: after any mix of submit, cancel, preemption,
handoff and end no lease and no slot is left (LMCache #987 #1034 #1130 #1756 #2912 #3381 #5090,
sglang #40334).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import PoolError
from prefill.assemble import Worker
from prefill.engine import Engine, EngineOptions
from prefill.errors import RequestError
from prefill.handoff import Handoff
from prefill.model import LoadedModel
from prefill.output import StepOutput
from prefill.request import GREEDY, FinishReason, Request, Sampling
from prefill.scheduler import Policy
from tests.support.stores import FakeClock
from tests.support.workers import (
    WorkerOptions,
    answer,
    assert_quiet,
    load_tiny,
    make_worker,
    prompt_of,
    request_of,
)

EXAMPLES = settings.default.max_examples // 2 if settings.default else 25
"""Of each test here: a soak takes a deeper profile."""

HEAD = prompt_of(48)
PROMPTS = (
    HEAD,
    np.concatenate([HEAD, prompt_of(20, seed=1)]),
    np.concatenate([HEAD, prompt_of(50, seed=2)]),
    prompt_of(9, seed=3),
    prompt_of(64, seed=4),
    np.concatenate([HEAD, prompt_of(20, seed=1)]),
    prompt_of(64, seed=4),
)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=5)
SAMPLINGS = (GREEDY, GREEDY, SAMPLED, SAMPLED, GREEDY, replace(SAMPLED, seed=6), GREEDY)
NEW_TOKENS = 20
DEVICE_BLOCKS = 12
LEASE_SECONDS = 30.0
ENGINES = 2

engine_options = st.builds(
    EngineOptions,
    step_tokens=st.sampled_from((1, 7, 16, 40, 512)),
    policy=st.sampled_from(Policy),
    chunked=st.sampled_from((True, True, True, False)),
    running_max=st.sampled_from((1, 3, 64)),
)


def request(number: int, *, reuse: bool = True) -> Request:
    request = request_of(f"r{number}", PROMPTS[number], NEW_TOKENS, reuse=reuse)
    return replace(request, sampling=SAMPLINGS[number])


class Play:
    """Two engines over one store, and what they must say."""

    def __init__(
        self, worker: Worker, options: EngineOptions, clock: FakeClock, expected: list[list[int]]
    ) -> None:
        parts = (worker.runner, worker.memory, worker.store, worker.spec.root)
        decode = Engine(*parts, clock=clock, options=replace(options, owner="decode"))
        self.worker = worker
        self.clock = clock
        self.engines = (worker.engine, decode)
        self.messages: dict[int, bytes] = {}
        self.expected = expected
        self.said: dict[tuple[int, int], list[int]] = {}
        """Tokens of every request that runs, by engine and number."""
        self.admitted: set[int] = set()

    def submit(self, number: int) -> None:
        with suppress(RequestError):
            self.engines[0].submit(request(number))
            self.said[0, number] = []

    def submit_without_reuse(self, number: int) -> None:
        with suppress(RequestError):
            self.engines[0].submit(request(number, reuse=False))
            self.said[0, number] = []

    def step(self, number: int) -> None:
        # An engine that rests while the other one works loses its leases, and perhaps its room.
        at = number % ENGINES
        for output in self.engines[at].step():
            self.hear(at, output)

    def cancel(self, number: int) -> None:
        for at, engine in enumerate(self.engines):
            engine.cancel(f"r{number}")
            self.said.pop((at, number), None)

    def complete(self, number: int) -> None:
        result = self.engines[0].complete(f"r{number}")
        if result is not None:
            assert result.tokens == self.said.pop((0, number))
            assert result.finished is FinishReason.STOP

    def hand_over(self, number: int) -> None:
        with suppress(RequestError):
            self.engines[0].submit_prefill(request(number))
            self.said[0, number] = []

    def acknowledge(self, number: int) -> None:
        self.engines[0].acknowledge(f"r{number}")

    def resume(self, number: int) -> None:
        """Whether the prefill side still holds the blocks or has long forgotten them.

        Some have been answered in part already, by a worker that is gone.
        """
        if number in self.messages:
            with suppress(RequestError):
                delivered = self.expected[number][: 1 + 3 * number]
                handoff = replace(Handoff.from_bytes(self.messages[number]), output=delivered)
                self.engines[1].resume(handoff)
                self.said[1, number] = list(handoff.output)
                self.admitted.discard(number)

    def wait(self, number: int) -> None:
        self.clock.advance(number * LEASE_SECONDS / 3)

    def hear(self, at: int, output: StepOutput) -> None:
        """Every token comes once and in order, and a result says the same."""
        number = int(output.request_id[1:])
        said, expected = self.said[at, number], self.expected[number]
        if output.token is not None:
            said.append(output.token)
        assert said == expected[: len(said)]
        if output.admitted:
            assert number not in self.admitted, "after a preemption it is no news"
            self.admitted.add(number)
        if output.handoff is not None:
            assert output.handoff.output == expected[:1]
            self.messages[number] = output.handoff.to_bytes()
        elif output.finished is FinishReason.ERROR:
            assert isinstance(output.error, PoolError), "the two engines compete for room, no more"
        elif output.finished is not None:
            assert output.result is not None
            result = output.result
            assert result.tokens == said == expected
            assert 0 <= result.computed_tokens <= result.prompt_tokens - result.cached_tokens
        if output.handoff is not None or output.finished is not None:
            del self.said[at, number]

    def end(self) -> None:
        while not all(engine.idle for engine in self.engines):
            for number in range(len(PROMPTS)):
                self.acknowledge(number)
            for at in range(ENGINES):
                self.step(at)
        for number in range(len(PROMPTS)):
            self.acknowledge(number)
        assert self.said == {}
        assert_quiet(self.worker)


CALLS: tuple[Callable[[Play, int], None], ...] = (
    Play.submit,
    Play.submit,
    Play.submit,
    Play.submit_without_reuse,
    Play.step,
    Play.step,
    Play.step,
    Play.step,
    Play.cancel,
    Play.complete,
    Play.hand_over,
    Play.acknowledge,
    Play.resume,
    Play.wait,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("gpt2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    """What each request says when it has the engine, and no cache, to itself."""
    options = WorkerOptions(engine=EngineOptions(chunked=False))
    with make_worker(loaded, options) as worker:
        return [answer(worker.engine, request(number, reuse=False)).tokens for number in range(len(PROMPTS))]


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, len(PROMPTS) - 1)), min_size=10, max_size=60),
    engine_options,
)
def test_any_order_of_calls(
    loaded: LoadedModel,
    expected: list[list[int]],
    calls: list[tuple[Callable[[Play, int], None], int]],
    engine: EngineOptions,
) -> None:
    clock = FakeClock()
    options = WorkerOptions(
        device_blocks=DEVICE_BLOCKS, lease_seconds=LEASE_SECONDS, host_extents=2, engine=engine
    )
    with make_worker(loaded, options, clock) as worker:
        play = Play(worker, engine, clock, expected)
        for call, number in calls:
            call(play, number)
            worker.store.check()
        play.end()


@settings(max_examples=EXAMPLES)
@given(
    st.permutations(range(len(PROMPTS))),
    st.lists(st.integers(0, 3), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    st.integers(DEVICE_BLOCKS, 30),
    engine_options,
)
def test_any_arrivals(
    loaded: LoadedModel,
    expected: list[list[int]],
    order: list[int],
    steps_between: list[int],
    device_blocks: int,
    engine: EngineOptions,
) -> None:
    """All requests, in any order and at any moment, with more room or less: each answers as it does alone."""
    clock = FakeClock()
    options = WorkerOptions(device_blocks=device_blocks, host_extents=2, engine=engine)
    with make_worker(loaded, options, clock) as worker:
        play = Play(worker, engine, clock, expected)
        for number, steps in zip(order, steps_between, strict=True):
            play.submit(number)
            for _ in range(steps):
                clock.advance(1.0)
                play.step(0)
        play.end()
