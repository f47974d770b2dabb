"""What the connector counts, in the engine's log and at its metrics endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.connectors.vllm.tally import COUNTERS, WAITS, merge

_WAIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


@dataclass
class KVStoreStats(KVConnectorStats):
    """Sums by name, as ``Tally`` takes them; they travel from workers to whoever logs."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        found = {name: round(value, 6) for name, value in self.data.items() if name != WAITS}
        return found | {f"longest_{WAITS}": round(max(self.data.get(WAITS, [0.0])), 6)}

    def is_empty(self) -> bool:
        return not self.data


class KVStoreMetrics(KVConnectorPromMetrics):
    """``vllm:kvstore_<name>_total``, and the scheduler's waits; one series an engine."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's, as are the next
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            family = counter(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()
            }
        family = metric_types[Histogram](
            name=f"vllm:kvstore_{WAITS}",
            documentation="What a step of the scheduler waited for answers of the sidecar, if it waited.",
            buckets=_WAIT_BUCKETS,
            labelnames=labelnames,
        )
        self._waits = {engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
        for seconds in transfer_stats_data.get(WAITS, ()):
            self._waits[engine_idx].observe(seconds)
