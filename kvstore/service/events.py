"""What happened in the store, for those who watch it from elsewhere."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from kvstore.block import HASH_BYTES, Shard, TierName
from kvstore.events import BlocksRemoved, BlocksStored, Event, RemovalCause

KEPT_BYTES = 64 << 20
_CHANGE_HASH_BYTES = 65_536 * HASH_BYTES
_CHANGE_BYTES = 256
"""What a change takes beside its hashes."""


class Change(NamedTuple):
    """Blocks that became readable in a tier; with a ``cause``, that stopped being so. At a date."""

    time: float
    tier: TierName
    namespace: bytes
    shard: Shard
    hashes: bytes
    cause: RemovalCause | None

    @property
    def size(self) -> int:
        """Bytes that it takes here and on the wire, roughly."""
        return len(self.hashes) + _CHANGE_BYTES


class Batch(NamedTuple):
    """Changes after a cursor. ``lost``: some between the cursor and these are no longer known."""

    sequence: int
    lost: bool
    changes: list[Change]


class EventLog:
    """A listener that keeps the last changes, numbered from 1, as many as fit its bytes."""

    def __init__(self, kept_bytes: int = KEPT_BYTES, *, clock_began_at: float = 0.0) -> None:
        """``clock_began_at`` is when the store's clock was 0, in seconds since 1970: logs are of dates."""
        self._clock_began_at = clock_began_at
        self._changes: list[Change] = []
        self._dropped = 0  # of these, from the front; a list, since a cursor is then an index
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._waiters: set[asyncio.Event] = set()
        self.sequence = 0
        """Number of the last change."""
        self.closed = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, BlocksStored | BlocksRemoved):
            time = self._clock_began_at + event.time
            cause = event.cause if isinstance(event, BlocksRemoved) else None
            for start in range(0, len(event.hashes), _CHANGE_HASH_BYTES):
                hashes = event.hashes[start : start + _CHANGE_HASH_BYTES]
                self._add(Change(time, event.tier, event.namespace, event.shard, hashes, cause))
            for waiter in self._waiters:
                waiter.set()

    def after(self, sequence: int, limit_bytes: int) -> Batch:
        """What follows a sequence number: within ``limit_bytes``, and at least one if there is one."""
        oldest = self.sequence - (len(self._changes) - self._dropped)
        lost = sequence < oldest or sequence > self.sequence
        start = oldest if lost else sequence
        batch: list[Change] = []
        at = self._dropped + start - oldest
        while at < len(self._changes) and (not batch or limit_bytes >= self._changes[at].size):
            batch.append(self._changes[at])
            limit_bytes -= self._changes[at].size
            at += 1
        return Batch(start + len(batch), lost, batch)

    def close(self) -> None:
        """There will be no more: those who wait are let go."""
        self.closed = True
        for waiter in self._waiters:
            waiter.set()

    async def wait(self, sequence: int, seconds: float) -> None:
        """Until there is a change after ``sequence``, or there will be none, or the time is up."""
        if self.sequence != sequence or self.closed:
            return
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter.wait(), seconds)
        except TimeoutError:
            return
        finally:
            self._waiters.remove(waiter)

    def _add(self, change: Change) -> None:
        self._changes.append(change)
        self._bytes += change.size
        self.sequence += 1
        while self._bytes > self._kept_bytes:
            self._bytes -= self._changes[self._dropped].size
            self._dropped += 1
        if self._dropped > len(self._changes) // 2:
            del self._changes[: self._dropped]
            self._dropped = 0
