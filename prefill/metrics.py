"""Prometheus metrics of finished requests, fed with results. The only importer of prometheus_client here.

How much sooner the first token comes with a cached prefix, at the median:

    histogram_quantile(0.5, sum by (le, cached) (rate(prefill_ttft_seconds_bucket[5m])))
"""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram

from prefill.plan import usable_blocks
from prefill.request import Result

COMPUTED = "computed"
_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


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
        self._output = Counter("prefill_output_tokens", "Tokens answered.", registry=registry)

    def __call__(self, result: Result) -> None:
        cached = self._cached(result)
        self._ttft.labels(cached).observe(result.ttft_seconds)
        self._queue.labels(cached).observe(result.queue_seconds)
        self._execution.labels(cached).observe(result.execution_seconds)
        for source, tokens in (*result.cached.items(), (COMPUTED, result.computed_tokens)):
            self._tokens.labels(source).inc(tokens)
        self._output.inc(len(result.tokens))

    def _cached(self, result: Result) -> Cached:
        if not result.cached_tokens:
            return Cached.NONE
        most = usable_blocks(result.prompt_tokens, self._block_size) * self._block_size
        return Cached.FULL if result.cached_tokens >= most else Cached.PARTIAL


def _histogram(what: str, documentation: str, registry: CollectorRegistry) -> Histogram:
    name = f"prefill_{what}_seconds"
    return Histogram(name, documentation, ["cached"], buckets=_SECONDS, registry=registry)
