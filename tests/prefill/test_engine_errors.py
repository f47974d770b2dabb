"""Requests that cannot run, fail in the middle, or are called off: nothing of them stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvstore.errors import PoolError
from prefill.errors import PromptError, RequestError
from prefill.model import LoadedModel
from prefill.request import FinishReason, Request
from tests.support.models import MAX_POSITIONS, VOCAB_SIZE
from tests.support.workers import (
    BLOCK_SIZE,
    Tokens,
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    hand_over,
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
        calls = (lambda: engine.submit(bad), lambda: engine.run([bad]), lambda: engine.submit_prefill(bad))
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
            engine.submit_prefill(request_of("a", prompt_of(34)))
        with pytest.raises(RequestError, match="request id 'b' is in use"):
            engine.run([request_of("b", prompt_of(34)), request_of("b", prompt_of(34))])
        assert [*work_off(engine)] == ["a"]
        hand_over(engine, request_of("a", prompt_of(34)))
        with pytest.raises(RequestError, match="in use"):
            engine.submit(request_of("a", prompt_of(34)))
        engine.acknowledge("a")
        answer(engine, request_of("a", prompt_of(50, seed=1)))
        assert_quiet(worker)


# -- errors and ends in the middle -----------------------------------------------------------------


@contextmanager
def failing_steps(model: PreTrainedModel, poison: int | None = None) -> Iterator[None]:
    """The model raises, as one does whose device runs out of memory; with ``poison`` only for that token."""

    def fail(_module: object, _arguments: object, named: dict[str, torch.Tensor]) -> None:
        if poison is None or poison in named["input_ids"]:
            raise RuntimeError("out of memory")

    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def test_an_error_ends_the_request_that_causes_it_alone(loaded: LoadedModel) -> None:
    """A packed step fails as a whole; each of its requests is then tried alone."""
    prompts = [prompt_of(50, seed=seed) for seed in range(3)]
    poison = next(int(token) for token in prompts[1] if not any(token in prompts[at] for at in (0, 2)))
    with make_worker(loaded) as worker:
        alone = [answer(worker.engine, request_of("alone", each, 6, reuse=False)) for each in prompts]
        assert not any(poison in each.tokens for each in alone)
        first, second, third = requests_of(prompts, 6)
        worker.engine.submit(first, second)
        with failing_steps(loaded.model, poison):
            outputs = worker.engine.step()
            [failed] = [output for output in outputs if output.finished is FinishReason.ERROR]
            assert (failed.request_id, str(failed.error)) == ("r1", "out of memory")
            assert [output.token for output in outputs if output.request_id == "r0"] == alone[0].tokens[:1]
            worker.engine.submit(third)
            results = work_off(worker.engine)
        assert {name: each.tokens for name, each in results.items()} == {
            "r0": alone[0].tokens,
            "r2": alone[2].tokens,
        }
        assert_quiet(worker)
        assert answer(worker.engine, second).tokens == alone[1].tokens


def test_a_step_that_fails_publishes_nothing(loaded: LoadedModel) -> None:
    """What the blocks of the batch hold is unknown then."""
    prompts = [prompt_of(47, seed=seed) for seed in range(3)]
    with make_worker(loaded) as worker:
        engine, requests = worker.engine, requests_of(prompts, 6)
        engine.submit(*requests)
        engine.step()
        stored = ready_blocks(device_of(worker))
        with failing_steps(loaded.model):
            assert {output.finished for output in engine.step()} == {FinishReason.ERROR}
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
            hand_over(worker.engine, request_of("a", prompt_of(50)))
        assert_quiet(worker)


def test_requests_are_cancelled_in_any_state(loaded: LoadedModel) -> None:
    with make_worker(loaded, WorkerOptions(device_blocks=16)) as worker:
        engine, long = worker.engine, prompt_of(100)
        engine.submit(*requests_of([prompt_of(100, seed=1), prompt_of(200, seed=2), long]))
        engine.step()
        engine.step()  # r1 holds a lease, and there is no room for it yet; r2 is behind it
        assert (worker.store.leases, engine.running, engine.waiting) == (2, 1, 2)
        engine.cancel("r1", "r2", "never heard of")
        assert worker.store.leases == 1
        engine.cancel("r0")
        engine.cancel("r0")
        assert_quiet(worker)
        hand_over(engine, request_of("handed", prompt_of(50)))
        engine.cancel("handed")
        assert_quiet(worker)


def test_closing_gives_everything_back(loaded: LoadedModel) -> None:
    with make_worker(loaded, WorkerOptions(device_blocks=24)) as worker:
        hand_over(worker.engine, request_of("handed", prompt_of(50)))
        worker.engine.submit(*requests_of([prompt_of(200), prompt_of(200), prompt_of(200)]))
        worker.engine.step()
        worker.engine.step()
        worker.engine.close()
        assert_quiet(worker)
