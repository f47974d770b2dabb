"""What happened in the store, for listeners: metrics, logs, engine notifications, recordings.

Events carry all that their listeners need, so that no listener reaches back into the store.
Times are seconds on the store's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.block import MissCause, Shard, TierName
from kvstore.hints import NO_HINTS, Hints

Seconds = NDArray[np.float64]

_SETTLED_BYTES = 1024
"""Of a settled request beside its hashes, its dictionaries above all."""

_log = logging.getLogger(__name__)


def _no_seconds() -> Seconds:
    return np.zeros(0)


class RemovalCause(StrEnum):
    """Why blocks left a tier; label values of ``kvstore_evicted_blocks_total``."""

    CAPACITY = "capacity"
    RECLAIMED = "reclaimed"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    CLEARED = "cleared"


class DropCause(StrEnum):
    """Why blocks were never stored; label values of ``kvstore_dropped_blocks_total``."""

    FULL = "full"
    DEADLINE = "deadline"
    QUEUE = "queue"
    COLLISION = "collision"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"


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


@dataclass(frozen=True, slots=True, eq=False)
class BlocksRemoved:
    """Blocks of one namespace and shard stopped being readable in a tier.

    ``lifetimes`` and ``idle`` are seconds, one a block, since it was stored and since it was used;
    ``unread_blocks`` of them were never read. Empty and 0 where the tier keeps no such books.
    """

    time: float
    tier: TierName
    namespace: bytes
    shard: Shard
    hashes: bytes
    cause: RemovalCause
    payload_bytes: int
    lifetimes: Seconds = field(default_factory=_no_seconds)
    idle: Seconds = field(default_factory=_no_seconds)
    unread_blocks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BlocksReused:
    """A request reads blocks in a tier. ``gaps`` are the seconds since each that it hit was used before.

    ``first_reads`` counts the blocks, hit or fetched for it, that are read for the first time.
    """

    time: float
    tier: TierName
    namespace: bytes
    gaps: Seconds
    first_reads: int
    payload_bytes: int


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

    ``tier_asked`` is what each tier was asked for, that tier's own denominator. ``hashes`` are the
    prompt's whole blocks (packed). The caller had those before ``first_block`` itself, which are not
    counted; the next ``hit_blocks`` were used: what a recording or a what-if needs.
    """

    time: float
    namespace: bytes
    asked_tokens: int
    hit_tokens: dict[TierName, int] = field(default_factory=dict)
    miss_tokens: dict[MissCause, int] = field(default_factory=dict)
    tier_asked: dict[TierName, int] = field(default_factory=dict)
    hashes: bytes = b""
    hit_blocks: int = 0
    hints: Hints = NO_HINTS
    first_block: int = 0

    @property
    def nbytes(self) -> int:
        """What it takes while it waits for somebody, roughly."""
        return len(self.hashes) + _SETTLED_BYTES


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


Event = (
    BlocksStored | BlocksRemoved | BlocksReused | BlocksDropped | RequestSettled | TokensProbed | BytesMoved
)
Listener = Callable[[Event], None]


class EventBus:
    """Hands each event to every listener, in order, on the owner's thread.

    A listener that raises is logged and goes on listening: what only watches the store must not be
    able to stop it. ``failures`` counts.
    """

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        self.failures = 0

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - whatever a listener does, the store goes on
                self.failures += 1
                _log.exception("a listener failed on %s", type(event).__name__)
