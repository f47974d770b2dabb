"""When blocks were stored and used, and how often they were read: columns of the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import SlotArray
from kvstore.extents import ExtentMap
from kvstore.table import SlotState


class History(NamedTuple):
    """One entry a block; times are seconds on the store's clock."""

    stored_at: NDArray[np.float64]
    used_at: NDArray[np.float64]
    reads: NDArray[np.uint32]


class Reuse(NamedTuple):
    """Seconds since each hit block was used before, and how many blocks are read for the first time."""

    gaps: NDArray[np.float64]
    first_reads: int


def mark_stored(extents: ExtentMap, slots: SlotArray, time: float) -> None:
    """New blocks: nobody has read them."""
    for extent, _, rows in extents.groups(slots):
        extent.table.stored_at[rows] = time
        extent.table.used_at[rows] = time
        extent.table.reads[rows] = 0


def mark_used(extents: ExtentMap, slots: SlotArray, hit_blocks: int, time: float) -> Reuse:
    """A request uses ``slots``, of which the first ``hit_blocks`` were there before it."""
    before = history(extents, slots)
    for extent, _, rows in extents.groups(slots):
        extent.table.used_at[rows] = time
        extent.table.reads[rows] += np.uint32(1)
    return Reuse(time - before.used_at[:hit_blocks], int(np.count_nonzero(before.reads == 0)))


def mark_idle_over(extents: ExtentMap, slots: SlotArray, time: float) -> None:
    """A request relies on ``slots`` and does not read them."""
    for extent, _, rows in extents.groups(slots):
        extent.table.used_at[rows] = time


def history(extents: ExtentMap, slots: SlotArray) -> History:
    """Copies of the columns of some slots, in their order."""
    found = History(np.zeros(len(slots)), np.zeros(len(slots)), np.zeros(len(slots), np.uint32))
    for extent, positions, rows in extents.groups(slots):
        found.stored_at[positions] = extent.table.stored_at[rows]
        found.used_at[positions] = extent.table.used_at[rows]
        found.reads[positions] = extent.table.reads[rows]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class TableAges:
    """When READY blocks were last used, by slot (``kvstore/evict/expiry.py``)."""

    extents: ExtentMap

    @property
    def slots(self) -> int:
        return self.extents.slots

    def idle(self, start: int, stop: int, since: float) -> SlotArray:
        ready = np.flatnonzero(self.extents.state[start:stop] == SlotState.READY) + start
        used_at = np.zeros(len(ready))
        for extent, positions, rows in self.extents.groups(ready):
            used_at[positions] = extent.table.used_at[rows]
        return ready[used_at <= since]
