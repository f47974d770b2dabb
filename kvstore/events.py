"""What happened in the store, for listeners: metrics, logs, engine notifications, recordings.

Events carry all that their listeners need, so that no listener reaches back into the store.
Times are seconds on the store's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.block import MissCause, Shard, TierName


class RemovalCause(StrEnum):
    """Why blocks left a tier; label values of ``kvstore_evicted_blocks_total``."""

    CAPACITY = "capacity"
    RECLAIMED = "reclaimed"
    CORRUPT = "corrupt"
    CLEARED = "cleared"


class DropCause(StrEnum):
    """Why blocks were never stored; label values of ``kvstore_dropped_blocks_total``."""

    FULL = "full"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    QUEUE = "queue"
    COLLISION = "collision"
    UNAVAILABLE = "unavailable"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of one namespace and shard became readable in a tier. ``hashes`` is packed."""

    time: float
    tier: TierName
    namespace: bytes
    shard: Shard
    hashes: bytes
    payload_bytes: int
    """Bytes of one block."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of one namespace and shard stopped being readable in a tier."""

    time: float
    tier: TierName
    namespace: bytes
    shard: Shard
    hashes: bytes
    cause: RemovalCause


@dataclass(frozen=True, slots=True)
class BlocksDropped:
    """Blocks that were offered to a tier and did not become readable there."""

    time: float
    tier: TierName
    namespace: bytes
    blocks: int
    cause: DropCause


@dataclass(frozen=True, slots=True)
class RequestSettled:
    """One request's tokens, counted once: asked = sum of hits + sum of misses.

    ``tier_asked`` is what each tier was asked for, that tier's own denominator.
    """

    time: float
    namespace: bytes
    asked_tokens: int
    hit_tokens: dict[TierName, int] = field(default_factory=dict)
    miss_tokens: dict[MissCause, int] = field(default_factory=dict)
    tier_asked: dict[TierName, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokensProbed:
    """A read-only look-up asked for this many tokens."""

    time: float
    namespace: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Payload bytes went from one tier to another, or from and to the caller (None)."""

    time: float
    source: TierName | None
    target: TierName | None
    payload_bytes: int
    seconds: float


Event = BlocksStored | BlocksRemoved | BlocksDropped | RequestSettled | TokensProbed | BytesMoved
Listener = Callable[[Event], None]


class EventBus:
    """Hands each event to every listener, in order, on the owner's thread."""

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
