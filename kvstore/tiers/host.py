"""The host tier: blocks in a shared-memory file that other processes can map."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.adopt import Adopted, adopt
from kvstore.block import SlotArray, TierName
from kvstore.evict.base import Evictor, Occupancy
from kvstore.failpoints import Failpoint, Step, no_failpoint
from kvstore.pool import BlockPool
from kvstore.spec import NamespaceSpec
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import MemoryTier, Offsets
from kvstore.tiers.pool_file import PoolFile
from kvstore.tiers.pool_format import DamagedError

_log = logging.getLogger(__name__)


class HostTier(MemoryTier):
    """Blocks in the pool file, reachable as numpy views without a copy.

    Those that a server which is gone left there are taken over, and not yet compared with their
    payloads' checksums; ``adopted`` says what there is to see to. The clock must be the machine's
    monotonic one for that: times in the file are compared with it.
    """

    def __init__(
        self,
        path: Path,
        *,
        pool_bytes: int,
        extent_bytes: int,
        make_evictor: Callable[[Occupancy], Evictor],
        clock: Callable[[], float],
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        self.file = PoolFile(path, pool_bytes, extent_bytes, failpoint)
        with contextlib.ExitStack() as undo:
            undo.callback(self.file.close)
            pool = BlockPool(self.file, make_evictor)
            super().__init__(TierName.HOST, pool, _MappedCopies(self.file), clock)
            self.adopted = self._adopt(failpoint)
            undo.pop_all()

    def client_alive(self, number: int) -> bool:
        """Whether the client of that number, or a child that it forked, can still write to the memory."""
        return self.file.client_alive(number)

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

    def _adopt(self, failpoint: Failpoint) -> Adopted:
        """Fill the pool with what the server before left, and log once what became of it."""
        path, inherited, refused = self.file.path, self.file.inherited, self.file.refused
        if inherited is None:
            if refused is None:
                return Adopted(reason="there was no pool file")
            level = logging.WARNING if isinstance(refused, DamagedError) else logging.INFO
            _log.log(level, "pool file %s is replaced by an empty one: %s", path, refused)
            return Adopted(reason=f"the pool file was replaced: {refused}")
        for extent, generation in inherited.generations.items():
            self.pool.extents.continue_from(extent, generation)
        adopted = adopt(self.pool, inherited.extents, inherited.names, self._clock(), failpoint)
        failpoint(Step.ADOPTION_DONE)
        level = logging.WARNING if adopted.damaged else logging.INFO
        _log.log(level, "pool file %s: %s", path, adopted.reason)
        return adopted


class _MappedCopies:
    def __init__(self, file: PoolFile) -> None:
        self._file = file

    def copy_out(self, offset: int, target: Payload) -> None:
        np.copyto(target, self._file.data[offset : offset + len(target)])

    def copy_in(self, offset: int, source: Payload) -> None:
        np.copyto(self._file.data[offset : offset + len(source)], source)

    def finish(self) -> None:
        """Copies are over when they return."""
