"""The metrics of ``kvstore.metric_table`` for Prometheus. The only importer of prometheus_client here.

Hit rate is a ratio of sums in one unit, tokens, counted once a request:

    sum(rate(kvstore_hit_tokens_total[5m])) / sum(rate(kvstore_asked_tokens_total[5m]))

and for one tier, over what was asked of that tier:

    rate(kvstore_hit_tokens_total{tier="redis"}[5m]) / rate(kvstore_tier_asked_tokens_total{tier="redis"}[5m])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvstore.block import HASH_BYTES, MissCause, TierName
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
from kvstore.whatif import Estimate

__all__ = [
    "BlockAges",
    "CollectorRegistry",
    "Metrics",
    "Readings",
    "ServiceMetrics",
    "StoreGauges",
    "Totals",
    "render",
]

_WAITING_MAX = 4096
_OPENMETRICS = "application/openmetrics-text"
_NOTHING: Mapping[TierName, int] = MappingProxyType({})
_IN_MEMORY = (TierName.DEVICE, TierName.HOST)


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """All that is in the registry, and its content type: OpenMetrics where ``accept`` asks for that."""
    # Of its parameters nothing is used: the library compares versions, also of who sends words for them.
    encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept.lower() else "")
    return encode(registry), content_type


class Totals(NamedTuple):
    """Tokens since the start, over all models."""

    asked: int
    hits: Mapping[TierName, int]
    misses: Mapping[MissCause, int]


class Metrics:
    """A listener that counts. Two stores in one process take two registries.

    Used on the owner's thread, and collected there: counting is a dictionary entry, without a lock.
    """

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
        self._label_of: dict[bytes, str] = {}
        self._asked = _Values("kvstore_asked_tokens_total", registry)
        self._hit = _Values("kvstore_hit_tokens_total", registry)
        self._miss = _Values("kvstore_miss_tokens_total", registry)
        self._tier_asked = _Values("kvstore_tier_asked_tokens_total", registry)
        self._probed = _Values("kvstore_probe_tokens_total", registry)
        self._stored = _Values("kvstore_stored_blocks_total", registry)
        self._evicted = _Values("kvstore_evicted_blocks_total", registry)
        self._dropped = _Values("kvstore_dropped_blocks_total", registry)
        self._moved = _Values("kvstore_transfer_bytes_total", registry)
        self._seconds = _histogram("kvstore_transfer_seconds", registry)
        self._lifetime = BlockAges("kvstore_block_lifetime_seconds", registry)
        self._idle = BlockAges("kvstore_block_idle_before_evict_seconds", registry)
        self._gap = BlockAges("kvstore_block_reuse_gap_seconds", registry)
        self._unread = _Values("kvstore_unread_bytes", registry)
        for tier, size in unread_bytes.items():
            self._unread.add((tier,), size)

    def __call__(self, event: Event) -> None:
        match event:
            case RequestSettled():
                self._settle(event)
            case BlocksReused():
                self._gap.observe(event.tier, event.gaps)
                if event.first_reads:
                    self._unread.add((event.tier,), -event.first_reads * event.payload_bytes)
            case TokensProbed():
                self._probed.add((), event.tokens)
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case BlocksDropped():
                self._dropped.add((event.tier, event.cause), event.blocks)
            case BytesMoved():
                path = (event.source or CALLER, event.target or CALLER)
                self._moved.add(path, event.payload_bytes)
                self._seconds.labels(*path).observe(event.seconds)

    def totals(self) -> Totals:
        """The counters of tokens, added up over models."""
        hits: dict[TierName, int] = {}
        misses: dict[MissCause, int] = {}
        for (_, tier), tokens in self._hit.values.items():
            hits[TierName(tier)] = hits.get(TierName(tier), 0) + tokens
        for (_, cause), tokens in self._miss.values.items():
            misses[MissCause(cause)] = misses.get(MissCause(cause), 0) + tokens
        return Totals(sum(self._asked.values.values()), hits, misses)

    def unread_bytes(self, tier: TierName) -> int:
        """Bytes in a memory tier that were stored and never read."""
        return self._unread.values.get((tier,), 0)

    def _settle(self, event: RequestSettled) -> None:
        model = self._label_of.get(event.namespace)
        if model is None:
            model = self._label_of[event.namespace] = self._models.label(self._model_of(event.namespace))
        self._asked.add((model,), event.asked_tokens)
        for tier, tokens in event.hit_tokens.items():
            self._hit.add((model, tier), tokens)
        for cause, tokens in event.miss_tokens.items():
            self._miss.add((model, cause), tokens)
        for tier, tokens in event.tier_asked.items():
            self._tier_asked.add((tier,), tokens)

    def _store(self, event: BlocksStored) -> None:
        blocks = len(event.hashes) // HASH_BYTES
        self._stored.add((event.tier,), blocks)
        if event.tier in _IN_MEMORY:  # the others do not say what they forget
            self._unread.add((event.tier,), blocks * event.payload_bytes)

    def _remove(self, event: BlocksRemoved) -> None:
        self._evicted.add((event.tier, event.cause), len(event.hashes) // HASH_BYTES)
        self._lifetime.observe(event.tier, event.lifetimes)
        self._idle.observe(event.tier, event.idle)
        if event.tier in _IN_MEMORY:
            self._unread.add((event.tier,), -event.unread_blocks * event.payload_bytes)


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
    resident_bytes: Callable[[], Mapping[tuple[str, str], int]]
    """Payload bytes in memory, by tier and model."""
    what_if: Callable[[], Iterable[Estimate]]
    skipped_requests: Callable[[], Mapping[str, int]]
    """By what left them out."""


class StoreGauges(Collector):
    """Metrics that are read from the store when they are scraped."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._models = _Names(MODELS_MAX)

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
        yield _family("kvstore_resident_bytes", self._resident())
        yield _family(
            "kvstore_skipped_requests_total",
            {(who,): count for who, count in readings.skipped_requests().items()},
        )
        yield from _what_if(list(readings.what_if()))

    def _resident(self) -> dict[tuple[str, ...], int]:
        sizes: dict[tuple[str, ...], int] = {}
        for (tier, model), size in self._readings.resident_bytes().items():
            labels = tier, self._models.label(model)
            sizes[labels] = sizes.get(labels, 0) + size
        return sizes


