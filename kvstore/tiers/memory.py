"""What the tiers that hold blocks in memory share: a pool for the metadata, and copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.block import BlockRows, MissCause, Residency, SlotArray, TierName
from kvstore.errors import NamespaceError, PoolError
from kvstore.events import RemovalCause
from kvstore.index import Space
from kvstore.pool import BlockPool
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierMatch, TierStatus

Offsets = NDArray[np.int64]


class CopyEngine(Protocol):
    """Moves bytes between a tier's own memory and host-visible memory, both by byte offset.

    Copies that were begun are over when ``finish`` returns, in the order in which they were asked.
    """

    def copy_out(self, offset: int, target: Payload) -> None:
        """Begin to fill ``target`` from the tier's bytes at ``offset``."""

    def copy_in(self, offset: int, source: Payload) -> None:
        """Begin to write ``source`` to the tier's bytes at ``offset``."""

    def finish(self) -> None:
        """Wait for the copies that were begun, and for nothing else."""


def payload_checksum(payload: Payload) -> int:
    """xxh3_64 of a payload, as kept in tables and in Redis values."""
    return xxhash.xxh3_64_intdigest(payload.data)


def copy_runs(ours: Offsets, theirs: Offsets, size: int) -> Iterator[tuple[int, int, int]]:
    """(our offset, their offset, bytes) of the fewest copies: neighbours on both sides are one."""
    if not len(ours):
        return
    apart = (np.diff(ours) != size) | (np.diff(theirs) != size)
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    stops = np.concatenate((starts[1:], [len(ours)]))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        yield int(ours[start]), int(theirs[start]), (stop - start) * size


class MemoryTier(ABC):
    """A tier whose pool and bytes are in this process's reach. One owner, no locks."""

    def __init__(
        self, name: TierName, pool: BlockPool, copies: CopyEngine, clock: Callable[[], float]
    ) -> None:
        self.pool = pool
        self._name = name
        self._copies = copies
        self._clock = clock

    @property
    def name(self) -> TierName:
        return self._name

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        del deadline
        match = self.pool.match(rows)
        return TierMatch(len(match.slots), match.cause)

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        del deadline
        result = LoadResult()
        for block, target in enumerate(destinations):
            cause, checksum = self._load_one(rows.slice(block, block + 1), target)
            result.causes.append(cause)
            result.checksums.append(checksum)
        return result

    def save(
        self,
        rows: BlockRows,
        payloads: Sequence[Payload],
        checksums: Sequence[int],
        deadline: float,
    ) -> list[SaveOutcome]:
        del deadline
        space = self._space_for(rows, payloads)
        if space is None:
            return [SaveOutcome.REFUSED] * len(rows)
        outcomes = self._known(rows)
        wanted = np.flatnonzero([outcome is SaveOutcome.FULL for outcome in outcomes])
        slots = self.pool.stage(space, len(wanted), rows.pick(wanted))
        wanted = wanted[: len(slots)]
        for at, slot in zip(wanted.tolist(), slots.tolist(), strict=True):
            self.write_slot(slot, payloads[at])
            outcomes[at] = SaveOutcome.STORED
        sums = [checksums[at] for at in wanted.tolist()]
        self.pool.commit(slots, rows.pick(wanted), sums, time=self._clock())
        return outcomes

    def discard(self, rows: BlockRows, deadline: float) -> int:
        del deadline
        found = [self.pool.match(rows.slice(block, block + 1)).slots for block in range(len(rows))]
        return self.pool.discard(np.unique(np.concatenate(found)), RemovalCause.CLEARED) if found else 0

    def status(self) -> TierStatus:
        return TierStatus(healthy=True)

    @abstractmethod
    def close(self) -> None: ...

    def read_slot(self, slot: int, target: Payload) -> None:
        """Copy the payload in a slot out."""
        self._copies.copy_out(int(self.pool.extents.offsets(np.array([slot]))[0]), target)
        self._copies.finish()

    def write_slot(self, slot: int, source: Payload) -> None:
        """Copy a payload into a staged slot."""
        self._copies.copy_in(int(self.pool.extents.offsets(np.array([slot]))[0]), source)
        self._copies.finish()

    def read_slots(self, slots: SlotArray, size: int, memory: Payload, offsets: Offsets) -> None:
        """Copy ``size`` bytes of each slot to ``memory`` at ``offsets``, in as few copies as fit."""
        for ours, theirs, length in copy_runs(self.pool.extents.offsets(slots), offsets, size):
            self._copies.copy_out(ours, memory[theirs : theirs + length])
        self._copies.finish()

    def write_slots(self, slots: SlotArray, size: int, memory: Payload, offsets: Offsets) -> None:
        """Copy ``size`` bytes from ``memory`` at ``offsets`` into each staged slot."""
        for ours, theirs, length in copy_runs(self.pool.extents.offsets(slots), offsets, size):
            self._copies.copy_in(ours, memory[theirs : theirs + length])
        self._copies.finish()

    def _load_one(self, row: BlockRows, target: Payload) -> tuple[MissCause | None, int]:
        match = self.pool.match(row)
        space = self.pool.space(row.namespace, row.shard)
        if space is None or not len(match.slots):
            return match.cause or MissCause.UNKNOWN, 0
        if target.nbytes != space.payload_bytes:
            return MissCause.COLLISION, 0
        slot = int(match.slots[0])
        self.read_slot(slot, target)
        checksum = payload_checksum(target)
        extent = self.pool.extents.containing(slot)
        stored = int(extent.table.checksum[slot - extent.base])
        if stored and stored != checksum:
            self.pool.discard(match.slots, RemovalCause.CORRUPT)
            return MissCause.CORRUPT, 0
        return None, checksum

    def _known(self, rows: BlockRows) -> list[SaveOutcome]:
        """What becomes of each block that gets no slot: another block of that hash stays."""
        outcomes: list[SaveOutcome] = []
        for block, residency in enumerate(self.pool.residency(rows)):
            if residency is Residency.MISS:
                outcomes.append(SaveOutcome.FULL)
            elif residency is Residency.PENDING or len(self.pool.match(rows.slice(block, block + 1)).slots):
                outcomes.append(SaveOutcome.PRESENT)
            else:
                outcomes.append(SaveOutcome.REFUSED)
        return outcomes

    def _space_for(self, rows: BlockRows, payloads: Sequence[Payload]) -> Space | None:
        """Where blocks of this kind go; None where they fit no slot, or are not what is there."""
        if rows.tokens is None or len({payload.nbytes for payload in payloads}) != 1:
            return None
        size, block_size = payloads[0].nbytes, rows.tokens.shape[1]
        try:
            return self.pool.open_space(rows.namespace, rows.shard, size, block_size)
        except (NamespaceError, PoolError):
            return None
