"""Every metric that a server exports: the collectors are built from this table, and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from kvstore.block import MissCause, TierName
from kvstore.events import DropCause, RemovalCause

MODELS_MAX = 50
RPCS_MAX = 64
LIMITS_MAX = 32
OTHER = "other"
"""Label value that stands for all names past the first few."""

CALLER = "caller"
POOL_STATES = ("free", "staged", "ready", "quarantined")
AGE_SECONDS = (1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 28_800.0, 86_400.0, 604_800.0)
TRANSFER_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
RPC_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Kind(StrEnum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Who knows the value."""

    EVENTS = "events of the store"
    STORE = "the store, when it is scraped"
    SERVICE = "the gRPC server"


@dataclass(frozen=True, slots=True)
class Values:
    """What a label may be: one of ``closed``, or what ``text`` says, of which there is a bounded number."""

    text: str
    closed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. ``name`` as it is exported: a counter's ends in _total."""

    name: str
    kind: Kind
    help: str
    source: Source
    labels: Mapping[str, Values] = field(default_factory=lambda: MappingProxyType({}))
    buckets: tuple[float, ...] = ()


def _one_of(names: type[StrEnum] | tuple[str, ...], text: str = "") -> Values:
    closed = tuple(map(str, names))
    return Values(text or ", ".join(closed), closed)


def _first(most: int, what: str) -> Values:
    return Values(f"the first {most} {what}; {OTHER} for all further ones")


_TIER = _one_of(TierName)
_MEMORY = _one_of((TierName.DEVICE, TierName.HOST))
_MODEL = _first(MODELS_MAX, "names of models")
_END = _one_of((*TierName, CALLER), f"{', '.join(TierName)}, or {CALLER} for the memory of whoever asks")
_AGED = {"tier": _MEMORY}
_SCALE = _one_of(("0.25", "0.5", "1", "2", "4"), "0.25, 0.5, 1, 2 or 4 times the present size of the pool")

