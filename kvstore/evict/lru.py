"""Least recently used, by whole requests: the oldest request's blocks go first, tail before head."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.order import runs_below

_NOBODY = 0
_COMPACT_SLACK = 1024
_NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)


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
            self._cover()
            self._append(touch.slots)
            self._compact()

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        del hashes, time
        self._cover()
        self._owned += len(slots)
        owner = int(self._owner[parent]) if parent >= 0 else _NOBODY
        if owner != _NOBODY:
            record = self._records[owner]
            if record[-1] == parent:
                # The request goes on: its blocks stay together, and all of them were used just now.
                record = self._owned_by(owner)
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
        # Each goes to the front, so the last of them comes first.
        for unreachable in reversed(runs_below(self._occupancy.parent, known[self._owner[known] != _NOBODY])):
            self._owner[unreachable] = self._first
            self._records[self._first] = unreachable
            self._records.move_to_end(self._first, last=False)
            self._recorded += len(unreachable)
            self._first -= 1

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        del wanted
        busy: list[SlotArray] = []
        chosen = _NO_SLOTS
        while self._records and not len(chosen):
            record_id = next(iter(self._records))
            owned = self._owned_by(record_id)
            chosen = self._leading_leaves(owned[: -limit - 1 : -1])
            self._recorded -= len(self._records[record_id])
            rest = owned[: len(owned) - len(chosen)]
            if len(rest) and len(chosen) == limit:
                self._records[record_id] = rest
                self._recorded += len(rest)
            else:
                del self._records[record_id]
                if len(rest):
                    busy.append(rest)
        self._owner[chosen] = _NOBODY
        self._owned -= len(chosen)
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
        occupancy = self._occupancy
        held = occupancy.children[tail_first]
        held[1:] -= occupancy.parent[tail_first[:-1]] == tail_first[1:]
        held += occupancy.pins[tail_first]
        blocked = held.nonzero()[0]
        return tail_first[: blocked[0]] if len(blocked) else tail_first

    def _cover(self) -> None:
        size = len(self._occupancy.pins)
        if size > len(self._owner):
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
