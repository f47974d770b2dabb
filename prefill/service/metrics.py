"""Prometheus metrics of a worker's APIs, beside those of its engine and its store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class ServiceMetrics:
    """Counts requests by API and outcome, both from small closed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "prefill_requests",
            "Requests that ended, by API and by how: ok, cancelled by the client, or the code of an error.",
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
