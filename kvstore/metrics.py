"""Prometheus metrics, fed by events. The only importer of prometheus_client in this package.

Hit rate is a ratio of sums in one unit, tokens, counted once a request:

    sum(rate(kvstore_hit_tokens_total[5m])) / sum(rate(kvstore_asked_tokens_total[5m]))

and for one tier, over what was asked of that tier:

    rate(kvstore_hit_tokens_total{tier="redis"}[5m]) / rate(kvstore_tier_asked_tokens_total{tier="redis"}[5m])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
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
from kvstore.pool import PoolUsage

MODELS_MAX = 50
OTHER_MODELS = "other"
CALLER = "caller"
_AGE_SECONDS = (1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 28_800.0, 86_400.0, 604_800.0)
_TRANSFER_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Metrics:
    """A listener that counts. Two stores in one process take two registries."""

    def __init__(self, registry: CollectorRegistry, model_of: Callable[[bytes], str]) -> None:
        """``model_of`` names the model of a namespace; at most ``MODELS_MAX`` names become labels."""
        self._model_of = model_of
        self._models: set[str] = set()
        self._asked = Counter("kvstore_asked_tokens", "Tokens asked.", ["model"], registry=registry)
        self._hit = Counter(
            "kvstore_hit_tokens", "Tokens served, by tier.", ["model", "tier"], registry=registry
        )
        self._miss = Counter(
            "kvstore_miss_tokens", "Tokens not served, by cause.", ["model", "cause"], registry=registry
        )
        self._tier_asked = Counter(
            "kvstore_tier_asked_tokens", "Tokens that a tier was asked for.", ["tier"], registry=registry
        )
        self._probed = Counter(
            "kvstore_probe_tokens", "Tokens asked by read-only look-ups.", registry=registry
        )
        self._stored = Counter(
            "kvstore_stored_blocks", "Blocks that became readable.", ["tier"], registry=registry
        )
        self._evicted = Counter(
            "kvstore_evicted_blocks", "Blocks that left a tier.", ["tier", "cause"], registry=registry
        )
        self._dropped = Counter(
            "kvstore_dropped_blocks", "Blocks that were never stored.", ["tier", "cause"], registry=registry
        )
        self._moved = Counter(
            "kvstore_transfer_bytes", "Payload bytes copied.", ["from", "to"], registry=registry
        )
        self._seconds = Histogram(
            "kvstore_transfer_seconds",
            "Time of one copy of a batch.",
            ["from", "to"],
            buckets=_TRANSFER_SECONDS,
            registry=registry,
        )

        self._lifetime = BlockAges("block_lifetime", "From stored to removed, of removed blocks.", registry)
        self._idle = BlockAges("block_idle_before_evict", "From last used to removed.", registry)
        self._gap = BlockAges("block_reuse_gap", "Between two uses of a block.", registry)

    def __call__(self, event: Event) -> None:
        match event:
            case RequestSettled():
                self._settle(event)
            case TokensProbed():
                self._probed.inc(event.tokens)
            case BlocksStored():
                self._stored.labels(event.tier).inc(len(event.hashes) // HASH_BYTES)
            case BlocksRemoved():
                self._evicted.labels(event.tier, event.cause).inc(len(event.hashes) // HASH_BYTES)
                self._lifetime.observe(event.tier, event.lifetimes)
                self._idle.observe(event.tier, event.idle)
            case BlocksReused():
                self._gap.observe(event.tier, event.gaps)
            case BlocksDropped():
                self._dropped.labels(event.tier, event.cause).inc(event.blocks)
            case BytesMoved():
                path = (event.source or CALLER, event.target or CALLER)
                self._moved.labels(*path).inc(event.payload_bytes)
                self._seconds.labels(*path).observe(event.seconds)

    def _settle(self, event: RequestSettled) -> None:
        model = self._label(self._model_of(event.namespace))
        self._asked.labels(model).inc(event.asked_tokens)
        for tier, tokens in event.hit_tokens.items():
            self._hit.labels(model, tier).inc(tokens)
        for cause, tokens in event.miss_tokens.items():
            self._miss.labels(model, cause).inc(tokens)
        for tier, tokens in event.tier_asked.items():
            self._tier_asked.labels(tier).inc(tokens)

    def _label(self, model: str) -> str:
        if model not in self._models and len(self._models) < MODELS_MAX:
            self._models.add(model)
        return model if model in self._models else OTHER_MODELS


class BlockAges(Collector):
    """A histogram that takes the seconds of many blocks at once: a prompt may hit thousands."""

    def __init__(self, what: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name = f"kvstore_{what}_seconds"
        self._documentation = documentation
        self._counts: dict[TierName, NDArray[np.int64]] = {}
        self._sums: dict[TierName, float] = {}
        registry.register(self)

    def observe(self, tier: TierName, seconds: Seconds) -> None:
        if len(seconds):
            buckets = np.searchsorted(_AGE_SECONDS, seconds)
            counts = np.bincount(buckets, minlength=len(_AGE_SECONDS) + 1)
            self._counts[tier] = self._counts.get(tier, 0) + counts
            self._sums[tier] = self._sums.get(tier, 0.0) + float(seconds.sum())

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["tier"])
        for tier, counts in self._counts.items():
            bounds = [*map(floatToGoString, (*_AGE_SECONDS, math.inf))]
            cumulative = list(zip(bounds, counts.cumsum().tolist(), strict=True))
            family.add_metric([tier], cumulative, self._sums[tier])
        yield family


class PoolGauges(Collector):
    """Gauges that are read from the store when they are scraped."""

    def __init__(self, usage: Callable[[], Mapping[TierName, PoolUsage]], leases: Callable[[], int]) -> None:
        self._usage = usage
        self._leases = leases

    def collect(self) -> Iterable[GaugeMetricFamily]:
        pool = GaugeMetricFamily("kvstore_pool_bytes", "Bytes by state.", labels=["tier", "state"])
        leased = GaugeMetricFamily("kvstore_leased_bytes", "Bytes under a lease.", labels=["tier"])
        for tier, usage in self._usage().items():
            for state in ("free", "staged", "ready", "quarantined"):
                pool.add_metric([tier, state], getattr(usage, state))
            leased.add_metric([tier], usage.leased)
        yield pool
        yield leased
        yield GaugeMetricFamily("kvstore_leases", "Leases that are not over.", self._leases())
