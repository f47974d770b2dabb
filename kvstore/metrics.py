"""The metrics of ``kvstore.metric_table`` for Prometheus. The only importer of prometheus_client here.

Hit rate is a ratio of sums in one unit, tokens, counted once a request:

    sum(rate(kvstore_hit_tokens_total[5m])) / sum(rate(kvstore_asked_tokens_total[5m]))

and for one tier, over what was asked of that tier:

    rate(kvstore_hit_tokens_total{tier="redis"}[5m]) / rate(kvstore_tier_asked_tokens_total{tier="redis"}[5m])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvstore.block import HASH_BYTES, TierName
from kvstore.events import (
    BlocksDropped,
    BlocksRemoved,
    BlocksReused,
    BlocksStored,
    BytesMoved,
    Event,
    RequestSettled,
    Seconds,
    TokensProbed,
)
from kvstore.metric_table import CALLER, LIMITS_MAX, METRICS, MODELS_MAX, OTHER, POOL_STATES, RPCS_MAX, Kind
from kvstore.pool import PoolUsage
from kvstore.tiers.base import TierStatus

__all__ = [
    "BlockAges",
    "CollectorRegistry",
    "Metrics",
    "Readings",
    "ServiceMetrics",
    "StoreGauges",
    "render",
]

_NOTHING: Mapping[TierName, int] = MappingProxyType({})


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """All that is in the registry, and its content type: OpenMetrics where ``accept`` asks for that."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class Metrics:
    """A listener that counts. Two stores in one process take two registries."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_of: Callable[[bytes], str],
        unread_bytes: Mapping[TierName, int] = _NOTHING,
    ) -> None:
        """``model_of`` names the model of a namespace; at most ``MODELS_MAX`` names become labels.

        ``unread_bytes`` are those of blocks that a memory tier had, never read, before the first event.
        """
        self._model_of = model_of
        self._models = _Names(MODELS_MAX)
        self._asked = _counter("kvstore_asked_tokens_total", registry)
        self._hit = _counter("kvstore_hit_tokens_total", registry)
        self._miss = _counter("kvstore_miss_tokens_total", registry)
        self._tier_asked = _counter("kvstore_tier_asked_tokens_total", registry)
        self._probed = _counter("kvstore_probe_tokens_total", registry)
        self._stored = _counter("kvstore_stored_blocks_total", registry)
        self._evicted = _counter("kvstore_evicted_blocks_total", registry)
        self._dropped = _counter("kvstore_dropped_blocks_total", registry)
        self._moved = _counter("kvstore_transfer_bytes_total", registry)
        self._seconds = _histogram("kvstore_transfer_seconds", registry)
        self._lifetime = BlockAges("kvstore_block_lifetime_seconds", registry)
        self._idle = BlockAges("kvstore_block_idle_before_evict_seconds", registry)
        self._gap = BlockAges("kvstore_block_reuse_gap_seconds", registry)
        self._unread = _gauge("kvstore_unread_bytes", registry)
        for tier, size in unread_bytes.items():
            self._unread.labels(tier).set(size)

    def __call__(self, event: Event) -> None:
        match event:
            case RequestSettled():
                self._settle(event)
            case TokensProbed():
                self._probed.inc(event.tokens)
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case BlocksReused():
                self._gap.observe(event.tier, event.gaps)
                self._unread.labels(event.tier).dec(event.first_reads * event.payload_bytes)
            case BlocksDropped():
                self._dropped.labels(event.tier, event.cause).inc(event.blocks)
            case BytesMoved():
                path = (event.source or CALLER, event.target or CALLER)
                self._moved.labels(*path).inc(event.payload_bytes)
                self._seconds.labels(*path).observe(event.seconds)

    def _settle(self, event: RequestSettled) -> None:
        model = self._models.label(self._model_of(event.namespace))
        self._asked.labels(model).inc(event.asked_tokens)
        for tier, tokens in event.hit_tokens.items():
            self._hit.labels(model, tier).inc(tokens)
        for cause, tokens in event.miss_tokens.items():
            self._miss.labels(model, cause).inc(tokens)
        for tier, tokens in event.tier_asked.items():
            self._tier_asked.labels(tier).inc(tokens)

    def _store(self, event: BlocksStored) -> None:
        blocks = len(event.hashes) // HASH_BYTES
        self._stored.labels(event.tier).inc(blocks)
        if event.tier is not TierName.REDIS:  # which does not say what it forgets
            self._unread.labels(event.tier).inc(blocks * event.payload_bytes)

    def _remove(self, event: BlocksRemoved) -> None:
        self._evicted.labels(event.tier, event.cause).inc(len(event.hashes) // HASH_BYTES)
        self._lifetime.observe(event.tier, event.lifetimes)
        self._idle.observe(event.tier, event.idle)
        if event.tier is not TierName.REDIS:
            self._unread.labels(event.tier).dec(event.unread_blocks * event.payload_bytes)


class ServiceMetrics:
    """Counts the calls of one gRPC server."""

    def __init__(self, registry: CollectorRegistry, *, version: str, clients: Callable[[], int]) -> None:
        """``clients`` is asked when somebody scrapes."""
        self._rpcs = _Names(RPCS_MAX)
        self._limits = _Names(LIMITS_MAX)
        self._seconds = _histogram("kvstore_rpc_seconds", registry)
        self._refused = _counter("kvstore_refused_requests_total", registry)
        _gauge("kvstore_clients", registry).set_function(clients)
        _gauge("kvstore_build_info", registry).labels(version).set(1)

    def rpc(self, rpc: str, outcome: str, seconds: float) -> None:
        """A call ended; ``outcome`` is the name of its status in lower case."""
        self._seconds.labels(self._rpcs.label(rpc), outcome).observe(seconds)

    def refused(self, limit: str) -> None:
        """A request ran into a limit."""
        self._refused.labels(self._limits.label(limit)).inc()


@dataclass(frozen=True, slots=True)
class Readings:
    """What a store says of itself when somebody scrapes; asked on the thread that renders."""

    usage: Callable[[], Mapping[TierName, PoolUsage]]
    leases: Callable[[], int]
    tiers: Callable[[], Mapping[TierName, TierStatus]]
    redis_errors: Callable[[], Mapping[str, int]]
    """Since the start, by kind."""
    redis_breakers: Callable[[], Mapping[str, bool]]
    """Whether a node is given up, by host:port."""
    redis_queue_bytes: Callable[[], int]
    listener_failures: Callable[[], int]
    background_failures: Callable[[], Mapping[str, int]]
    """How often each background task of the owner died."""


class StoreGauges(Collector):
    """Metrics that are read from the store when they are scraped."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        readings = self._readings
        usage = readings.usage()
        yield _family(
            "kvstore_pool_bytes",
            {(tier, state): getattr(used, state) for tier, used in usage.items() for state in POOL_STATES},
        )
        yield _family("kvstore_leased_bytes", {(tier,): used.leased for tier, used in usage.items()})
        yield _family("kvstore_leases", {(): readings.leases()})
        yield _family(
            "kvstore_tier_healthy", {(tier,): status.healthy for tier, status in readings.tiers().items()}
        )
        yield _family(
            "kvstore_redis_errors_total", {(kind,): count for kind, count in readings.redis_errors().items()}
        )
        yield _family(
            "kvstore_redis_breaker_open",
            {(node,): is_open for node, is_open in readings.redis_breakers().items()},
        )
        yield _family("kvstore_redis_queue_bytes", {(): readings.redis_queue_bytes()})
        yield _family("kvstore_listener_failures_total", {(): readings.listener_failures()})
        yield _family(
            "kvstore_background_failures_total",
            {(task,): count for task, count in readings.background_failures().items()},
        )


