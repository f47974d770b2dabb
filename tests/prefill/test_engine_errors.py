"""Requests that cannot run, fail in the middle, or are called off: nothing of them stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from transformers import PreTrainedModel

from kvstore.errors import PoolError
from prefill.errors import PromptError, RequestError
from prefill.model import LoadedModel
from prefill.request import Request
from tests.support.models import MAX_POSITIONS, VOCAB_SIZE
from tests.support.workers import (
    BLOCK_SIZE,
    Tokens,
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    load_tiny,
    make_worker,
    prompt_of,
    ready_blocks,
    request_of,
    watch,
    work_off,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("models"))


def requests_of(prompts: list[Tokens], new: int = 20) -> list[Request]:
    return [request_of(f"r{at}", prompt, new) for at, prompt in enumerate(prompts)]


# -- what can never run ----------------------------------------------------------------------------

BAD = {
    "no tokens": ([], 1, PromptError, "0 tokens to compute, expected at least 1"),
    "id too high": (
        [5, VOCAB_SIZE],
        1,
        PromptError,
        f"token id {VOCAB_SIZE}, expected 0 to {VOCAB_SIZE - 1}",
    ),
    "id negative": ([5, -1], 1, PromptError, "token id -1, expected 0"),
    "no answer": ([5], 0, PromptError, "max_new_tokens is 0, expected at least 1"),
    "beyond the context": (
        [5] * MAX_POSITIONS,
        2,
        PromptError,
        f"{MAX_POSITIONS + 1} tokens, expected at most {MAX_POSITIONS}",
    ),
    "beyond the pool": ([5] * 150, 11, PoolError, "need 10 blocks, expected at most 9"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_request_that_can_never_run_is_refused_at_once(loaded: LoadedModel, what: str) -> None:
    tokens, new, kind, message = BAD[what]
    bad = Request("bad", np.array(tokens, dtype=np.int64), new, 0.0)
    with make_worker(loaded, WorkerOptions(device_blocks=9)) as worker, watch(loaded.model) as seen:
        engine = worker.engine
        calls = (lambda: engine.submit(bad), lambda: engine.run([bad]), lambda: engine.prefill(bad))
        for call in calls:
            with pytest.raises(kind) as caught:
                call()
            assert message in str(caught.value)
        with pytest.raises(kind):
            engine.submit(request_of("good", prompt_of(34)), bad)
        assert engine.idle, "some of the requests were taken, and the caller was told that none was"
        assert seen.tokens == []
        assert_quiet(worker)


def test_the_longest_request_that_fits_runs(loaded: LoadedModel) -> None:
    with make_worker(loaded, WorkerOptions(device_blocks=MAX_POSITIONS // BLOCK_SIZE)) as worker:
        result = answer(worker.engine, request_of("long", prompt_of(MAX_POSITIONS), 1))
        assert len(result.tokens) == 1
        assert_quiet(worker)
    with make_worker(loaded, WorkerOptions(device_blocks=9)) as worker:
        assert len(answer(worker.engine, request_of("long", prompt_of(140), 5)).tokens) == 5
        assert_quiet(worker)


def test_an_id_names_one_request_at_a_time(loaded: LoadedModel) -> None:
    """A store gives the same lease to the same request id: two requests would release each other's blocks."""
    with make_worker(loaded) as worker:
        engine = worker.engine
        engine.submit(request_of("a", prompt_of(34)))
        for other in (prompt_of(34), prompt_of(50, seed=1)):
            with pytest.raises(RequestError, match="request id 'a' is in use"):
                engine.submit(request_of("a", other))
        engine.step()
        with pytest.raises(RequestError, match="in use"):
            engine.prefill(request_of("a", prompt_of(34)))
        with pytest.raises(RequestError, match="request id 'b' is in use"):
            engine.run([request_of("b", prompt_of(34)), request_of("b", prompt_of(34))])
        assert [*work_off(engine)] == ["a"]
        engine.prefill(request_of("a", prompt_of(34)))
        with pytest.raises(RequestError, match="in use"):
            engine.submit(request_of("a", prompt_of(34)))
        engine.acknowledge("a")
        answer(engine, request_of("a", prompt_of(50, seed=1)))
        assert_quiet(worker)


