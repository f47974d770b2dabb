"""One cache under one policy, asked for requests of a workload."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES
from kvstore.errors import ConfigError
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.simulate.workload import NO_PARENT, Workload

MakeEvictor = Callable[[Occupancy], Evictor]


class Instance:
    """One cache of ``blocks`` blocks, asked for one request of a workload after another.

    It does to a policy what a pool does, step by step (``kvstore/pool.py``), for blocks of one size
    that are written at once and let the policy refuse them. A block's number stands for its slot.
    """

    def __init__(self, make_evictor: MakeEvictor, workload: Workload, blocks: int) -> None:
        if blocks < 1:
            raise ConfigError(f"capacity is {blocks} blocks, expected at least 1; raise it")
        size = workload.distinct_blocks
        self._workload = workload
        self._occupancy = Occupancy(
            children=np.zeros(size, dtype=np.int32),
            # A number stands for a whole prefix, so what a block hangs from never changes.
            parent=workload.parents,
            pins=np.zeros(size, dtype=np.int32),
        )
        # As wide as indexes are, so that to use them as such converts nothing.
        self._parents = workload.parents.astype(np.int64)
        # The last entry is never resident: index -1 means no parent.
        self._resident = np.zeros(size + 1, dtype=np.bool_)
        self._free = blocks
        self._evictor = make_evictor(self._occupancy)

    @property
    def resident(self) -> NDArray[np.int64]:
        """The blocks that are here now, in the order of their numbers."""
        return np.flatnonzero(self._resident)

    def resident_run(self, number: int) -> int:
        """How many leading blocks of a request are here now."""
        found: bytes = self._resident[self._workload.blocks[number]].tobytes()
        run = found.find(0)
        return len(found) if run < 0 else run

    def serve(self, number: int) -> int:
        """Hit blocks of a request, whose blocks are kept from then on.

        Of a prompt longer than the cache, the head is kept.
        """
        request, ids = self._workload.requests[number], self._workload.blocks[number]
        hits = self.resident_run(number)
        hashes = request.chain.hashes
        self._evictor.touch(Touch(hashes, ids[:hits], hits, request.time, request.hints))
        if hits < len(ids):
            self._bring(ids, hits, hashes, request.time)
        return hits

    def _bring(self, ids: NDArray[np.int64], hits: int, hashes: bytes, time: float) -> None:
        fresh, hashes = ids[hits:], hashes[hits * HASH_BYTES :]
        parent = int(ids[hits - 1]) if hits else NO_PARENT
        if self._free < len(fresh):
            self._make_room(len(fresh), hashes, parent)
            if self._free < len(fresh):
                fresh, hashes = fresh[: self._free], hashes[: self._free * HASH_BYTES]
                if not hashes:
                    return
        self._free -= len(fresh)
        self._resident[fresh] = True
        children = self._occupancy.children
        children[fresh] = 1
        children[fresh[-1]] = 0
        if hits:
            children[parent] += 1
        self._evictor.add(fresh, hashes, parent, time)

    def _make_room(self, count: int, hashes: bytes, parent: int) -> None:
        """Free slots until there are ``count``, or the policy gives no more."""
        pins, children, resident = self._occupancy.pins, self._occupancy.children, self._resident
        if parent != NO_PARENT:
            pins[parent] = 1
        while self._free < count and len(victims := self._evictor.victims(count - self._free, hashes)):
            resident[victims] = False
            parents = self._parents[victims]
            # What goes with its children needs no count.
            for left in parents[resident[parents]].tolist():
                children[left] -= 1
            self._free += len(victims)
        if parent != NO_PARENT:
            pins[parent] = 0
