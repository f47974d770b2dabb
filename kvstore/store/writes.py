"""Beginning writes, publishing computed blocks, and what happens to writers that go silent."""

from __future__ import annotations

import numpy as np

from kvstore.block import BlockRows, Chain, Residency, Shard, SlotArray, TierName
from kvstore.errors import NamespaceError, WriteError
from kvstore.events import BlocksDropped, BlocksStored, DropCause
from kvstore.index import Space
from kvstore.store.demotion import Demotions
from kvstore.store.parts import Parts
from kvstore.store.write import BlockStatus, Write

_STATUS = {
    Residency.READY: BlockStatus.PRESENT,
    Residency.PENDING: BlockStatus.PENDING,
    Residency.MISS: BlockStatus.YOURS,
}


class Writes:
    """Every write of one store that is under way."""

    def __init__(self, parts: Parts, demotions: Demotions) -> None:
        self._parts = parts
        self._demotions = demotions
        self._open: list[Write] = []

    def begin(self, chain: Chain, shard: Shard, first_block: int) -> Write:
        """Stage slots for the blocks that nobody has or writes. Tails are refused when full."""
        if chain.tokens is None or chain.fingerprints is None:
            raise WriteError("a write must carry its token ids; make the chain with Chain.of")
        if not 0 <= first_block <= len(chain):
            raise WriteError(
                f"first_block is {first_block}, but the chain has {len(chain)} blocks; expected "
                f"0 … {len(chain)}"
            )
        pool, clock = self._parts.tiers.host.pool, self._parts.clock
        space = self._space(pool.space(chain.namespace, shard), chain.namespace, shard)
        rows = chain.rows(shard, first_block)
        match = pool.match(chain.rows(shard))
        status = [_STATUS[residency] for residency in pool.residency(rows)]
        self._refuse_collisions(rows, status, len(match.slots) - first_block)
        wanted = np.array(
            [at for at, is_ in enumerate(status) if is_ is BlockStatus.YOURS], dtype=np.int64
        )
        # What the new blocks hang from must not be evicted to make room for them.
        pool.pin(match.slots, clock())
        slots = pool.stage(space, len(wanted), rows.pick(wanted))
        pool.unpin(match.slots)
        for at in wanted[len(slots) :].tolist():
            status[at] = BlockStatus.REFUSED
        if len(slots) < len(wanted):
            self._drop(rows, len(wanted) - len(slots), DropCause.FULL)
        write = Write(
            host=self._parts.tiers.host,
            space=space,
            ahead=match.slots[: first_block + int(wanted[0])] if len(slots) else match.slots,
            rows=rows,
            status=status,
            positions=wanted[: len(slots)],
            slots=slots,
            deadline=clock() + self._parts.options.write_seconds,
            clock=clock,
            committed=self._committed,
        )
        self._open.append(write)
        return write

    def reserve(self, namespace: bytes, shard: Shard, count: int) -> SlotArray:
        """Unnamed staged slots in the fastest tier."""
        pool = self._parts.tiers.memory[0].pool
        return pool.stage(self._space(pool.space(namespace, shard), namespace, shard), count)

    def publish(self, rows: BlockRows, slots: SlotArray, ahead: SlotArray) -> SlotArray:
        """Commit computed blocks in the fastest tier; the slots that became visible."""
        tier = self._parts.tiers.memory[0]
        space = self._space(tier.pool.space(rows.namespace, rows.shard), rows.namespace, rows.shard)
        now = self._parts.clock()
        fresh = np.flatnonzero(tier.pool.commit(slots, rows, None, ahead=ahead, time=now))
        if len(fresh):
            self._stored(tier.name, rows.pick(fresh), slots[fresh], space)
        return slots[fresh]

    def expire(self) -> None:
        """Quarantine the slots of writers whose deadline has passed; forget finished writes."""
        now = self._parts.clock()
        still_open: list[Write] = []
        for write in self._open:
            if not write.open:
                continue
            still_open.append(write)
            if now > write.deadline and not write.quarantined:
                write.expire()
                self._drop(write.rows, len(write.slots), DropCause.DEADLINE)
        self._open = still_open

    def _committed(self, write: Write, rows: BlockRows, slots: SlotArray) -> None:
        self._stored(TierName.HOST, rows, slots, write.space)

    def _stored(self, tier: TierName, rows: BlockRows, slots: SlotArray, space: Space) -> None:
        now = self._parts.clock()
        self._parts.bus.emit(
            BlocksStored(now, tier, rows.namespace, rows.shard, rows.hashes, space.payload_bytes)
        )
        self._demotions.offer(tier, rows, slots, space.payload_bytes)

    def _refuse_collisions(
        self, rows: BlockRows, status: list[BlockStatus], resident: int
    ) -> None:
        """Refuse what hangs below a resident block that is not what its hash says here.

        Past the verified leading run a block may be resident after a gap: then its own tokens
        and its fingerprint decide whether it is this prompt's.
        """
        pool = self._parts.tiers.host.pool
        for at in range(max(0, resident), len(status)):
            if status[at] is BlockStatus.PRESENT and not len(pool.match(rows.slice(at, at + 1)).slots):
                refused = len(status) - at
                status[at:] = [BlockStatus.REFUSED] * refused
                self._drop(rows, refused, DropCause.COLLISION)
                return

    def _drop(self, rows: BlockRows, blocks: int, cause: DropCause) -> None:
        now = self._parts.clock()
        self._parts.bus.emit(BlocksDropped(now, TierName.HOST, rows.namespace, blocks, cause))

    @staticmethod
    def _space(space: Space | None, namespace: bytes, shard: Shard) -> Space:
        if space is None:
            raise NamespaceError(
                f"namespace {namespace.hex()} has no shard {shard} here; register it with that shard"
            )
        return space
