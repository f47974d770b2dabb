"""The store's own limits and times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Demotion(StrEnum):
    """When a block of the host tier is copied to redis."""

    WRITE_THROUGH = "write_through"
    """As soon as it is stored."""
    ON_EVICT = "on_evict"
    """When it is about to leave the host tier."""
    ON_REUSE = "on_reuse"
    """Once it has been hit ``reuse_count`` times, with all blocks before it."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Times are seconds, sizes bytes."""

    lease_seconds: float = 30.0
    """A lease that nobody renews ends after this."""
    write_seconds: float = 30.0
    """A write that is neither committed nor aborted by then loses its slots to quarantine."""
    probe_seconds: float = 0.05
    """What redis may take to say which blocks exist."""
    flight_seconds: float = 5.0
    """What redis may take for one batch of a promotion or a demotion."""
    ttl_seconds: float = 86400.0
    """After so long redis has forgotten a block, where nobody used it."""
    idle_ttl_seconds: float | None = None
    """After so long a block that nobody used leaves memory; None: only when its room is needed."""
    batch_bytes: int = 16 << 20
    """Payload bytes of one batch."""
    demotion: Demotion = Demotion.WRITE_THROUGH
    reuse_count: int = 1
    recompute_tokens_per_second: float | None = None
    """How fast the readers' engine computes a prompt; with it, redis is asked only for blocks that are
    expected to come sooner than they are computed. None: for all that it has."""
    queue_bytes: int = 256 << 20
    """Payload bytes waiting for a lower tier; what exceeds it is dropped, tails first."""
    readers_verify: bool = False
    """Readers compare payloads that nobody has read since a restart with their checksums, and say how far
    they came; otherwise the store does it before it promises them."""
    threads: int = 3
    """Threads for redis. Where there are several, one is for questions, so that they do not wait behind
    payloads, and one of the others is left to those who wait for blocks."""
