"""Prometheus metrics of results and of steps. The only importer of prometheus_client here.

How much sooner the first token comes with a cached prefix, at the median:

    histogram_quantile(0.5, sum by (le, cached) (rate(prefill_ttft_seconds_bucket[5m])))

Output tokens a second, of all streams together over wall time:

    sum(rate(prefill_output_tokens_total[5m]))

Model FLOPs utilisation of the steps that compute prompts, where the peak was measured:

    rate(prefill_step_flops_total{kind="prompt"}[5m]) / rate(prefill_step_seconds_sum{kind="prompt"}[5m])
      / prefill_peak_flops
"""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prefill.output import StepReport
from prefill.plan import usable_blocks
from prefill.request import Result

COMPUTED = "computed"
SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Cached(StrEnum):
    """How much of a prompt came from the cache, of the blocks that a prefill may take from one."""

    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"


class ResultMetrics:
    """Counts the results that an engine hands out. Two engines in one process take two registries."""

    def __init__(self, registry: CollectorRegistry, block_size: int) -> None:
        self._block_size = block_size
        self._ttft = _histogram("ttft", "From a request's arrival to its first token.", registry)
        self._queue = _histogram("queue", "From a request's arrival to its prefill.", registry)
        self._execution = _histogram("execution", "From the prefill's start to the first token.", registry)
        self._tokens = Counter(
            "prefill_tokens", "Prompt tokens, by where their KV came from.", ["source"], registry=registry
        )
        self._inter_token = _histogram("inter_token", "From one token of an answer to the next.", registry)
        self._recomputed = Counter(
            "prefill_recomputed_tokens", "Tokens computed once more after a preemption.", registry=registry
        )

    def __call__(self, result: Result) -> None:
        cached = self._cached(result)
        self._ttft.labels(cached).observe(result.ttft_seconds)
        self._queue.labels(cached).observe(result.queue_seconds)
        self._execution.labels(cached).observe(result.execution_seconds)
        for source, tokens in (*result.cached.items(), (COMPUTED, result.computed_tokens)):
            self._tokens.labels(source).inc(tokens)
        for seconds in result.inter_token_seconds:
            self._inter_token.labels(cached).observe(seconds)
        self._recomputed.inc(result.recomputed_tokens)

    def _cached(self, result: Result) -> Cached:
        if not result.cached_tokens:
            return Cached.NONE
        most = usable_blocks(result.prompt_tokens, self._block_size) * self._block_size
        return Cached.FULL if result.cached_tokens >= most else Cached.PARTIAL


class StepKind(StrEnum):
    """Whether a step computes prompts, perhaps with decodes riding along, or decodes only."""

    PROMPT = "prompt"
    DECODE = "decode"


class StepMetrics:
    """Counts the steps of one engine. ``peak_flops`` is what ``flops.matmul_peak`` measured, if it did."""

    def __init__(self, registry: CollectorRegistry, peak_flops: float | None = None) -> None:
        self._seconds = Histogram(
            "prefill_step_seconds",
            "Seconds of one step of the model.",
            ["kind"],
            buckets=SECONDS,
            registry=registry,
        )
        self._flops = Counter(
            "prefill_step_flops", "Operations of a step's matrix products.", ["kind"], registry=registry
        )
        self._output = Counter(
            "prefill_output_tokens", "Tokens chosen, of all streams together.", registry=registry
        )
        self._preemptions = Counter(
            "prefill_preemptions", "Requests that lost their memory to older ones.", registry=registry
        )
        if peak_flops is not None:
            peak = Gauge("prefill_peak_flops", "Operations a second of a matrix product.", registry=registry)
            peak.set(peak_flops)

    def __call__(self, report: StepReport) -> None:
        kind = StepKind.PROMPT if report.prompt_tokens else StepKind.DECODE
        self._seconds.labels(kind).observe(report.seconds)
        self._flops.labels(kind).inc(report.flops)
        chosen = sum(each.token is not None or each.handoff is not None for each in report.outputs)
        self._output.inc(chosen)
        self._preemptions.inc(report.preempted)


def _histogram(what: str, documentation: str, registry: CollectorRegistry) -> Histogram:
    name = f"prefill_{what}_seconds"
    return Histogram(name, documentation, ["cached"], buckets=SECONDS, registry=registry)
