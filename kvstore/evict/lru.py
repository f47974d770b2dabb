"""Least recently used, by whole requests: the oldest request's blocks go first, tail before head."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.order import leading_leaves, owned_runs, runs_below

_NOBODY = 0
_NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)


class LRU:
    """Recency by request.

    A request takes ownership of every block it touches, so an older request keeps only the end that
    nobody has used since, and the order of (oldest request, tail first) equals a per-block LRU list
    in which a request's tail is touched first. Everything is done on arrays: some nanoseconds and
    16 bytes a block.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._owner = np.zeros(0, dtype=np.int64)
        self._records: OrderedDict[int, SlotArray] = OrderedDict()
        self._next = 1
        self._first = -1

    def touch(self, touch: Touch) -> None:
        slots = touch.slots
        if not len(slots):
            return
        for owner, start, stop in owned_runs(self._owner, slots):
            # What a request used of another's blocks are those that the other had first.
            self._shorten(owner, self._records[owner][stop - start :])
        self._append(slots)

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        del hashes, time
        if len(self._owner) < len(self._occupancy.pins):
            self._cover()
        owner = int(self._owner[parent]) if parent >= 0 else _NOBODY
        if owner == _NOBODY or self._records[owner][-1] != parent:
            self._append(slots)
            return
        # The request goes on: its blocks stay together, and all of them were used just now.
        self._owner[slots] = owner
        self._records[owner] = np.concatenate((self._records[owner], slots))
        self._records.move_to_end(owner)

    def forget(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        self._part(known)

    def orphan(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        # Each goes to the front, so the last of them comes first.
        for unreachable in reversed(runs_below(self._occupancy.parent, known[self._owner[known] != _NOBODY])):
            self._part(unreachable)
            self._owner[unreachable] = self._first
            self._records[self._first] = unreachable
            self._records.move_to_end(self._first, last=False)
            self._first -= 1

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        del wanted
        records = self._records
        parts: list[SlotArray] = []
        for _ in range(len(records)):
            number, record = records.popitem(last=False)
            leaves = leading_leaves(self._occupancy, record[: -limit - 1 : -1])
            size = len(leaves)
            if size < len(record):
                records[number] = record[: len(record) - size]
                # What blocks the rest may be a child that was chosen just now. Else it is pinned, in use now:
                # setting it aside also keeps the next call short.
                if size == limit or parts:
                    records.move_to_end(number, last=False)
                    limit = size  # and no more this time
            if size:
                parts.append(leaves)
            limit -= size
            if not limit:
                break
        chosen = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else _NO_SLOTS
        self._owner[chosen] = _NOBODY
        return chosen

    def _append(self, slots: SlotArray) -> None:
        self._owner[slots] = self._next
        self._records[self._next] = slots
        self._next += 1

    def _shorten(self, owner: int, rest: SlotArray) -> None:
        if len(rest):
            # A copy, as what is left of a long prompt may be short.
            self._records[owner] = rest.copy()
        else:
            del self._records[owner]

    def _part(self, slots: SlotArray) -> None:
        """These belong to nobody from now on, wherever in a record they were."""
        owners = set(self._owner[slots].tolist()) - {_NOBODY}
        self._owner[slots] = _NOBODY
        for owner in owners:
            record = self._records[owner]
            self._shorten(owner, record[self._owner[record] == owner])

    def _cover(self) -> None:
        grown = np.zeros(len(self._occupancy.pins), dtype=np.int64)
        grown[: len(self._owner)] = self._owner
        self._owner = grown
