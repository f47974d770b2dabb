"""What a server says to operators and routers, and how it is read from the messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from google.protobuf.message import Message

from kvstore.block import Shard, TierName
from kvstore.service.codec import TIER_NAMES, shard_of, spec_of
from kvstore.spec import NamespaceSpec
from kvstore.v1 import admin_pb2, lookup_pb2

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Where one block is, or the ``cause`` (a MissCause) for which it is nowhere."""

    index: int
    block_hash: bytes
    tiers: tuple[TierName, ...]
    cause: str
    being_written: bool
    payload_bytes: int
    age_seconds: float | None
    idle_seconds: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prompt block by block; ``tail_tokens`` are past the last whole block."""

    block_size: int
    blocks: tuple[BlockReport, ...]
    tail_tokens: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Bytes by state; ``reserved_bytes`` is the sum of free, staged, ready and quarantined.

    Nobody has read ``unread_bytes`` of the ready ones.
    """

    limit_bytes: int
    reserved_bytes: int
    free_bytes: int
    staged_bytes: int
    ready_bytes: int
    quarantined_bytes: int
    leased_bytes: int
    unread_bytes: int


@dataclass(frozen=True, slots=True)
class TierReport:
    """``pool`` is None for a tier whose memory is elsewhere."""

    tier: TierName
    healthy: bool
    reason: str
    pool: PoolReport | None


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What a tenant is guaranteed and has."""

    name: str
    share_bytes: int
    ready_bytes: int


@dataclass(frozen=True, slots=True)
class PinReport:
    """What a pin keeps: tokens of a run, and their payloads on all ranks. ``tenant`` may be empty."""

    name: str
    tenant: str
    tokens: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    """What a pool of ``scale`` times the present size would have hit of what was asked, estimated."""

    scale: float
    capacity_bytes: int
    asked_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Everything that a status page shows; token counts since the start."""

    version: str
    epoch: int
    uptime_seconds: float
    pool_path: str
    tiers: tuple[TierReport, ...]
    leases: int
    writes: int
    clients: int
    namespaces: int
    asked_tokens: int
    hit_tokens: Mapping[str, int]
    miss_tokens: Mapping[str, int]
    tenants: tuple[TenantReport, ...]
    adopted_blocks: int
    pins: tuple[PinReport, ...]
    what_if: tuple[WhatIfReport, ...]


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """A namespace and its resident blocks by tier in memory, all ranks together."""

    root: bytes
    spec: NamespaceSpec
    tenant: str
    blocks: Mapping[TierName, int]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Blocks that were forgotten, and blocks that leases hold and that stay."""

    blocks: int
    held_blocks: int


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks that became readable in a tier, or, where ``removed``, stopped being so for ``cause``."""

    time: float
    tier: TierName
    namespace: bytes
    shard: Shard
    block_hashes: bytes
    removed: bool
    cause: str


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order, and the cursor (epoch, sequence) behind them; ``lost`` tells of a gap before."""

    epoch: int
    sequence: int
    lost: bool
    events: tuple[BlockEvent, ...]


def _report(report: type[Report], message: Message, **other: object) -> Report:
    """A report from the message that has the same fields, but for those in ``other``."""
    same = {field.name for field in fields(report)} - other.keys()  # type: ignore[arg-type]
    return report(**{name: getattr(message, name) for name in same}, **other)


def _optional(message: Message, name: str) -> object:
    return getattr(message, name) if message.HasField(name) else None


def block_report_of(message: lookup_pb2.BlockReport) -> BlockReport:
    return _report(
        BlockReport,
        message,
        tiers=tuple(TIER_NAMES[tier] for tier in message.tiers),
        age_seconds=_optional(message, "age_seconds"),
        idle_seconds=_optional(message, "idle_seconds"),
    )


def _tier_report(message: admin_pb2.TierReport) -> TierReport:
    pool = _report(PoolReport, message.pool) if message.HasField("pool") else None
    return _report(TierReport, message, tier=TIER_NAMES[message.tier], pool=pool)


def status_of(message: admin_pb2.GetStatusResponse) -> ServerStatus:
    return _report(
        ServerStatus,
        message,
        tiers=tuple(map(_tier_report, message.tiers)),
        hit_tokens=dict(message.hit_tokens),
        miss_tokens=dict(message.miss_tokens),
        tenants=tuple(_report(TenantReport, tenant) for tenant in message.tenants),
        pins=tuple(_report(PinReport, pin, payload_bytes=pin.bytes) for pin in message.pins),
        what_if=tuple(_report(WhatIfReport, each) for each in message.what_if),
    )


def namespace_report_of(message: admin_pb2.NamespaceReport) -> NamespaceReport:
    return NamespaceReport(
        root=message.namespace,
        spec=spec_of(message.spec, None),
        tenant=message.tenant,
        blocks={TIER_NAMES[tier.tier]: tier.blocks for tier in message.tiers},
        payload_bytes=message.payload_bytes,
    )


def block_event_of(message: admin_pb2.BlockEvent) -> BlockEvent:
    return _report(BlockEvent, message, tier=TIER_NAMES[message.tier], shard=shard_of(message.shard))
