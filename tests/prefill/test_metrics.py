"""Times and tokens of finished requests, as an engine's own results make them."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvstore.block import TierName
from prefill.metrics import ResultMetrics
from prefill.request import Request, Result
from tests.support.stores import FakeClock
from tests.support.workers import BLOCK_SIZE, load_tiny, make_worker, prompt_of, work_off


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
    record = ResultMetrics(registry, BLOCK_SIZE)
    with make_worker(load_tiny("llama", tmp_path_factory.mktemp("models")), clock=clock) as worker:
        for name, prompt in (
            ("cold", prompt_of(64)),
            ("full", prompt_of(64)),
            ("partial", [*prompt_of(64)[:40].tolist(), *prompt_of(40, seed=1).tolist()]),
            ("short", prompt_of(5)),
        ):
            worker.engine.submit(Request(name, np.array(prompt, dtype=np.uint32), 3, clock()))
            clock.advance(2.0)
            for result in work_off(worker.engine).values():
                record(result)
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
        "prefill_tokens_total{computed}": 64 + 16 + 48 + 5,
        "prefill_tokens_total{device}": 48 + 32,
        "prefill_output_tokens_total{}": 4 * 3,
    }


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