# -- errors and ends in the middle -----------------------------------------------------------------


@contextmanager
def failing_steps(model: PreTrainedModel) -> Iterator[None]:
    """The model raises, as one does whose device runs out of memory."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[-1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def test_an_error_in_a_prefill_ends_that_request_alone(loaded: LoadedModel) -> None:
    prompts = [prompt_of(50, seed=seed) for seed in range(3)]
    with make_worker(loaded) as worker:
        expected = [answer(worker.engine, request_of("alone", each, 6, reuse=False)) for each in prompts]
        first, second, third = requests_of(prompts, 6)
        worker.engine.submit(first, second)
        worker.engine.step()
        worker.engine.submit(third)
        with failing_steps(loaded.model), pytest.raises(RuntimeError, match="out of memory"):
            worker.engine.step()
        results = work_off(worker.engine)
        assert {name: result.tokens for name, result in results.items()} == {
            "r0": expected[0].tokens,
            "r2": expected[2].tokens,
        }
        assert_quiet(worker)
        assert answer(worker.engine, second).tokens == expected[1].tokens


def test_an_error_in_a_decode_step_leaves_nothing_behind(loaded: LoadedModel) -> None:
    """What the blocks of the batch hold is unknown then, so none of it may be published."""
    prompts = [prompt_of(47, seed=seed) for seed in range(3)]
    with make_worker(loaded) as worker:
        engine, requests = worker.engine, requests_of(prompts, 6)
        engine.submit(*requests)
        for _ in requests:
            engine.step()
        stored = ready_blocks(device_of(worker))
        with failing_steps(loaded.model), pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        assert engine.idle
        assert ready_blocks(device_of(worker)) == stored
        assert_quiet(worker)
        results = engine.run(requests)
        assert all(len(result.tokens) == 6 for result in results)


def test_run_leaves_none_of_its_requests_behind(loaded: LoadedModel) -> None:
    with make_worker(loaded) as worker:
        requests = requests_of([prompt_of(100, seed=seed) for seed in range(4)])
        with failing_steps(loaded.model), pytest.raises(RuntimeError, match="out of memory"):
            worker.engine.run(requests)
        assert_quiet(worker)
        assert len(worker.engine.run(requests)) == len(requests)


def test_an_error_in_a_prefill_for_handoff(loaded: LoadedModel) -> None:
    with make_worker(loaded) as worker:
        with failing_steps(loaded.model), pytest.raises(RuntimeError, match="out of memory"):
            worker.engine.prefill(request_of("a", prompt_of(50)))
        assert_quiet(worker)


def test_requests_are_cancelled_in_any_state(loaded: LoadedModel) -> None:
    with make_worker(loaded, WorkerOptions(device_blocks=16)) as worker:
        engine, long = worker.engine, prompt_of(100)
        engine.submit(*requests_of([prompt_of(100, seed=1), long, long]))
        engine.step()
        engine.step()  # r1 finds too little room and keeps what there is; r2 is behind it
        assert worker.store.leases == 2
        engine.cancel("r1", "r2", "never heard of")
        assert worker.store.leases == 1
        engine.cancel("r0")
        engine.cancel("r0")
        assert_quiet(worker)
        engine.prefill(request_of("handed", prompt_of(50)))
        engine.cancel("handed")
        assert_quiet(worker)


def test_closing_gives_everything_back(loaded: LoadedModel) -> None:
    with make_worker(loaded, WorkerOptions(device_blocks=24)) as worker:
        worker.engine.prefill(request_of("handed", prompt_of(50)))
        worker.engine.submit(*requests_of([prompt_of(200), prompt_of(200), prompt_of(200)]))
        worker.engine.step()
        worker.engine.step()
        worker.engine.close()
        assert_quiet(worker)
