"""Least recently used, by whole requests: the oldest request's blocks go first, tail before head."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy, Touch

_NOBODY = 0
_COMPACT_SLACK = 1024


class LRU:
    """Recency by request.

    A request takes ownership of every block it touches, so an older request keeps only what
    nobody has used since, and the order of (oldest request, tail first) equals a per-block LRU
    list in which a request's tail is touched first. Everything is done on arrays: some
    nanoseconds a block, and 16 bytes a block.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._owner = np.zeros(0, dtype=np.int64)
        self._records: OrderedDict[int, SlotArray] = OrderedDict()
        self._next = 1
        self._first = -1
        self._recorded = 0
        self._owned = 0

    def touch(self, touch: Touch) -> None:
        if len(touch.slots):
            self._cover(int(touch.slots.max()))
            self._owned += int(np.count_nonzero(self._owner[touch.slots] == _NOBODY))
            self._append(touch.slots)
            self._compact()

    def add(self, slots: SlotArray, parent: int, time: float) -> None:
        del time
        self._cover(int(slots.max()))
        self._owned += int(np.count_nonzero(self._owner[slots] == _NOBODY))
        owner = int(self._owner[parent]) if 0 <= parent < len(self._owner) else _NOBODY
        if owner != _NOBODY:
            record = self._owned_by(owner)
            if record[-1] == parent:
                # The request goes on: its blocks stay together, and all of them were used just now.
                self._recorded -= len(self._records.pop(owner))
                slots = np.concatenate((record, slots))
        self._append(slots)
        self._compact()

    def forget(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        self._owned -= int(np.count_nonzero(self._owner[known] != _NOBODY))
        self._owner[known] = _NOBODY

    def orphan(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        owners = self._owner[known]
        # Newest first, so that the oldest end up in front.
        for owner in np.unique(owners[owners != _NOBODY])[::-1].tolist():
            record = self._owned_by(owner)
            unreachable = record[np.isin(record, known[owners == owner]).argmax() :]
            self._owner[unreachable] = self._first
            self._records[self._first] = unreachable
            self._records.move_to_end(self._first, last=False)
            self._recorded += len(unreachable)
            self._first -= 1

    def victims(self, limit: int) -> SlotArray:
        busy: list[SlotArray] = []
        chosen = np.zeros(0, dtype=np.int64)
        while self._records and not len(chosen):
            record_id = next(iter(self._records))
            owned = self._owned_by(record_id)
            free = self._leading_leaves(owned[::-1])[:limit]
            rest = owned[: len(owned) - len(free)]
            self._recorded -= len(self._records[record_id])
            chosen = free
            if len(free) == limit and len(rest):
                self._records[record_id] = rest
                self._recorded += len(rest)
            else:
                del self._records[record_id]
                if len(rest):
                    busy.append(rest)
        self.forget(chosen)
        # What is pinned now is in use now. Setting it aside also keeps the next call short.
        for rest in busy:
            self._append(rest)
        return chosen

    def _append(self, slots: SlotArray) -> None:
        self._owner[slots] = self._next
        self._records[self._next] = slots
        self._recorded += len(slots)
        self._next += 1

    def _owned_by(self, record_id: int) -> SlotArray:
        record = self._records[record_id]
        owned: SlotArray = record[self._owner[record] == record_id]
        return owned

    def _leading_leaves(self, tail_first: SlotArray) -> SlotArray:
        """The longest run of which each is a leaf once its predecessors are gone."""
        if not len(tail_first):
            return tail_first
        children = self._occupancy.children[tail_first]
        children[1:] -= self._occupancy.parent[tail_first[:-1]] == tail_first[1:]
        blocked = np.flatnonzero((children > 0) | (self._occupancy.pins[tail_first] > 0))
        return tail_first[: blocked[0]] if len(blocked) else tail_first

    def _cover(self, slot: int) -> None:
        if slot >= len(self._owner):
            size = max(slot + 1, len(self._owner) * 3 // 2, len(self._occupancy.pins))
            grown = np.zeros(size, dtype=np.int64)
            grown[: len(self._owner)] = self._owner
            self._owner = grown

    def _compact(self) -> None:
        """Forget what records no longer own; each block touched pays for one block dropped."""
        if self._recorded <= 2 * self._owned + _COMPACT_SLACK:
            return
        kept: OrderedDict[int, SlotArray] = OrderedDict()
        for record_id in self._records:
            owned = self._owned_by(record_id)
            if len(owned):
                kept[record_id] = owned
        self._records = kept
        self._recorded = sum(len(slots) for slots in kept.values())
