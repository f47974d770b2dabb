"""Chunks, policies, shared work and preemption, as an engine and a real model show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvstore.block import TierName
from kvstore.events import BytesMoved, Event
from prefill.engine import Engine, EngineOptions
from prefill.errors import BusyError
from prefill.model import LoadedModel
from prefill.output import StepOutput, StepReport
from prefill.request import FinishReason, Request, Result, Sampling
from prefill.scheduler import Policy
from tests.support.stores import FakeClock
from tests.support.workers import (
    BLOCK_SIZE,
    Tokens,
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    empty,
    hand_over,
    load_tiny,
    make_worker,
    prompt_of,
    request_of,
    results_of,
    watch,
    work_off,
)

NEW_TOKENS = 6
SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("models"))


def said_alone(loaded: LoadedModel, tokens: Tokens, new: int = NEW_TOKENS) -> list[int]:
    with make_worker(loaded, WorkerOptions(engine=EngineOptions(chunked=False))) as worker:
        return answer(worker.engine, request_of("alone", tokens, new, reuse=False)).tokens


def options_of(step_tokens: int = 40, policy: Policy = Policy.CACHE_AWARE) -> WorkerOptions:
    return WorkerOptions(engine=EngineOptions(step_tokens=step_tokens, policy=policy))


# -- chunks ----------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_decodes_ride_along(loaded: LoadedModel) -> None:
    long, short = prompt_of(100), prompt_of(9, seed=1)
    with make_worker(loaded, options_of(step_tokens=40)) as worker, watch(loaded.model) as seen:
        engine = worker.engine
        engine.submit(request_of("short", short, 9))
        engine.step()
        engine.submit(request_of("long", long))
        outputs = [[output.request_id for output in engine.step()] for _ in range(3)]
        assert outputs == [["short"], ["short"], ["short", "long"]]
        assert seen.tokens == [9, 1 + 39, 1 + 39, 1 + 22]
        results = work_off(engine)
        assert_quiet(worker)
    assert results["long"].tokens == said_alone(loaded, long)
    assert results["long"].computed_tokens == 100
    assert results["short"].tokens == said_alone(loaded, short, 9)


def test_without_chunks_the_whole_suffix_is_one_step(loaded: LoadedModel) -> None:
    scheduling = EngineOptions(step_tokens=40, chunked=False)
    with make_worker(loaded, WorkerOptions(engine=scheduling)) as worker, watch(loaded.model) as seen:
        worker.engine.run([request_of(f"r{at}", prompt_of(50, seed=at), 1) for at in range(2)])
        assert seen.tokens == [50, 50]


def test_fair_steps_let_a_short_prompt_through(loaded: LoadedModel) -> None:
    """It is done after two steps, beside a long one that takes seven."""
    with make_worker(loaded, options_of(step_tokens=32, policy=Policy.FAIR)) as worker:
        engine = worker.engine
        engine.submit(request_of("long", prompt_of(200), 1), request_of("short", prompt_of(20, seed=1), 1))
        done = [list(results_of(engine.step())) for _ in range(7)]
        assert done == [[], ["short"], [], [], [], [], ["long"]]


def test_packed_prompts_share_a_step(loaded: LoadedModel) -> None:
    with make_worker(loaded) as worker, watch(loaded.model) as seen:
        worker.engine.run([request_of(f"r{at}", prompt_of(30, seed=at), 1) for at in range(8)])
        assert seen.tokens == [240]


# -- shared work -----------------------------------------------------------------------------------


@pytest.fixture(params=[Policy.CACHE_AWARE, Policy.FAIR])
def shared_work(request: pytest.FixtureRequest, loaded: LoadedModel) -> Iterator[Engine]:
    """An engine with two requests of one prefix: the first is being computed, the second waits for it."""
    head = prompt_of(96)
    with make_worker(loaded, options_of(policy=request.param)) as worker:
        for name, seed in (("first", 1), ("second", 2)):
            tokens = np.concatenate([head, prompt_of(20, seed=seed)])
            worker.engine.submit(request_of(name, tokens))
        assert worker.engine.step() == []
        assert (worker.engine.running, worker.engine.waiting) == (1, 1)
        yield worker.engine
        assert_quiet(worker)


def second_alone(loaded: LoadedModel) -> list[int]:
    return said_alone(loaded, np.concatenate([prompt_of(96), prompt_of(20, seed=2)]))


def test_a_prefix_that_two_wait_for_is_computed_once(shared_work: Engine, loaded: LoadedModel) -> None:
    results = work_off(shared_work)
    assert results["first"].computed_tokens == 116
    assert results["second"].cached == {TierName.DEVICE: 96}
    assert results["second"].tokens == second_alone(loaded)


def test_who_waits_for_a_prefix_goes_on_when_its_writer_is_gone(
    shared_work: Engine, loaded: LoadedModel
) -> None:
    """It takes what was published until then, and computes the rest."""
    shared_work.cancel("first")
    second = work_off(shared_work)["second"]
    assert (second.cached, second.computed_tokens) == ({TierName.DEVICE: 32}, 116 - 32)
    assert second.tokens == second_alone(loaded)


def test_who_stores_nothing_is_not_waited_for(loaded: LoadedModel) -> None:
    with make_worker(loaded, options_of()) as worker:
        requests = [request_of(f"r{at}", prompt_of(96), reuse=bool(at)) for at in range(3)]
        worker.engine.submit(*requests[:2])
        worker.engine.step()
        worker.engine.step()
        assert worker.engine.running == 1, "the budget went to the first"
        worker.engine.step()
        assert worker.engine.running == 2
        work_off(worker.engine)
        assert_quiet(worker)


# -- who gets in first -----------------------------------------------------------------------------


def test_a_cached_prompt_overtakes_and_a_cold_one_gets_in_after_all(loaded: LoadedModel) -> None:
    """Hits keep coming; the cold prompt is passed by them for ``aging_seconds``, and not longer."""
    clock, hot = FakeClock(), prompt_of(96)
    scheduling = EngineOptions(step_tokens=32, policy=Policy.CACHE_AWARE, running_max=1, aging_seconds=5.0)
    with make_worker(loaded, WorkerOptions(engine=scheduling), clock) as worker:
        engine = worker.engine
        engine.run([request_of("fill", np.concatenate([hot, prompt_of(1)]), 1)])
        engine.submit(request_of("hit 0", np.concatenate([hot, prompt_of(5, seed=1)]), 1))
        engine.submit(request_of("cold", prompt_of(20, seed=99), 1))
        finished: list[str] = []
        for number in range(1, 9):
            engine.submit(
                request_of(f"hit {number}", np.concatenate([hot, prompt_of(5, seed=number + 1)]), 1)
            )
            finished += results_of(engine.step())
            clock.advance(1.0)
        assert finished == [*(f"hit {number}" for number in range(5)), "cold", "hit 5", "hit 6"]
        work_off(engine)
        assert_quiet(worker)


def test_a_full_queue_says_when_to_come_back(loaded: LoadedModel) -> None:
    with make_worker(loaded, WorkerOptions(engine=EngineOptions(waiting_max=2))) as worker:
        engine = worker.engine
        engine.submit(*(request_of(f"r{at}", prompt_of(20, seed=at), 2) for at in range(2)))
        for submit in (engine.submit, engine.submit_prefill):
            with pytest.raises(
                BusyError, match="2 requests wait and 1 more came, expected at most 2"
            ) as caught:
                submit(request_of("late", prompt_of(20), 2))
            assert caught.value.retry_after_seconds >= 1.0
        engine.step()
        engine.submit(request_of("late", prompt_of(20), 2))
        assert len(work_off(engine)) == 3
        assert_quiet(worker)


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", Policy)
def test_answers_outgrow_the_memory(loaded: LoadedModel, policy: Policy) -> None:
    """Three prompts fit and their answers do not: the newest goes, comes back, and says nothing twice."""
    reports: list[StepReport] = []
    scheduling = EngineOptions(policy=policy, step_tokens=64, step_listeners=(reports.append,))
    prompts = [prompt_of(30, seed=at) for at in range(3)]
    with make_worker(loaded, WorkerOptions(device_blocks=9, engine=scheduling)) as worker:
        engine = worker.engine
        engine.submit(*(request_of(f"r{at}", each, 80) for at, each in enumerate(prompts)))
        results = work_off(engine)
        assert_quiet(worker)
    assert sum(report.preempted for report in reports) > 0
    assert results["r0"].recomputed_tokens == 0, "the oldest keeps what it has"
    for at, each in enumerate(prompts):
        assert results[f"r{at}"].tokens == said_alone(loaded, each, 80)
        assert results[f"r{at}"].recomputed_tokens < 3 * BLOCK_SIZE, "whole blocks were found again"
        assert len(results[f"r{at}"].inter_token_seconds) == 79


def test_a_lease_that_lapses_while_others_get_in(loaded: LoadedModel) -> None:
    """Copying a hit up takes longer than a lease: what it held is not read any more, and begins again."""
    clock, hit = FakeClock(), prompt_of(48, seed=1)

    def slow_copies(event: Event) -> None:
        if isinstance(event, BytesMoved) and event.target is TierName.DEVICE:
            clock.advance(31.0)

    options = WorkerOptions(lease_seconds=30.0, listeners=(slow_copies,))
    with make_worker(loaded, options, clock) as worker:
        engine = worker.engine
        answer(engine, request_of("fill", hit, 1))
        worker.store.drain(10.0)
        empty(device_of(worker))
        engine.submit(request_of("runs", prompt_of(40), 30))
        engine.step()
        engine.submit(request_of("hit", hit), request_of("cold", prompt_of(9, seed=2)))
        assert [output.request_id for output in engine.step()] == ["cold"]
        results = work_off(engine)
        assert_quiet(worker)
    assert results["runs"].tokens == said_alone(loaded, prompt_of(40), 30)
    assert results["hit"].tokens == said_alone(loaded, hit)
    assert results["cold"].tokens == said_alone(loaded, prompt_of(9, seed=2))


def test_a_seed_decides_an_answer_in_any_schedule(loaded: LoadedModel) -> None:
    """Alone, in a crowd, preempted, and handed over: the same random answer."""
    request = replace(request_of("sampled", prompt_of(30), 60), sampling=SAMPLED)
    with make_worker(loaded, WorkerOptions(engine=EngineOptions(chunked=False))) as worker:
        alone = answer(worker.engine, request).tokens
        assert alone != said_alone(loaded, prompt_of(30), 60)
        assert answer(worker.engine, replace(request, sampling=replace(SAMPLED, seed=8))).tokens != alone
        handoff = hand_over(worker.engine, request)
        assert handoff.output == alone[:1]
    reports: list[StepReport] = []
    scheduling = EngineOptions(step_tokens=16, step_listeners=(reports.append,))
    with make_worker(loaded, WorkerOptions(device_blocks=9, engine=scheduling)) as worker:
        worker.engine.submit(request_of("older", prompt_of(60, seed=1), 60))
        worker.engine.step()
        worker.engine.resume(handoff)
        results, admissions = dict[str, Result](), 0
        while not worker.engine.idle:
            outputs = worker.engine.step()
            results.update(results_of(outputs))
            admissions += sum(output.admitted for output in outputs)
        assert sum(report.preempted for report in reports) > 0
        assert (results["sampled"].tokens, admissions) == (alone, 1)
        assert_quiet(worker)


def test_without_a_seed_answers_differ(loaded: LoadedModel) -> None:
    free = Sampling(temperature=1.0)
    with make_worker(loaded) as worker:
        requests = [replace(request_of(f"r{at}", prompt_of(30), 20), sampling=free) for at in range(2)]
        first, second = worker.engine.run(requests)
        assert first.tokens != second.tokens
        handoff = hand_over(worker.engine, requests[0])
        assert handoff.sampling.seed is not None


# -- ends ------------------------------------------------------------------------------------------


def test_what_ends_an_answer(loaded: LoadedModel) -> None:
    prompt = prompt_of(34)
    tokens = said_alone(loaded, prompt, 12)
    third = tokens.index(tokens[2]) + 1
    stopping = request_of("stop", prompt, 12)
    ends = replace(loaded, spec=replace(loaded.spec, eos_ids=(tokens[2],)))
    for model, request, count, finished in (
        (loaded, stopping, 12, FinishReason.LENGTH),
        (loaded, replace(stopping, stop_ids=(tokens[2],)), third, FinishReason.STOP),
        (loaded, replace(stopping, stop_ids=(tokens[2],), max_new_tokens=third), third, FinishReason.STOP),
        (ends, stopping, third, FinishReason.STOP),
        (ends, replace(stopping, ignore_eos=True), 12, FinishReason.LENGTH),
    ):
        with make_worker(model) as worker:
            result = answer(worker.engine, request)
            assert (result.tokens, result.finished) == (tokens[:count], finished)
            handoff = hand_over(worker.engine, request)
            worker.engine.acknowledge("stop")
            worker.engine.resume(handoff)
            assert work_off(worker.engine)["stop"].tokens == tokens[:count]
            assert_quiet(worker)


def test_a_reader_that_has_enough_completes_its_request(loaded: LoadedModel) -> None:
    results: list[Result] = []
    options = WorkerOptions(engine=EngineOptions(result_listeners=(results.append,)))
    with make_worker(loaded, options) as worker:
        engine, request = worker.engine, request_of("r", prompt_of(34), 20)
        engine.submit(request)
        assert engine.complete("r") is None, "it has no token yet"
        said = [engine.step()[0].token for _ in range(3)]
        result = engine.complete("r")
        assert result is not None
        assert (result.tokens, result.finished) == (said, FinishReason.STOP)
        assert results == [result]
        assert engine.complete("r") is None
        handoff = hand_over(engine, request)
        engine.acknowledge("r")
        engine.resume(handoff)
        assert engine.complete("r") is None, "it has a token, and no memory yet"
        engine.step()
        resumed = engine.complete("r")
        assert resumed is not None
        assert resumed.tokens == result.tokens[:2]
        assert_quiet(worker)


def test_a_steps_outputs_are_what_a_result_sums_up(loaded: LoadedModel) -> None:
    """The last token and the end are one output; TTFT = queue + execution, and gaps add up to the rest."""
    clock = FakeClock()
    with make_worker(loaded, options_of(step_tokens=40), clock) as worker:
        worker.engine.submit(Request("r", prompt_of(100), 4, clock()))
        outputs: list[StepOutput] = []
        while not worker.engine.idle:
            clock.advance(1.0)
            outputs += worker.engine.step()
        result = outputs[-1].result
        assert result is not None
        assert [output.token for output in outputs] == result.tokens
        assert [output.finished for output in outputs] == [None, None, None, FinishReason.LENGTH]
        assert (result.queue_seconds, result.execution_seconds) == (1.0, 2.0)
        assert result.inter_token_seconds == [1.0, 1.0, 1.0]
