"""Times, tokens and operations, as an engine's own results and steps make them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from kvstore.block import TierName
from prefill.engine import Engine, EngineOptions
from prefill.flops import FlopsModel, matmul_peak
from prefill.metrics import ResultMetrics, StepMetrics
from prefill.request import Request, Result
from tests.support.stores import FakeClock
from tests.support.workers import (
    BLOCK_SIZE,
    WorkerOptions,
    answer,
    hand_over,
    load_tiny,
    make_worker,
    prompt_of,
    request_of,
    work_off,
)


def samples_of(registry: CollectorRegistry) -> dict[str, float]:
    """What is not zero, by name and labels in PromQL's form; without buckets."""
    return {
        f"{sample.name}{{{','.join(sample.labels.values())}}}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.value and not sample.name.endswith(("_created", "_bucket"))
    }


def test_an_engines_results_give_exact_values(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cold, half cached, fully cached and too short for a block: of each what it computed and waited."""
    registry, clock = CollectorRegistry(), FakeClock()
    scheduling = EngineOptions(result_listeners=(ResultMetrics(registry, BLOCK_SIZE),))
    loaded = load_tiny("llama", tmp_path_factory.mktemp("models"))
    with make_worker(loaded, WorkerOptions(engine=scheduling), clock) as worker:
        for name, prompt in (
            ("cold", prompt_of(64)),
            ("full", prompt_of(64)),
            ("partial", [*prompt_of(64)[:40].tolist(), *prompt_of(40, seed=1).tolist()]),
            ("short", prompt_of(5)),
        ):
            worker.engine.submit(Request(name, np.array(prompt, dtype=np.uint32), 3, clock()))
            clock.advance(2.0)
            work_off(worker.engine)
    assert samples_of(registry) == {
        "prefill_ttft_seconds_count{none}": 2,
        "prefill_ttft_seconds_sum{none}": 4.0,
        "prefill_ttft_seconds_count{partial}": 1,
        "prefill_ttft_seconds_sum{partial}": 2.0,
        "prefill_ttft_seconds_count{full}": 1,
        "prefill_ttft_seconds_sum{full}": 2.0,
        "prefill_queue_seconds_count{none}": 2,
        "prefill_queue_seconds_sum{none}": 4.0,
        "prefill_queue_seconds_count{partial}": 1,
        "prefill_queue_seconds_sum{partial}": 2.0,
        "prefill_queue_seconds_count{full}": 1,
        "prefill_queue_seconds_sum{full}": 2.0,
        "prefill_execution_seconds_count{none}": 2,
        "prefill_execution_seconds_count{partial}": 1,
        "prefill_execution_seconds_count{full}": 1,
        "prefill_inter_token_seconds_count{none}": 2 * 2,
        "prefill_inter_token_seconds_count{partial}": 2,
        "prefill_inter_token_seconds_count{full}": 2,
        "prefill_tokens_total{computed}": 64 + 16 + 48 + 5,
        "prefill_tokens_total{device}": 48 + 32,
    }


def test_an_answer_that_goes_on_counts_its_prompt_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Blocks behind the prompt, that another worker filled with the answer's begin, are no prompt's hits."""
    registry = CollectorRegistry()
    scheduling = EngineOptions(result_listeners=(ResultMetrics(registry, BLOCK_SIZE),))
    loaded = load_tiny("llama", tmp_path_factory.mktemp("models"))
    request = request_of("r", prompt_of(34), 40)
    with make_worker(loaded, WorkerOptions(engine=scheduling)) as worker:
        handoff = hand_over(worker.engine, request)
        worker.engine.acknowledge("r")
        tokens = answer(worker.engine, request).tokens
        worker.engine.resume(replace(handoff, output=tokens[:30]))
        result = work_off(worker.engine)["r"]
    assert result.tokens == tokens
    assert (result.cached, result.computed_tokens) == ({TierName.DEVICE: 32}, 0)
    found = samples_of(registry)
    assert found["prefill_tokens_total{computed}"] == 34 + 2
    assert found["prefill_tokens_total{device}"] == 32 + 32


def test_a_tail_that_is_put_back_is_not_computed_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A resumed request has lost its memory: its answer is recomputed, and of its prompt nothing is."""
    clock, loaded = FakeClock(), load_tiny("llama", tmp_path_factory.mktemp("models"))
    with make_worker(loaded, WorkerOptions(lease_seconds=30.0), clock) as worker:
        handoff = hand_over(worker.engine, request_of("r", prompt_of(34), 8))
        worker.engine.acknowledge("r")
        worker.engine.resume(handoff)
        for _ in range(3):
            worker.engine.step()
        clock.advance(31.0)
        worker.store.tick()
        assert worker.store.leases == 0
        assert work_off(worker.engine)["r"].recomputed_tokens == 3


def test_steps_give_exact_values(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A prompt in two chunks and its decodes; a preemption; a first token that is handed over."""
    registry = CollectorRegistry()
    scheduling = EngineOptions(step_tokens=40, step_listeners=(StepMetrics(registry, 5e9),))
    loaded = load_tiny("llama", tmp_path_factory.mktemp("models"))
    options = WorkerOptions(device_blocks=9, engine=scheduling)
    with make_worker(loaded, options) as worker:
        work_off_alone(worker.engine, request_of("r", prompt_of(64), 3))
        model = FlopsModel.of(loaded.model, loaded.spec)
        found = samples_of(registry)
        assert found["prefill_step_flops_total{prompt}"] == model.step([(0, 40), (40, 24)])
        assert found["prefill_step_flops_total{decode}"] == model.step([(64, 1), (65, 1)])
        assert found["prefill_step_seconds_count{prompt}"] == found["prefill_step_seconds_count{decode}"] == 2
        assert found["prefill_output_tokens_total{}"] == 3
        assert found["prefill_peak_flops{}"] == 5e9
        assert "prefill_preemptions_total{}" not in found
        for name, length in (("a", 40), ("b", 40), ("c", 100)):
            worker.engine.submit(request_of(name, prompt_of(length, seed=ord(name)), 44))
        worker.engine.step()
        assert (worker.engine.running, worker.engine.waiting) == (2, 1)
        work_off(worker.engine)
        assert samples_of(registry)["prefill_preemptions_total{}"] > 0
        hand_over(worker.engine, request_of("handed", prompt_of(20), 2))
        assert samples_of(registry)["prefill_output_tokens_total{}"] == 3 + 3 * 44 + 1


def work_off_alone(engine: Engine, request: Request) -> None:
    engine.submit(request)
    work_off(engine)


def test_operations_of_a_model_are_counted_by_hand(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Llama with 4 layers of 96: four attention matrices, three of the MLP, and an output layer."""
    loaded = load_tiny("llama", tmp_path_factory.mktemp("models"))
    model = FlopsModel.of(loaded.model, loaded.spec)
    attention = 96 * 96 + 2 * 96 * 32 + 96 * 96
    assert model.weights == 4 * (attention + 3 * 96 * 160)
    assert model.head_weights == 503 * 96
    # Three tokens behind five: 6 + 7 + 8 pairs of query and key, in 4 layers of 6 heads of 16.
    expected = 2 * (3 * model.weights + model.head_weights) + 21 * 4 * 4 * 6 * 16
    assert model.step([(5, 3)]) == expected


def test_the_peak_of_a_matrix_product_is_the_best_round() -> None:
    ticks = iter([0.0, 4.0, 4.0, 6.0, *(10.0 * at for at in range(1, 13))])
    assert matmul_peak("cpu", torch.float32, lambda: next(ticks)) == 2 * 1024**3 / 2.0


@pytest.mark.parametrize(
    ("prompt", "cached", "label"),
    [
        (48, {}, "none"),
        (5, {}, "none"),
        (48, {TierName.HOST: 16}, "partial"),
        (48, {TierName.HOST: 16, TierName.REDIS: 16}, "full"),
        (49, {TierName.DEVICE: 32}, "partial"),
        (49, {TierName.DEVICE: 48}, "full"),
        (48, {TierName.REDIS: 48}, "full"),  # a handoff has the last block too
    ],
)
def test_how_much_was_cached(prompt: int, cached: dict[TierName, int], label: str) -> None:
    registry = CollectorRegistry()
    result = Result("r", [1, 2], prompt, cached, prompt - sum(cached.values()), 0.25, 0.5)
    ResultMetrics(registry, BLOCK_SIZE)(result)
    times = {
        name: registry.get_sample_value(f"prefill_{name}_seconds_sum", {"cached": label}) for name in TIMES
    }
    assert times == {"ttft": 0.75, "queue": 0.25, "execution": 0.5}
    for tier, tokens in cached.items():
        assert registry.get_sample_value("prefill_tokens_total", {"source": tier}) == tokens


TIMES = ("ttft", "queue", "execution")
