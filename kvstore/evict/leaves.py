"""Blocks in queues by key, of which only leaves are handed out: what policies of single blocks share."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvstore.block import SlotArray
from kvstore.evict.base import Occupancy

Key = tuple[float, ...]

LOST = 0
"""The queue of blocks that cannot be reached; it is always served first."""
_SLACK = 1024


class Place(NamedTuple):
    """Where a block waits: a queue, and the key by which it is ordered there, least first."""

    queue: int
    key: Key


class Leaves:
    """Queues of blocks. A block with resident children steps aside until the last of them has gone.

    O(log n) a block that is put or handed out. Entries that were overtaken by a later ``put`` stay
    in the heaps until they come up, or are more than those that count.
    """

    def __init__(self, occupancy: Occupancy, queues: int) -> None:
        self._occupancy = occupancy
        self._heaps: list[list[tuple[Key, int]]] = [[] for _ in range(queues + 1)]
        self.sizes = [0] * (queues + 1)
        """Blocks by queue."""
        self._place: dict[int, Place] = {}
        self._aside: set[int] = set()
        self._pinned: list[int] = []
        self._gone: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._place)

    def put(self, slot: int, queue: int, key: Key) -> None:
        """A block is in this queue from now on, and in no other."""
        before = self._place.get(slot)
        if before is not None:
            self.sizes[before.queue] -= 1
        self.sizes[queue] += 1
        self._place[slot] = Place(queue, key)
        self._aside.discard(slot)
        self._push(slot)

    def place(self, slot: int) -> Place:
        return self._place[slot]

    def begin(self) -> None:
        """The blocks that were handed out have been freed; pins may have changed."""
        self._gone.clear()
        for slot in self._pinned:
            if slot in self._place:
                self._push(slot)
        self._pinned.clear()

    def pop(self, queue: int) -> int | None:
        """Hand out the first block of a queue that is not pinned and a leaf once those before it are gone."""
        found = self.pop_with_place(queue)
        return None if found is None else found[0]

    def pop_with_place(self, queue: int) -> tuple[int, Place] | None:
        """``pop``, and where the block was."""
        occupancy, heap = self._occupancy, self._heaps[queue]
        while heap:
            key, slot = heappop(heap)
            if self._place.get(slot) != (queue, key) or slot in self._aside:
                continue
            if occupancy.pins[slot]:
                self._pinned.append(slot)
            elif occupancy.children[slot] > self._gone.get(slot, 0):
                self._aside.add(slot)
            else:
                self._remove(slot)
                self._leave(int(occupancy.parent[slot]))
                return slot, Place(queue, key)
        return None

    def put_back(self, slot: int, queue: int, key: Key) -> None:
        """A block that was just handed out stays after all."""
        parent = int(self._occupancy.parent[slot])
        if parent >= 0:
            self._gone[parent] -= 1
        self.put(slot, queue, key)

    def forget(self, slots: SlotArray) -> list[int]:
        """These leave some other way; those of them that were known."""
        known = [slot for slot in slots.tolist() if slot in self._place]
        for slot in known:
            self._remove(slot)
            self._aside.discard(slot)
        for slot in known:
            self._recall(int(self._occupancy.parent[slot]))
        return known

    def orphan(self, slots: SlotArray) -> None:
        """These, and what hangs from them, cannot be reached."""
        below: dict[int, list[int]] = {}
        for slot in self._place:
            below.setdefault(int(self._occupancy.parent[slot]), []).append(slot)
        lost = [slot for slot in slots.tolist() if slot in self._place]
        for slot in lost:
            lost.extend(below.get(slot, ()))
        for order, slot in enumerate(lost):
            self.put(slot, LOST, (-float(order),))

    def _remove(self, slot: int) -> None:
        self.sizes[self._place.pop(slot).queue] -= 1

    def _leave(self, parent: int) -> None:
        if parent >= 0:
            self._gone[parent] = self._gone.get(parent, 0) + 1
            self._recall(parent)

    def _recall(self, slot: int) -> None:
        if slot in self._aside:
            self._aside.discard(slot)
            self._push(slot)

    def _push(self, slot: int) -> None:
        queue, key = self._place[slot]
        heap = self._heaps[queue]
        heappush(heap, (key, slot))
        if len(heap) > 2 * self.sizes[queue] + _SLACK:
            # In place: pop may be at work on it.
            place, aside = self._place, self._aside
            heap[:] = {
                (key, each) for key, each in heap if place.get(each) == (queue, key) and each not in aside
            }
            heapify(heap)
