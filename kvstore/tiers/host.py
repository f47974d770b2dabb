"""The host tier: blocks in a shared-memory file that other processes can map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.block import SlotArray, TierName
from kvstore.evict.base import Evictor, Occupancy
from kvstore.pool import BlockPool
from kvstore.spec import NamespaceSpec
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import MemoryTier, Offsets
from kvstore.tiers.pool_file import PoolFile


class HostTier(MemoryTier):
    """Blocks in the pool file, reachable as numpy views without a copy."""

    def __init__(
        self,
        path: Path,
        *,
        pool_bytes: int,
        extent_bytes: int,
        make_evictor: Callable[[Occupancy], Evictor],
        clock: Callable[[], float],
    ) -> None:
        self.file = PoolFile(path, pool_bytes, extent_bytes, epoch=1)
        pool = BlockPool(self.file, make_evictor)
        super().__init__(TierName.HOST, pool, _MappedCopies(self.file), clock)

    def describe(self, spec: NamespaceSpec) -> None:
        """Record what a namespace is, so that the file can be read without this process."""
        self.file.describe(spec)

    def views(self, slots: SlotArray, size: int) -> list[Payload]:
        """The first ``size`` bytes of each slot, in place. Valid while pinned or staged."""
        data = self.file.data
        return [data[at : at + size] for at in self.pool.extents.offsets(slots).tolist()]

    def checksums(self, slots: SlotArray) -> list[int]:
        """xxh3_64 of each payload, as its writer gave it."""
        sums: list[int] = []
        for extent, _, rows in self.pool.extents.groups(slots):
            sums.extend(extent.table.checksum[rows].tolist())
        return sums

    def locate(self, slots: SlotArray) -> tuple[Payload, Offsets]:
        """(memory, byte offsets in it) of slots, for copies from and to another tier."""
        return self.file.data, self.pool.extents.offsets(slots)

    def close(self) -> None:
        """Unlock the pool file, which stays. Its memory goes with this tier, whose tables are in it."""
        self.file.close()


class _MappedCopies:
    def __init__(self, file: PoolFile) -> None:
        self._file = file

    def copy_out(self, offset: int, target: Payload) -> None:
        np.copyto(target, self._file.data[offset : offset + len(target)])

    def copy_in(self, offset: int, source: Payload) -> None:
        np.copyto(self._file.data[offset : offset + len(source)], source)
