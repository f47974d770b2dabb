"""Belady's choice over leaves, for replay only: the block goes first that is asked for last, or never."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.leaves import LOST, Leaves

_QUEUE = 1


class Oracle:
    """Knows the future: for each request to come, and each of its blocks, which request asks for it next.

    Requests come in the order of ``future``, and each brings what it lacks before the next one comes.
    What is asked for later than all that is kept is not taken in, where the caller lets it choose.
    """

    def __init__(self, occupancy: Occupancy, future: Sequence[NDArray[np.int64]]) -> None:
        self._leaves = Leaves(occupancy, queues=1)
        self._future = iter(future)
        self._uses: list[int] = []
        self._brought = 0
        self._planned = 0

    def touch(self, touch: Touch) -> None:
        self._uses = next(self._future).tolist()
        self._planned = len(touch.hashes) // HASH_BYTES
        self._brought = len(touch.slots)
        self._queue(touch.slots, 0)

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        del hashes, parent, time
        self._queue(slots, self._brought)
        self._brought += len(slots)

    def forget(self, slots: SlotArray) -> None:
        self._leaves.forget(slots)

    def orphan(self, slots: SlotArray) -> None:
        self._leaves.orphan(slots)

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        leaves = self._leaves
        leaves.begin()
        chosen: list[int] = []
        most = limit - (len(self._uses) - self._planned if wanted else 0)
        while len(chosen) < most:
            lost = leaves.pop(LOST)
            if lost is not None:
                chosen.append(lost)
                continue
            found = leaves.pop_with_place(_QUEUE)
            if found is None:
                break
            slot, place = found
            while wanted and len(chosen) < most and -self._uses[self._planned - 1] <= place.key[0]:
                self._planned -= 1
                most -= 1
            if len(chosen) < most:
                chosen.append(slot)
            else:
                leaves.put_back(slot, *place)
        return np.array(chosen, dtype=np.int64)

    def _queue(self, slots: SlotArray, first: int) -> None:
        for depth, slot in enumerate(slots.tolist(), start=first):
            self._leaves.put(slot, _QUEUE, (-self._uses[depth], -depth))


def next_uses(prompts: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """For each request, and each of its blocks, the number of the request that asks for it next.

    ``len(prompts)`` where none does. Blocks are named by numbers that stand for whole prefixes.
    """
    never = len(prompts)
    following = np.full(max((int(ids.max()) for ids in prompts if len(ids)), default=-1) + 1, never)
    future = []
    for number in range(never - 1, -1, -1):
        ids = prompts[number]
        future.append(following[ids])
        following[ids] = number
    return future[::-1]
