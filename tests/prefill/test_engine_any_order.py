"""Any order of calls, on a device that is too small: right answers, balanced books, nothing left over.

Cases 18 and 49 of what users of such systems run into: after any mix of submit, cancel, handoff and
end no lease and no slot is left (LMCache #987 #1034 #1130 #1756 #2912 #3381 #5090, sglang #40334).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

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
from prefill.request import Request, Result
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

HEAD = prompt_of(48)
PROMPTS = (
    HEAD,
    np.concatenate([HEAD, prompt_of(20, seed=1)]),
    np.concatenate([HEAD, prompt_of(50, seed=2)]),
    prompt_of(9, seed=3),
    prompt_of(64, seed=4),
)
NEW_TOKENS = 20
DEVICE_BLOCKS = 12
LEASE_SECONDS = 30.0


def request(number: int) -> Request:
    return request_of(f"r{number}", PROMPTS[number], NEW_TOKENS)


class Play:
    """Two engines over one store, and what they must answer."""

    def __init__(self, worker: Worker, clock: FakeClock, expected: list[list[int]]) -> None:
        parts = (worker.runner, worker.memory, worker.store, worker.spec.root)
        self.worker = worker
        self.clock = clock
        self.engines = (worker.engine, Engine(*parts, clock=clock, options=EngineOptions(owner="decode")))
        self.messages: dict[int, bytes] = {}
        self.expected = expected

    def submit(self, number: int) -> None:
        with suppress(RequestError):
            self.engines[0].submit(request(number))

    def step(self, number: int) -> None:
        # An engine that rests while the other one works loses its leases, and perhaps its room.
        with suppress(PoolError):
            self.check(self.engines[number % 2].step())

    def cancel(self, number: int) -> None:
        for engine in self.engines:
            engine.cancel(f"r{number}")

    def hand_over(self, number: int) -> None:
        with suppress(RequestError, PoolError):
            self.messages[number] = self.engines[0].prefill(request(number)).to_bytes()

    def acknowledge(self, number: int) -> None:
        self.engines[0].acknowledge(f"r{number}")

    def resume(self, number: int) -> None:
        """Whether the prefill side still holds the blocks or has long forgotten them."""
        if number in self.messages:
            with suppress(RequestError, PoolError):
                self.engines[1].resume(Handoff.from_bytes(self.messages[number]))

    def wait(self, number: int) -> None:
        self.clock.advance(number * LEASE_SECONDS / 3)

    def check(self, results: list[Result]) -> None:
        for result in results:
            assert result.tokens == self.expected[int(result.request_id[1:])]

    def end(self) -> None:
        for number in range(len(PROMPTS)):
            self.acknowledge(number)
        while not all(engine.idle for engine in self.engines):
            for number in range(2):
                self.step(number)
        assert_quiet(self.worker)


CALLS: tuple[Callable[[Play, int], None], ...] = (
    Play.submit,
    Play.submit,
    Play.step,
    Play.step,
    Play.step,
    Play.cancel,
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
    with make_worker(loaded) as worker:
        return [
            answer(worker.engine, request_of("alone", prompt, NEW_TOKENS, reuse=False)).tokens
            for prompt in PROMPTS
        ]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, len(PROMPTS) - 1)), max_size=40))
def test_any_order_of_calls(
    loaded: LoadedModel, expected: list[list[int]], calls: list[tuple[Callable[[Play, int], None], int]]
) -> None:
    clock = FakeClock()
    options = WorkerOptions(device_blocks=DEVICE_BLOCKS, lease_seconds=LEASE_SECONDS, host_extents=2)
    with make_worker(loaded, options, clock) as worker:
        play = Play(worker, clock, expected)
        for call, number in calls:
            call(play, number)
            worker.store.check()
        play.end()
