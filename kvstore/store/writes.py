"""Beginning writes, publishing computed blocks, and what happens to writers that go silent."""

from __future__ import annotations

import logging

import numpy as np

from kvstore.block import BlockRows, Chain, Residency, Shard, SlotArray, TierName
from kvstore.errors import WriteError
from kvstore.events import BlocksDropped, DropCause
from kvstore.hints import Hints
from kvstore.index import Space
from kvstore.store.demotion import Demotions
from kvstore.store.parts import Parts
from kvstore.store.policies import tell_hints
from kvstore.store.write import BlockStatus, Write
from kvstore.tiers.memory import payload_checksum

_log = logging.getLogger(__name__)
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
        self._open: dict[int, Write] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, chain: Chain, shard: Shard, first_block: int, writer: int) -> Write:
        """Stage slots for the blocks that nobody has or writes. Tails are refused when full."""
        if not chain.known_by_tokens:
            raise WriteError("a write must carry its token ids; make the chain with Chain.of")
        if not 0 <= first_block <= len(chain):
            raise WriteError(
                f"first_block is {first_block}, but the chain has {len(chain)} blocks; expected "
                f"0 … {len(chain)}"
            )
        host, clock = self._parts.tiers.host, self._parts.clock
        pool, space = host.pool, self._parts.space(host, chain.namespace, shard)
        prompt = chain.rows(shard)
        rows = prompt.slice(first_block, len(prompt))
        match = pool.match(prompt)
        status = list(map(_STATUS.__getitem__, pool.residency(rows)))
        if BlockStatus.PRESENT in status:
            self._refuse_collisions(rows, status, len(match.slots) - first_block)
        wanted = np.flatnonzero(np.fromiter(map(BlockStatus.YOURS.__eq__, status), np.bool_, len(status)))
        slots = pool.stage(space, len(wanted), rows.pick(wanted), writer=writer, selective=True)
        for at in wanted[len(slots) :].tolist():
            status[at] = BlockStatus.REFUSED
        if len(slots) < len(wanted):
            self._drop(rows, len(wanted) - len(slots), DropCause.FULL)
        write = Write(
            host=host,
            space=space,
            prompt=prompt,
            rows=rows,
            status=status,
            positions=wanted[: len(slots)],
            slots=slots,
            deadline=clock() + self._parts.options.write_seconds,
            clock=clock,
            over=self._over,
            writer=writer,
        )
        self._open[id(write)] = write
        return write

    def reserve(self, namespace: bytes, shard: Shard, count: int) -> SlotArray:
        """Unnamed staged slots in the fastest tier."""
        tier = self._parts.tiers.memory[0]
        return tier.pool.stage(self._parts.space(tier, namespace, shard), count)

    def publish(self, rows: BlockRows, slots: SlotArray) -> SlotArray:
        """Commit computed blocks in the fastest tier; the slots that became visible."""
        if rows.tokens is None or rows.fingerprints is None or len(rows) != len(slots):
            raise WriteError(
                f"{len(rows)} identities for {len(slots)} slots to publish; give one a slot, with its tokens"
            )
        tier, host = self._parts.tiers.memory[0], self._parts.tiers.host
        space = self._parts.space(tier, rows.namespace, rows.shard)
        # The host's checksums go to redis as they are; device memory is summed when it is copied down.
        views = host.views(slots, space.payload_bytes) if tier is host else None
        sums = None if views is None else [payload_checksum(view) for view in views]
        fresh = np.flatnonzero(tier.pool.commit(slots, rows, sums, time=self._parts.clock()))
        if len(fresh):
            self._stored(tier.name, rows.pick(fresh), slots[fresh], space)
        return slots[fresh]

    def expire(self) -> None:
        """Quarantine the slots of writers whose deadline has passed."""
        now = self._parts.clock()
        for write in self._open.values():
            if now > write.deadline and not write.quarantined:
                write.expire()
                if write.writer and len(write.slots):
                    _log.warning(
                        "client %d is late with a write of %d blocks: their slots stay quarantined until it "
                        "says that it has stopped, or ends",
                        write.writer,
                        len(write.slots),
                    )
                self._drop(write.rows, len(write.slots), DropCause.DEADLINE)

    def _over(self, write: Write, rows: BlockRows | None, hints: Hints | None) -> None:
        del self._open[id(write)]
        if rows is not None and len(rows):
            self._stored(TierName.HOST, rows, write.slots, write.space)
        if hints is not None:
            tell_hints(self._parts, write.prompt, hints)

    def _stored(self, tier: TierName, rows: BlockRows, slots: SlotArray, space: Space) -> None:
        self._parts.report_stored(tier, rows, space.payload_bytes)
        self._demotions.offer(tier, rows, slots, space.payload_bytes)

    def _refuse_collisions(self, rows: BlockRows, status: list[BlockStatus], resident: int) -> None:
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
