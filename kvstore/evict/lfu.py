"""Least frequently used: the block goes first that the fewest requests have used, then the oldest."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.ghosts import Ghosts, names_of
from kvstore.evict.leaves import LOST, Leaves

_QUEUE = 1
_GHOSTS_A_BLOCK = 4


class LFU:
    """Counts of uses, without ageing. They are remembered for four times as many blocks as are resident."""

    def __init__(self, occupancy: Occupancy) -> None:
        self._leaves = Leaves(occupancy, queues=1)
        self._name: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}
        self._ghosts = Ghosts()
        self._now = 0

    def touch(self, touch: Touch) -> None:
        self._now += 1
        for depth, slot in enumerate(touch.slots.tolist()):
            # What was fetched for the request was counted when it was added.
            self._uses[slot] += depth < touch.hit_blocks
            self._leaves.put(slot, _QUEUE, (self._uses[slot], self._now, -depth))

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        del parent, time
        self._now += 1
        for depth, (slot, name) in enumerate(zip(slots.tolist(), names_of(hashes), strict=True)):
            self._name[slot] = name
            self._uses[slot] = 1 + self._ghosts.pop(name, 0)
            self._leaves.put(slot, _QUEUE, (self._uses[slot], self._now, -depth))

    def forget(self, slots: SlotArray) -> None:
        for slot in self._leaves.forget(slots):
            del self._name[slot], self._uses[slot]

    def orphan(self, slots: SlotArray) -> None:
        self._leaves.orphan(slots)

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        del wanted
        leaves = self._leaves
        leaves.begin()
        chosen: list[int] = []
        while len(chosen) < limit:
            slot = leaves.pop(LOST)
            if slot is None:
                slot = leaves.pop(_QUEUE)
            if slot is None:
                break
            chosen.append(slot)
            self._ghosts.put(self._name.pop(slot), self._uses.pop(slot))
        if chosen:  # to ask in vain forgets nothing: who has nothing left may ask, or not
            self._ghosts.trim(_GHOSTS_A_BLOCK * (len(leaves) + len(chosen)))
        return np.array(chosen, dtype=np.int64)