def _what_if(estimates: list[Estimate]) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    for name, field in (
        ("kvstore_whatif_asked_tokens_total", "asked_tokens"),
        ("kvstore_whatif_missed_tokens_total", "missed_tokens"),
        ("kvstore_whatif_capacity_bytes", "capacity_bytes"),
    ):
        yield _family(name, {(f"{each.scale:g}",): getattr(each, field) for each in estimates})


class _Values(Collector):
    """Counts or levels of one family by label values."""

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        self._name = name
        # In a list each, so that adding looks a key up once.
        self._cells: dict[tuple[str, ...], list[int]] = {} if METRICS[name].labels else {(): [0]}
        registry.register(self)

    @property
    def values(self) -> dict[tuple[str, ...], int]:
        return {labels: cell[0] for labels, cell in self._cells.items()}

    def add(self, labels: tuple[str, ...], amount: int) -> None:
        cell = self._cells.get(labels)
        if cell is None:
            self._cells[labels] = [amount]
        else:
            cell[0] += amount

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        yield _family(self._name, self.values)


class BlockAges(Collector):
    """A histogram that takes the seconds of many blocks at once: a prompt may hit thousands.

    They are sorted into buckets when some thousands have come, or somebody looks.
    """

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        self._metric = METRICS[name]
        self._waiting: dict[TierName, list[Seconds]] = {}
        self._waits = 0
        self._counts: dict[TierName, NDArray[np.int64]] = {}
        self._sums: dict[TierName, float] = {}
        registry.register(self)

    def observe(self, tier: TierName, seconds: Seconds) -> None:
        if len(seconds):
            self._waiting.setdefault(tier, []).append(seconds)
            self._waits += len(seconds)
            if self._waits >= _WAITING_MAX:
                self._sort()

    def _sort(self) -> None:
        for tier, parts in self._waiting.items():
            seconds = np.concatenate(parts)
            counts = _cumulative(seconds, self._metric.buckets)
            self._counts[tier] = self._counts.get(tier, 0) + counts
            self._sums[tier] = self._sums.get(tier, 0.0) + float(seconds.sum())
        self._waiting.clear()
        self._waits = 0

    def collect(self) -> Iterable[HistogramMetricFamily]:
        self._sort()
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=[*metric.labels])
        bounds = [*map(floatToGoString, (*metric.buckets, math.inf))]
        for tier, counts in self._counts.items():
            family.add_metric([tier], list(zip(bounds, counts.tolist(), strict=True)), self._sums[tier])
        yield family


def _cumulative(seconds: Seconds, bounds: Sequence[float]) -> NDArray[np.int64]:
    """How many are at most each bound, and last how many there are."""
    counts = np.full(len(bounds) + 1, len(seconds), dtype=np.int64)
    for place, bound in enumerate(bounds):
        below = np.count_nonzero(seconds <= bound)
        if below == len(seconds):
            break  # mostly after the first few bounds
        counts[place] = below
    return counts


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
