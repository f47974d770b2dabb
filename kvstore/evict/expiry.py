"""A time to live: blocks that nobody has used for so long leave, whatever a policy would keep.

Beside the policies and not one of them: it needs the time of each block's last use, which whoever holds the
blocks writes down anyway, and costs a use nothing. It is found by a sweep over those times, a part at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nextafter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy

SLICE_SLOTS = 8192
"""Slots that are looked at in one step."""

_SWEEPS = 16
_NOBODY = -1
_NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)


class Ages(Protocol):
    """When the blocks of a pool were last used."""

    @property
    def slots(self) -> int:
        """All numbers of slots are below this."""

    def idle(self, start: int, stop: int, since: float) -> SlotArray:
        """The resident blocks in slots [start, stop) that nobody has used after ``since``, in that order."""


@dataclass(slots=True, eq=False)
class FlatAges:
    """Ages in two columns by slot."""

    resident: NDArray[np.bool_]
    used_at: NDArray[np.float64]

    @property
    def slots(self) -> int:
        return len(self.used_at)

    def idle(self, start: int, stop: int, since: float) -> SlotArray:
        stop = min(stop, self.slots)
        idle = self.resident[start:stop] & (self.used_at[start:stop] <= since)
        return np.flatnonzero(idle) + start


class Expiry:
    """Finds what was last used ``ttl_seconds`` ago or earlier: leaves first, nothing that is pinned.

    A block counts as used when it or what hangs from it was. Sweeps begin a sixteenth of the time to live
    apart, and at once where one has freed what hangs from a slice before it.
    """

    def __init__(
        self, ttl_seconds: float, occupancy: Occupancy, ages: Ages, slice_slots: int = SLICE_SLOTS
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._occupancy = occupancy
        self._ages = ages
        self._slice_slots = slice_slots
        self._next_sweep = -inf
        self._since = 0.0
        self._at = 0
        self._again = False

    def behind(self, now: float) -> bool:
        """Whether a sweep is under way, or has to begin."""
        return self._at > 0 or now >= self._next_sweep

    def due(self, now: float) -> SlotArray:
        """The blocks of the next slice that have to go; to be asked while ``behind``.

        From none of them hangs anything but others of them. The caller frees them before it asks again.
        """
        if not self._at and not self._again:
            self._since = now - self._ttl_seconds
        if not self._at:
            self._again = False
        start, stop = self._at, self._at + self._slice_slots
        gone = self._loose(self._ages.idle(start, stop, self._since))
        above = self._occupancy.parent[gone]
        # Heads in slices before this one may be leaves now. The next sweep looks for no later uses.
        self._again |= bool(((above != _NOBODY) & (above < start)).any())
        self._at = stop
        if stop >= self._ages.slots:
            self._at = 0
            if not self._again:
                # Later than now, however short that is: who sweeps until nothing is due comes to an end.
                self._next_sweep = max(now + self._ttl_seconds / _SWEEPS, nextafter(now, inf))
        return gone

    def _loose(self, idle: SlotArray) -> SlotArray:
        """Those below which nothing stays."""
        if not len(idle):
            return _NO_SLOTS
        occupancy = self._occupancy
        parents = occupancy.parent[idle]
        above = np.searchsorted(idle, parents)
        above[above == len(idle)] = 0
        above[idle[above] != parents] = _NOBODY
        below = np.bincount(above[above != _NOBODY], minlength=len(idle))
        stays = (occupancy.pins[idle] > 0) | (occupancy.children[idle] > below)
        if not stays.any():
            return idle
        # What stays keeps all above it: by steps upwards that double.
        while len(climbing := np.flatnonzero(above != _NOBODY)):
            stays[above[climbing[stays[climbing]]]] = True
            above = np.where(above == _NOBODY, _NOBODY, above[above])
        return idle[~stays]
