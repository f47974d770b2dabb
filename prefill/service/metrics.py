"""Prometheus metrics of a worker's APIs, beside those of its engine and its store.

What a decode worker's clients wait for their first token, and how much of it is neither the prefill
worker's queue nor its computing, at the mean:

    rate(prefill_front_ttft_seconds_sum{prefilled="elsewhere"}[5m])
      / rate(prefill_front_ttft_seconds_count{prefilled="elsewhere"}[5m])
    rate(prefill_front_part_seconds_sum{part="between"}[5m])
      / rate(prefill_front_part_seconds_count{part="between"}[5m])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from prefill.handoff import Handoff
from prefill.metrics import SECONDS


class Prefilled(StrEnum):
    """Where the prompt of an answer was computed."""

    HERE = "here"
    ELSEWHERE = "elsewhere"


class Fallback(StrEnum):
    """Why a prompt was computed here though others are to do it."""

    NO_WORKER = "no_worker"
    """None of prefill_at answered, or all had failed a moment ago."""
    REJECTED = "rejected"
    """What one handed over does not fit this worker."""


class FrontMetrics:
    """The first token as clients see it, whoever computed the prompt."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ttft = Histogram(
            "prefill_front_ttft_seconds",
            "From a request's acceptance here to its first token, wherever its prompt was computed.",
            ["prefilled"],
            buckets=SECONDS,
            registry=registry,
        )
        self._parts = Histogram(
            "prefill_front_part_seconds",
            "What that time was, of prompts computed elsewhere: queue and execution there, and between.",
            ["part"],
            buckets=SECONDS,
            registry=registry,
        )
        self._fallbacks = Counter(
            "prefill_fallbacks",
            "Prompts that were computed here because no worker of prefill_at did, by why.",
            ["cause"],
            registry=registry,
        )
        for cause in Fallback:
            self._fallbacks.labels(cause)

    def first_token(self, seconds: float, handoff: Handoff | None) -> None:
        """``seconds`` after the request came; ``handoff`` None where the prompt was computed here."""
        if handoff is None:
            self._ttft.labels(Prefilled.HERE).observe(seconds)
            return
        self._ttft.labels(Prefilled.ELSEWHERE).observe(seconds)
        # The other worker's clock may run at another rate, by a little.
        between = max(0.0, seconds - handoff.queue_seconds - handoff.execution_seconds)
        self._parts.labels("queue").observe(handoff.queue_seconds)
        self._parts.labels("execution").observe(handoff.execution_seconds)
        self._parts.labels("between").observe(between)

    def fallback(self, cause: Fallback) -> None:
        self._fallbacks.labels(cause).inc()


class ServiceMetrics:
    """Counts requests by API and outcome, both from small closed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "prefill_requests",
            "Requests that ended, by API and by how: ok, cancelled by the client, an error's code or type.",
            ["api", "outcome"],
            registry=registry,
        )

    def count(self, api: str, outcome: str) -> None:
        self._requests.labels(api, outcome).inc()


class ServiceGauges(Collector):
    """What is read when somebody scrapes."""

    def __init__(
        self, waiting: Callable[[], int], running: Callable[[], int], served: Callable[[], int]
    ) -> None:
        self._readings = {
            "prefill_waiting_requests": ("Requests that wait for device memory.", waiting),
            "prefill_running_requests": ("Requests that have device memory and are not finished.", running),
            "prefill_served_requests": ("Requests that an API is serving, from body to last byte.", served),
        }

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, (documentation, read) in self._readings.items():
            yield GaugeMetricFamily(name, documentation, value=read())
