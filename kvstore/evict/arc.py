"""ARC (Megiddo and Modha, FAST 2003): recency and frequency share the room, and ghosts say how."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.ghosts import Ghosts, names_of
from kvstore.evict.leaves import LOST, Leaves

_RECENT, _FREQUENT = 1, 2


class ARC:
    """Blocks used once, and blocks used again, each least recently used first.

    ``_target`` is how many of the first kind there should be: a block that comes back from among their
    ghosts raises it, one from the others' ghosts lowers it.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self._leaves = Leaves(occupancy, queues=2)
        self._name: dict[int, bytes] = {}
        self._ghosts = {_RECENT: Ghosts(), _FREQUENT: Ghosts()}
        self._target = 0.0
        self._room = 0
        self._now = 0

    def touch(self, touch: Touch) -> None:
        self._now += 1
        for depth, slot in enumerate(touch.slots.tolist()):
            queue = _FREQUENT if depth < touch.hit_blocks else self._leaves.place(slot).queue
            self._leaves.put(slot, queue, (self._now, -depth))

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        del parent, time
        self._now += 1
        self._room = max(self._room, len(self._leaves) + len(slots))
        for depth, (slot, name) in enumerate(zip(slots.tolist(), names_of(hashes), strict=True)):
            self._name[slot] = name
            self._leaves.put(slot, self._queue_for(name), (self._now, -depth))

    def forget(self, slots: SlotArray) -> None:
        for slot in self._leaves.forget(slots):
            del self._name[slot]

    def orphan(self, slots: SlotArray) -> None:
        self._leaves.orphan(slots)

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        del wanted
        self._leaves.begin()
        chosen: list[int] = []
        while len(chosen) < limit and (slot := self._next()) is not None:
            chosen.append(slot)
        if chosen:
            recent, frequent = self._ghosts[_RECENT], self._ghosts[_FREQUENT]
            recent.trim(self._room - self._leaves.sizes[_RECENT])
            frequent.trim(2 * self._room - len(self._leaves) - len(recent))
        return np.array(chosen, dtype=np.int64)

    def _queue_for(self, name: bytes) -> int:
        recent, frequent = self._ghosts[_RECENT], self._ghosts[_FREQUENT]
        if name in recent:
            step = max(1.0, len(frequent) / len(recent))
            self._target = min(float(self._room), self._target + step)
            recent.pop(name, 0)
            return _FREQUENT
        if name in frequent:
            step = max(1.0, len(recent) / len(frequent))
            self._target = max(0.0, self._target - step)
            frequent.pop(name, 0)
            return _FREQUENT
        return _RECENT

    def _next(self) -> int | None:
        slot = self._leaves.pop(LOST)
        if slot is not None:
            del self._name[slot]
            return slot
        first, second = _RECENT, _FREQUENT
        if self._leaves.sizes[_RECENT] <= self._target:
            first, second = second, first
        for queue in (first, second):
            slot = self._leaves.pop(queue)
            if slot is not None:
                self._ghosts[queue].put(self._name.pop(slot))
                return slot
        return None