class BlockAges(Collector):
    """A histogram that takes the seconds of many blocks at once: a prompt may hit thousands."""

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        self._metric = METRICS[name]
        self._counts: dict[TierName, NDArray[np.int64]] = {}
        self._sums: dict[TierName, float] = {}
        registry.register(self)

    def observe(self, tier: TierName, seconds: Seconds) -> None:
        if len(seconds):
            buckets = np.searchsorted(self._metric.buckets, seconds)
            counts = np.bincount(buckets, minlength=len(self._metric.buckets) + 1)
            self._counts[tier] = self._counts.get(tier, 0) + counts
            self._sums[tier] = self._sums.get(tier, 0.0) + float(seconds.sum())

    def collect(self) -> Iterable[HistogramMetricFamily]:
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=[*metric.labels])
        bounds = [*map(floatToGoString, (*metric.buckets, math.inf))]
        for tier, counts in self._counts.items():
            family.add_metric(
                [tier], list(zip(bounds, counts.cumsum().tolist(), strict=True)), self._sums[tier]
            )
        yield family


class _Names:
    """Bounds the values of a label: the first ``most`` names stand for themselves."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._known and len(self._known) < self._most:
            self._known.add(name)
        return name if name in self._known else OTHER


def _counter(name: str, registry: CollectorRegistry) -> Counter:
    metric = METRICS[name]
    return Counter(name.removesuffix("_total"), metric.help, [*metric.labels], registry=registry)


def _gauge(name: str, registry: CollectorRegistry) -> Gauge:
    metric = METRICS[name]
    return Gauge(name, metric.help, [*metric.labels], registry=registry)


def _histogram(name: str, registry: CollectorRegistry) -> Histogram:
    metric = METRICS[name]
    return Histogram(name, metric.help, [*metric.labels], buckets=metric.buckets, registry=registry)


def _family(name: str, samples: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily | CounterMetricFamily:
    """Values by label values, read just now."""
    metric = METRICS[name]
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(name, metric.help, labels=[*metric.labels])
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
