"""Room for blocks that are to be written: free slots, new extents, and who gives way for them."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray
from kvstore.events import RemovalCause
from kvstore.extents import Extent, ExtentMap, SlotClass
from kvstore.index import Space
from kvstore.ledger import Ledger
from kvstore.reclaim import coldest_idle_extent, is_colder
from kvstore.removal import Removals
from kvstore.shares import NO_GROUP, Shares
from kvstore.spaces import Spaces
from kvstore.table import SlotState


class Room:
    """Finds slots, and frees them where there are none. Owner: one pool."""

    def __init__(
        self, extents: ExtentMap, ledger: Ledger, spaces: Spaces, shares: Shares, removals: Removals
    ) -> None:
        self._extents = extents
        self._ledger = ledger
        self._spaces = spaces
        self._shares = shares
        self._removals = removals

    def find(self, space: Space, count: int, wanted: bytes = b"") -> SlotArray:
        """Up to ``count`` FREE slots for a space; fewer when all is in use.

        ``wanted``, the hashes of what they are for, lets the policy decide that it is not worth the room.
        """
        slot_class = space.slot_class
        while (missing := count - sum(e.free for e in self._extents.of_class(slot_class))) > 0:
            if not self._add_extent(slot_class) and not self._make(space, missing, wanted):
                break
        return self._extents.take(slot_class, count)

    def evict(self, slot_class: SlotClass, count: int, group: int) -> int:
        """Free up to ``count`` slots of a class on behalf of a group; the number freed.

        First what groups have beyond their guarantee, then what the asking group has within its own;
        each in the policy's order.
        """
        freed = self._evict_surplus(slot_class, count, group, b"")
        return freed + self._evict_own(slot_class, count - freed, group, b"")

    def vacate(self, slot_class: SlotClass, count: int) -> None:
        """As ``evict`` for nobody in particular, but the slots stay STAGED, with their bytes."""
        self._evict_surplus(slot_class, count, NO_GROUP, b"", keep_bytes=True)

    def _add_extent(self, slot_class: SlotClass) -> bool:
        if not self._extents.assign(slot_class):
            return self._extents.reserve_next() and self._add_extent(slot_class)
        self._ledger.cover()
        return True

    def _make(self, space: Space, missing: int, wanted: bytes) -> bool:
        """Free something for a space: a colder extent of another class, else leaves of its own class.

        What its group is guaranteed goes last, when no other group has anything to spare.
        """
        slot_class, group = space.slot_class, self._shares.group_of(space)
        other = coldest_idle_extent(self._extents, slot_class, lambda extent: self._may_take(extent, group))
        if other is not None and is_colder(other, self._extents.of_class(slot_class)):
            self._reclaim(other)
            return True
        if self._evict_surplus(slot_class, missing, group, wanted):
            return True
        if wanted and self._has_refused(slot_class, group):
            return False
        if other is None:
            return self._evict_own(slot_class, missing, group, wanted) > 0
        self._reclaim(other)
        return True

    def _evict_surplus(
        self, slot_class: SlotClass, count: int, group: int, wanted: bytes, *, keep_bytes: bool = False
    ) -> int:
        freed = 0
        spent: set[int] = set()
        while freed < count and (turn := self._shares.turn(slot_class, count - freed, group, spent)):
            victims = turn.evictor.victims(turn.most, wanted if turn.group == group else b"")
            if not len(victims):
                spent.add(turn.group)
                continue
            self._removals.leaves(victims, RemovalCause.CAPACITY, keep_bytes=keep_bytes)
            freed += len(victims)
        return freed

    def _evict_own(self, slot_class: SlotClass, count: int, group: int, wanted: bytes) -> int:
        evictor = self._shares.own(slot_class, group)
        freed = 0
        while (
            evictor is not None and freed < count and len(victims := evictor.victims(count - freed, wanted))
        ):
            self._removals.leaves(victims, RemovalCause.CAPACITY)
            freed += len(victims)
        return freed

    def _has_refused(self, slot_class: SlotClass, group: int) -> bool:
        """Whether a group's policy was asked, gave nothing, and had something that could go.

        What is not worth a block of its own class is not worth an extent of another one either.
        """
        if self._shares.over(group) < 1:
            return False
        occupancy = self._ledger.occupancy
        for extent in self._extents.of_class(slot_class):
            ready = _ready_in(extent)
            free_to_go = ready[(occupancy.children[ready] == 0) & (occupancy.pins[ready] == 0)]
            if any(self._shares.group_of(space) == group for space, _ in self._spaces.split(free_to_go)):
                return True
        return False

    def _may_take(self, extent: Extent, group: int) -> bool:
        """Whether an extent can be emptied for a group without breaking what others are guaranteed."""
        if not self._shares.promised:
            return True
        losses = [(space, len(slots)) for space, slots in self._spaces.split(_ready_in(extent))]
        return self._shares.spares(losses, group)

    def _reclaim(self, extent: Extent) -> None:
        """Empty an extent, whatever hangs below its blocks, so that another class may have it."""
        leaving = _ready_in(extent)
        if len(leaving):
            self._removals.inner(leaving, RemovalCause.RECLAIMED)
        self._extents.retire(extent)


def _ready_in(extent: Extent) -> SlotArray:
    return np.flatnonzero(extent.table.state == SlotState.READY) + extent.base
