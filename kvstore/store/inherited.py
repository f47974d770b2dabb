"""What the server before this one left behind: promises that still hold, and writers that may yet write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.block import SlotArray
from kvstore.store.parts import Parts


class Inherited:
    """Leased and quarantined slots of an adopted pool file, until they are over."""

    def __init__(self, parts: Parts) -> None:
        self._pool = parts.tiers.host.pool
        self._clock = parts.clock
        adopted = parts.tiers.host.adopted
        latest = parts.clock() + parts.options.lease_seconds
        self._leased: list[tuple[SlotArray, float]] = []
        for slots, until in adopted.leased:
            self._pool.pin(slots, min(until, latest))
            self._leased.append((slots, min(until, latest)))
        self._quarantined: dict[int, SlotArray] = dict(adopted.quarantined)

    def expire(self) -> None:
        """Let go of what was promised until now."""
        now = self._clock()
        over = [slots for slots, until in self._leased if until <= now]
        if over:
            self._leased = [(slots, until) for slots, until in self._leased if until > now]
            for slots in over:
                self._pool.unpin(slots)

    def reap(self, alive: Callable[[int], bool]) -> None:
        """Give back the slots of writers that have ended."""
        for writer in [writer for writer in self._quarantined if not alive(writer)]:
            self._pool.unquarantine(self._quarantined.pop(writer))

    def pins(self) -> SlotArray:
        """All slots that are held, one entry a pin."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(slots for slots, _ in self._leased)])
