"""S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main one with second chances, ghosts."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.ghosts import Ghosts, names_of
from kvstore.evict.leaves import LOST, Leaves

_SMALL, _MAIN = 1, 2
_SMALL_SHARE = 0.1
_USES_MOST = 3
_PROVEN = 1


class S3FIFO:
    """New blocks pass a tenth of the room; those used more than once meanwhile get into the rest of it.

    Of blocks that come at once the last comes first, so that tails do not outlive heads.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self._leaves = Leaves(occupancy, queues=2)
        self._name: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}
        self._ghosts = Ghosts()
        self._turn = 0

    def touch(self, touch: Touch) -> None:
        uses = self._uses
        for slot in touch.slots[: touch.hit_blocks].tolist():
            uses[slot] = min(_USES_MOST, uses[slot] + 1)

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        del parent, time
        names = names_of(hashes)
        for slot, name in zip(slots[::-1].tolist(), reversed(names), strict=True):
            self._name[slot] = name
            self._uses[slot] = 0
            self._enter(slot, _SMALL if self._ghosts.pop(name, -1) < 0 else _MAIN)

    def forget(self, slots: SlotArray) -> None:
        for slot in self._leaves.forget(slots):
            del self._name[slot], self._uses[slot]

    def orphan(self, slots: SlotArray) -> None:
        self._leaves.orphan(slots)

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        del wanted
        self._leaves.begin()
        chosen: list[int] = []
        while len(chosen) < limit and (slot := self._next()) is not None:
            chosen.append(slot)
            del self._name[slot], self._uses[slot]
        if chosen:
            self._ghosts.trim(self._leaves.sizes[_MAIN])
        return np.array(chosen, dtype=np.int64)

    def _next(self) -> int | None:
        slot = self._leaves.pop(LOST)
        if slot is not None:
            return slot
        small, main = self._leaves.sizes[_SMALL], self._leaves.sizes[_MAIN]
        if small >= _SMALL_SHARE * (small + main):
            slot = self._from_small()
            return self._from_main() if slot is None else slot
        slot = self._from_main()
        return self._from_small() if slot is None else slot

    def _from_small(self) -> int | None:
        while (slot := self._leaves.pop(_SMALL)) is not None:
            if self._uses[slot] <= _PROVEN:
                self._ghosts.put(self._name[slot])
                return slot
            self._uses[slot] = 0
            self._stay(slot)
        return None

    def _from_main(self) -> int | None:
        while (slot := self._leaves.pop(_MAIN)) is not None:
            if not self._uses[slot]:
                return slot
            self._uses[slot] -= 1
            self._stay(slot)
        return None

    def _stay(self, slot: int) -> None:
        self._turn += 1
        self._leaves.put_back(slot, _MAIN, (self._turn,))

    def _enter(self, slot: int, queue: int) -> None:
        self._turn += 1
        self._leaves.put(slot, queue, (self._turn,))
