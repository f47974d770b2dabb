"""What happened in the store, for those who watch it from elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from kvstore.block import MissCause, TierName
from kvstore.events import BlocksRemoved, BlocksStored, Event, RequestSettled

KEPT_EVENTS = 65_536


class Batch(NamedTuple):
    """Events after a cursor. ``lost``: some between the cursor and these are no longer known."""

    sequence: int
    lost: bool
    events: list[BlocksStored | BlocksRemoved]


class EventLog:
    """A listener that keeps the last events of blocks, numbered from 1."""

    def __init__(self, kept: int = KEPT_EVENTS) -> None:
        self._events: deque[BlocksStored | BlocksRemoved] = deque(maxlen=kept)
        self._waiters: set[asyncio.Event] = set()
        self.sequence = 0
        """Number of the last event."""
        self.closed = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, BlocksStored | BlocksRemoved):
            self._events.append(event)
            self.sequence += 1
            for waiter in self._waiters:
                waiter.set()

    def after(self, sequence: int, limit: int) -> Batch:
        """The next events after a sequence number, at most ``limit``."""
        oldest = self.sequence - len(self._events)
        lost = sequence < oldest or sequence > self.sequence
        start = oldest if lost else sequence
        count = min(limit, self.sequence - start)
        skip = start - oldest
        return Batch(start + count, lost, [self._events[skip + at] for at in range(count)])

    def close(self) -> None:
        """There will be no more: those who wait are let go."""
        self.closed = True
        for waiter in self._waiters:
            waiter.set()

    async def wait(self, sequence: int) -> None:
        """Until there is an event after ``sequence``, or there will be none."""
        if self.sequence != sequence or self.closed:
            return
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            await waiter.wait()
        finally:
            self._waiters.remove(waiter)


class Totals:
    """A listener that adds up what was asked, hit and missed since the start, in tokens."""

    def __init__(self) -> None:
        self.asked = 0
        self.hits: dict[TierName, int] = {}
        self.misses: dict[MissCause, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSettled):
            self.asked += event.asked_tokens
            for tier, tokens in event.hit_tokens.items():
                self.hits[tier] = self.hits.get(tier, 0) + tokens
            for cause, tokens in event.miss_tokens.items():
                self.misses[cause] = self.misses.get(cause, 0) + tokens
