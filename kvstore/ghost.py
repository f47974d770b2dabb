"""Ghosts of a pool: what it would hold at another size, without bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, SlotArray
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.evict.expiry import Expiry, FlatAges
from kvstore.evict.order import runs_by_use
from kvstore.hints import Hints
from kvstore.index import NO_PARENT, distinct_head, split_hashes

MakeEvictor = Callable[[Occupancy], Evictor]


class Names:
    """Numbers for the blocks that any ghost holds, which stand for slots; reused when none does."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._free: list[int] = []
        self.left: list[SlotArray] = []
        """What ghosts have evicted since the last ``recycle``."""
        self.holders = np.zeros(0, dtype=np.int8)
        self.sizes = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, words: NDArray[np.uint64], block_bytes: int) -> SlotArray:
        """A number for each name before one that comes again, new ones where there is none yet.

        A block keeps its size as long as a ghost holds it, whatever another namespace says of that name.
        """
        names = distinct_head(split_hashes(words.tobytes()))
        ids = np.array([self._number(name) for name in names], dtype=np.int64)
        if len(self._names) > len(self.sizes):
            grown = max(64, 2 * len(self._names))
            self.sizes = _grown(self.sizes, grown)
            self.holders = _grown(self.holders, grown)
        self.sizes[ids[self.holders[ids] == 0]] = block_bytes
        return ids

    def hashes(self, ids: SlotArray) -> bytes:
        """The names of these blocks, packed."""
        return b"".join(map(self._names.__getitem__, ids.tolist()))

    def recycle(self, ids: SlotArray) -> None:
        """Forget those of these blocks, and of those that ghosts have evicted, that no ghost holds."""
        seen = np.concatenate((ids, *self.left))
        self.left.clear()
        for number in seen[self.holders[seen] == 0].tolist():
            name = self._names[number]
            if self._numbers.get(name) == number:
                del self._numbers[name]
                self._free.append(number)

    def _number(self, name: bytes) -> int:
        known = self._numbers.get(name)
        if known is None:
            if self._free:
                known = self._free.pop()
                self._names[known] = name
            else:
                known = len(self._names)
                self._names.append(name)
            self._numbers[name] = known
        return known


class TakenOver:
    """Blocks of the sample that were there before the first request, by number."""

    def __init__(self) -> None:
        self.ids: SlotArray = np.zeros(0, dtype=np.int64)
        self.parents: SlotArray = self.ids
        self.used_at = np.zeros(0)

    def add(self, ids: SlotArray, parents: SlotArray, used_at: NDArray[np.float64]) -> None:
        """Those of one namespace; ``parents`` are places among them, -1 where there is none.

        A name that another namespace has too, which takes a client that makes up names, is of the first:
        so that no block can hang from itself over others.
        """
        fresh = ~np.isin(ids, self.ids)
        hangs = (parents != NO_PARENT) & fresh[parents]
        self.ids = np.concatenate((self.ids, ids[fresh]))
        self.parents = np.concatenate((self.parents, np.where(hangs, ids[parents], NO_PARENT)[fresh]))
        self.used_at = np.concatenate((self.used_at, used_at[fresh]))