_TABLE = (
    Metric(
        "kvstore_asked_tokens_total",
        Kind.COUNTER,
        "Tokens of prompts that were acquired, counted once a request: hits and misses add up to it.",
        Source.EVENTS,
        {"model": _MODEL},
    ),
    Metric(
        "kvstore_hit_tokens_total",
        Kind.COUNTER,
        "Asked tokens that were served, by the tier that had them.",
        Source.EVENTS,
        {"model": _MODEL, "tier": _TIER},
    ),
    Metric(
        "kvstore_miss_tokens_total",
        Kind.COUNTER,
        "Asked tokens that were not served, by the reason.",
        Source.EVENTS,
        {"model": _MODEL, "cause": _one_of(MissCause)},
    ),
    Metric(
        "kvstore_tier_asked_tokens_total",
        Kind.COUNTER,
        "Tokens that a tier was asked for, which is what the faster ones did not have.",
        Source.EVENTS,
        {"tier": _TIER},
    ),
    Metric(
        "kvstore_probe_tokens_total",
        Kind.COUNTER,
        "Tokens asked by look-ups, which change nothing and count neither as hits nor as misses.",
        Source.EVENTS,
    ),
    Metric(
        "kvstore_stored_blocks_total",
        Kind.COUNTER,
        "Blocks that became readable.",
        Source.EVENTS,
        {"tier": _TIER},
    ),
    Metric(
        "kvstore_evicted_blocks_total",
        Kind.COUNTER,
        "Blocks that stopped being readable, by the reason.",
        Source.EVENTS,
        {"tier": _TIER, "cause": _one_of(RemovalCause)},
    ),
    Metric(
        "kvstore_dropped_blocks_total",
        Kind.COUNTER,
        "Blocks that were offered to a tier and never became readable there, by the reason.",
        Source.EVENTS,
        {"tier": _TIER, "cause": _one_of(DropCause)},
    ),
    Metric(
        "kvstore_transfer_bytes_total",
        Kind.COUNTER,
        "Bytes of payloads that were copied.",
        Source.EVENTS,
        {"from": _END, "to": _END},
    ),
    Metric(
        "kvstore_transfer_seconds",
        Kind.HISTOGRAM,
        "Time of one copy of a batch of blocks.",
        Source.EVENTS,
        {"from": _END, "to": _END},
        TRANSFER_SECONDS,
    ),
    Metric(
        "kvstore_block_lifetime_seconds",
        Kind.HISTOGRAM,
        "From stored to removed, of blocks that were removed.",
        Source.EVENTS,
        _AGED,
        AGE_SECONDS,
    ),
    Metric(
        "kvstore_block_idle_before_evict_seconds",
        Kind.HISTOGRAM,
        "From last used to removed, of blocks that were removed.",
        Source.EVENTS,
        _AGED,
        AGE_SECONDS,
    ),
    Metric(
        "kvstore_block_reuse_gap_seconds",
        Kind.HISTOGRAM,
        "Between two uses of a block.",
        Source.EVENTS,
        _AGED,
        AGE_SECONDS,
    ),
    Metric(
        "kvstore_unread_bytes",
        Kind.GAUGE,
        "Bytes of blocks that were stored and that no request has read yet.",
        Source.EVENTS,
        {"tier": _MEMORY},
    ),
    Metric(
        "kvstore_pool_bytes",
        Kind.GAUGE,
        "Bytes of a pool by state; the sum is what it has reserved.",
        Source.STORE,
        {"tier": _MEMORY, "state": _one_of(POOL_STATES)},
    ),
    Metric(
        "kvstore_resident_bytes",
        Kind.GAUGE,
        "Payload bytes of readable blocks, by the model that they belong to.",
        Source.STORE,
        {"tier": _MEMORY, "model": _MODEL},
    ),
    Metric(
        "kvstore_leased_bytes",
        Kind.GAUGE,
        "Bytes under a lease, which cannot be evicted.",
        Source.STORE,
        {"tier": _MEMORY},
    ),
    Metric("kvstore_leases", Kind.GAUGE, "Leases that are not over.", Source.STORE),
    Metric(
        "kvstore_tier_healthy",
        Kind.GAUGE,
        "1 while a tier answers, else 0; /readyz says why.",
        Source.STORE,
        {"tier": _TIER},
    ),
    Metric(
        "kvstore_redis_errors_total",
        Kind.COUNTER,
        "What went wrong with Redis: exchanges that failed and error replies.",
        Source.STORE,
        {
            "kind": Values(
                "busy, timeout, connection, refused, protocol, or an error reply's code as oom; other"
            )
        },
    ),
    Metric(
        "kvstore_redis_breaker_open",
        Kind.GAUGE,
        "1 while a Redis node is given up because it does not answer, else 0.",
        Source.STORE,
        {"node": Values("host:port of each node, a socket's path, or the service that sentinels watch")},
    ),
    Metric(
        "kvstore_redis_queue_bytes",
        Kind.GAUGE,
        "Bytes of payloads that wait for Redis to take them.",
        Source.STORE,
    ),
    Metric(
        "kvstore_whatif_asked_tokens_total",
        Kind.COUNTER,
        "Tokens asked of ghosts of the pool: 1 - missed / asked is what a pool of another size would hit.",
        Source.STORE,
        {"scale": _SCALE},
    ),
    Metric(
        "kvstore_whatif_missed_tokens_total",
        Kind.COUNTER,
        "Tokens of them that it would miss, tails included; estimated from a sample of the blocks.",
        Source.STORE,
        {"scale": _SCALE},
    ),
    Metric(
        "kvstore_whatif_capacity_bytes",
        Kind.GAUGE,
        "Size of the pool that a ghost stands for.",
        Source.STORE,
        {"scale": _SCALE},
    ),
    Metric(
        "kvstore_skipped_requests_total",
        Kind.COUNTER,
        "Requests that something beside the store left out: they came faster than it could follow, or it "
        "failed on them.",
        Source.STORE,
        {"by": _one_of(("whatif", "recording"))},
    ),
    Metric(
        "kvstore_listener_failures_total",
        Kind.COUNTER,
        "Events that a listener failed on; what counts them may be wrong since.",
        Source.STORE,
    ),
    Metric(
        "kvstore_background_failures_total",
        Kind.COUNTER,
        "How often a background task of the server died; it is started again, and /readyz says so meanwhile.",
        Source.STORE,
        {"task": _one_of(("tick", "growth"))},
    ),
    Metric(
        "kvstore_rpc_seconds",
        Kind.HISTOGRAM,
        "Time of a call from its admission to its end.",
        Source.SERVICE,
        {
            "rpc": _first(RPCS_MAX, "names of calls, such as Acquire"),
            "outcome": Values("ok, or another gRPC status in lower case, such as resource_exhausted"),
        },
        RPC_SECONDS,
    ),
    Metric(
        "kvstore_refused_requests_total",
        Kind.COUNTER,
        "Requests that were refused, by the limit that they ran into.",
        Source.SERVICE,
        {"limit": _first(LIMITS_MAX, "names of limits, such as leases, staged_bytes or credentials")},
    ),
    Metric(
        "kvstore_clients",
        Kind.GAUGE,
        "Clients that are registered.",
        Source.SERVICE,
    ),
    Metric(
        "kvstore_build_info",
        Kind.GAUGE,
        "Always 1.",
        Source.SERVICE,
        {"version": Values("version of the package")},
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _TABLE})
"""By name, in the order of the documentation."""
