"""In which state each slot of a pool is, in bytes and counts: the books that ``integrity`` checks."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy
from kvstore.extents import ExtentMap, grown
from kvstore.index import NO_PARENT
from kvstore.table import Rows, SlotState


class Ledger:
    """States and pins of slots. Owner: one pool.

    ``bytes_in`` are the slots' bytes by state, FREE negative: what is free is counted from the other side.
    ``leased_bytes`` are those of READY slots with a pin.
    """

    def __init__(self, extents: ExtentMap) -> None:
        self._extents = extents
        self.occupancy = Occupancy(*(np.zeros(0, dtype=np.int32) for _ in range(3)))
        self.bytes_in = dict.fromkeys(SlotState, 0)
        self.leased_bytes = 0

    def cover(self) -> None:
        """Make room for slots of extents that were laid out since."""
        occupancy, size = self.occupancy, len(self._extents.state)
        if size > len(occupancy.pins):
            occupancy.pins = grown(occupancy.pins, size, 0)
            occupancy.children = grown(occupancy.children, size, 0)
            occupancy.parent = grown(occupancy.parent, size, NO_PARENT)

    def move(self, slots: SlotArray, before: SlotState, after: SlotState) -> None:
        """Take slots from one state to another, here and in their tables."""
        state = self._extents.state
        assert (state[slots] == before).all(), f"expected slots to be {before.name}"
        state[slots] = after
        for extent, _, rows in self._extents.groups(slots):
            extent.table.state[rows] = after
            count = _count(rows)
            moved = count * extent.slot_class.slot_bytes
            self.bytes_in[before] -= moved
            self.bytes_in[after] += moved
            extent.free += count * ((after == SlotState.FREE) - (before == SlotState.FREE))
            extent.busy += count * (_is_busy(after) - _is_busy(before))
            extent.last_used = None

    def pin(self, slots: SlotArray) -> None:
        """One more pin on each of these READY slots, which are distinct."""
        assert (self._extents.state[slots] == SlotState.READY).all()
        pins = self.occupancy.pins
        self._count_pinned(slots[pins[slots] == 0], 1)
        pins[slots] += 1

    def unpin(self, slots: SlotArray) -> None:
        """One pin less on each."""
        pins = self.occupancy.pins
        pins[slots] -= 1
        left = pins[slots]
        assert (left >= 0).all()
        self._count_pinned(slots[left == 0], -1)

    def _count_pinned(self, slots: SlotArray, sign: int) -> None:
        for extent, _, rows in self._extents.groups(slots):
            count = sign * _count(rows)
            extent.pinned += count
            self.leased_bytes += count * extent.slot_class.slot_bytes


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _is_busy(state: SlotState) -> bool:
    return state in (SlotState.STAGED, SlotState.QUARANTINED)