class Ghost:
    """A pool of one size without bytes: it does to a policy what a pool does (``kvstore/pool.py``)."""

    def __init__(
        self, make_evictor: MakeEvictor, capacity_bytes: int, names: Names, idle_ttl_seconds: float | None
    ) -> None:
        self._names = names
        self._free = capacity_bytes
        self._ages = FlatAges(np.zeros(0, dtype=np.bool_), np.zeros(0))
        none = np.zeros(0, dtype=np.int32)
        self._occupancy = Occupancy(children=none, parent=none.copy(), pins=none.copy())
        self._evictor = make_evictor(self._occupancy)
        self._expiry: Expiry | None = None
        if idle_ttl_seconds is not None:
            self._expiry = Expiry(idle_ttl_seconds, self._occupancy, self._ages)

    def cover(self, size: int) -> None:
        """Know numbers below ``size``."""
        known, ages, occupancy = self._ages.slots, self._ages, self._occupancy
        if size > known:
            ages.resident = _grown(ages.resident, size)
            ages.used_at = _grown(ages.used_at, size)
            occupancy.children = _grown(occupancy.children, size)
            occupancy.pins = _grown(occupancy.pins, size)
            occupancy.parent = _grown(occupancy.parent, size)
            occupancy.parent[known:] = NO_PARENT

    def serve(self, ids: SlotArray, hashes: bytes, time: float, hints: Hints) -> int:
        """Leading blocks of a request that are here; all of it is from then on, as far as it fits."""
        while self._expiry and self._expiry.behind(time):
            gone = self._expiry.due(time)
            self._evictor.forget(gone)
            self._remove(gone)
        resident = self._ages.resident[ids]
        # Names that a client makes up may lead to a block that hangs from another one: it is no hit, and
        # nothing is kept behind it.
        above = np.concatenate(([NO_PARENT], ids[:-1]))
        hits = _leading(resident & (self._occupancy.parent[ids] == above))
        self._evictor.touch(Touch(hashes, ids[:hits], hits, time, hints))
        self._ages.used_at[ids] = time
        if absent := _leading(~resident[hits:]):
            parent = int(ids[hits - 1]) if hits else NO_PARENT
            self._bring(ids[hits : hits + absent], hashes[hits * HASH_BYTES :], parent, time)
        return hits

    def take_over(self, taken: TakenOver) -> None:
        """Begin with these blocks, in the order of their use, as far as they fit."""
        occupancy, names, ids = self._occupancy, self._names, taken.ids
        self._free -= int(names.sizes[ids].sum())
        self._ages.resident[ids] = True
        self._ages.used_at[ids] = taken.used_at
        names.holders[ids] += 1
        occupancy.parent[ids] = taken.parents
        np.add.at(occupancy.children, taken.parents[taken.parents != NO_PARENT], 1)
        nothing_lost = np.zeros(len(ids), dtype=np.bool_)
        for time, run in runs_by_use(ids, taken.parents, taken.used_at, nothing_lost):
            self._evictor.add(run, names.hashes(run), NO_PARENT, time)
        largest = int(names.sizes[ids].max(initial=1))
        while self._free < 0 and len(victims := self._evictor.victims(-(self._free // largest))):
            self._remove(victims)

    def _bring(self, missing: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        occupancy, sizes = self._occupancy, self._names.sizes[missing].cumsum()
        if self._free < sizes[-1]:
            self._make_room(int(sizes[-1]), int(sizes[0]), hashes, parent)
        fresh = missing[: sizes.searchsorted(self._free, side="right")]
        if not len(fresh):
            return
        self._free -= int(sizes[len(fresh) - 1])
        self._ages.resident[fresh] = True
        self._names.holders[fresh] += 1
        occupancy.parent[fresh[0]] = parent
        occupancy.parent[fresh[1:]] = fresh[:-1]
        occupancy.children[fresh[:-1]] = 1
        if parent != NO_PARENT:
            occupancy.children[parent] += 1
        self._evictor.add(fresh, hashes[: len(fresh) * HASH_BYTES], parent, time)

    def _make_room(self, wanted: int, size: int, hashes: bytes, parent: int) -> None:
        """Free ``wanted`` bytes, or as many as the policy gives for these blocks."""
        occupancy = self._occupancy
        if parent != NO_PARENT:
            occupancy.pins[parent] += 1
        while self._free < wanted:
            victims = self._evictor.victims(-(-(wanted - self._free) // size), hashes)
            if not len(victims):
                break
            self._remove(victims)
        if parent != NO_PARENT:
            occupancy.pins[parent] -= 1

    def _remove(self, leaving: SlotArray) -> None:
        occupancy, names = self._occupancy, self._names
        self._ages.resident[leaving] = False
        names.holders[leaving] -= 1
        # A parent may lose several children at once.
        parents = occupancy.parent[leaving]
        np.subtract.at(occupancy.children, parents[parents != NO_PARENT], 1)
        occupancy.parent[leaving] = NO_PARENT
        self._free += int(names.sizes[leaving].sum())
        names.left.append(leaving)


def _leading(flags: NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(flags.argmin())


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _grown(column: NDArray[_Scalar], size: int) -> NDArray[_Scalar]:
    longer = np.zeros(size, dtype=column.dtype)
    longer[: len(column)] = column
    return longer
