"""Copies of blocks going down a tier, behind the requests that made or used them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from kvstore.block import BlockRows, Residency, Shard, SlotArray, TierName
from kvstore.events import BlocksDropped, BytesMoved, DropCause
from kvstore.extents import SlotClass
from kvstore.index import Space
from kvstore.lease import Lease
from kvstore.stamps import history
from kvstore.store.ahead import vacate_ahead
from kvstore.store.options import Demotion
from kvstore.store.parts import Parts
from kvstore.tiers.base import SaveOutcome
from kvstore.tiers.memory import MemoryTier, payload_checksum

_DROPS = {
    SaveOutcome.FULL: DropCause.FULL,
    SaveOutcome.TIMEOUT: DropCause.UNAVAILABLE,
    SaveOutcome.UNAVAILABLE: DropCause.UNAVAILABLE,
    SaveOutcome.REFUSED: DropCause.REFUSED,
}
_THERE = {SaveOutcome.STORED, SaveOutcome.PRESENT}


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Blocks of one space waiting to go down, pinned in the tier that they are in.

    ``leaving`` blocks have left that tier: they are in STAGED slots, which are freed after the copy.
    """

    rows: BlockRows
    slots: SlotArray
    payload_bytes: int
    leaving: bool = False

    @property
    def size(self) -> int:
        return len(self.slots) * self.payload_bytes


class Demotions:
    """Device to host on the owner's thread, as soon as a block is computed; host to redis on a worker's.

    When a block goes to redis, ``Demotion`` says. Bounded in bytes. Entries pin what they name; what
    does not fit is dropped from the tail, so that what a lower tier has of a chain stays reachable.
    Blocks that leave the host tier go as they leave, tails before heads: a look-up finds the head here
    and the rest in redis.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._mode = parts.demotes
        self._copies = parts.copies
        self._remote = parts.tiers.remote
        self._host = parts.tiers.host
        self._device = parts.tiers.device
        self._mailbox = parts.mailbox
        self._options = parts.options
        self._clock = parts.clock
        self._space = parts.space
        self._report_stored = parts.report_stored
        self._emit = parts.bus.emit
        self._to_host: deque[Entry] = deque()
        self._to_redis: deque[Entry] = deque()
        self._sending: list[Entry] = []
        # What waits is pinned: however slow redis is, most of the pool stays free to be written to.
        self._limit_bytes = min(parts.options.queue_bytes, self._host.pool.limit_bytes // 2)
        self.queued_bytes = 0

    @property
    def idle(self) -> bool:
        return not (self._to_host or self._to_redis or self._sending)

    def pins(self, tier: TierName) -> list[SlotArray]:
        """What is pinned in a tier until it has been copied."""
        waiting = self._to_host if tier is TierName.DEVICE else (*self._to_redis, *self._sending)
        return [entry.slots for entry in waiting if not entry.leaving]

    def offer(self, tier: TierName, rows: BlockRows, slots: SlotArray, payload_bytes: int) -> None:
        """Blocks became READY in ``tier``: queue them for the tier below."""
        if tier is TierName.DEVICE or self._mode is Demotion.WRITE_THROUGH:
            self._queue(tier, rows, slots, payload_bytes)

    def offer_again(self, rows: BlockRows) -> None:
        """Queue the leading run that the host tier has, but for what waits already, for the tier below."""
        slots = self._host.pool.match(rows).slots
        wanted = np.flatnonzero(~self._copies.coming(slots))
        if self._mode is not None and len(wanted):
            size = self._space(self._host, rows.namespace, rows.shard).payload_bytes
            self._queue(TierName.HOST, rows.pick(wanted), slots[wanted], size)

    def used(self, lease: Lease) -> None:
        """A request has used its run: what has been hit often enough by now goes to redis, heads first."""
        if self._mode is not Demotion.ON_REUSE:
            return
        pool, chain = self._host.pool, lease.chain
        for shard in lease.shards:
            stop = self._reused_until(lease, shard)
            if stop == lease.first_block:
                continue  # what the caller has itself is no reason
            slots = pool.match(chain.rows(shard, 0, stop)).slots
            if len(slots) < lease.first_block:  # the caller has the head, and this tier has not
                slots = pool.match(chain.rows(shard, lease.first_block, stop)).slots
            slots = slots[self._copies.lacking(slots, self._clock())]
            if len(slots):
                size = self._space(self._host, chain.namespace, shard).payload_bytes
                self._queue(TierName.HOST, pool.rows_of(slots), slots, size)

    def make_room(self) -> None:
        """Let go of what is about to leave the host tier, while there is time to copy it."""
        if self._mode is not Demotion.ON_EVICT:
            return
        leaving: Counter[SlotClass] = Counter()
        for entry in (*self._to_redis, *self._sending):
            space = self._space(self._host, entry.rows.namespace, entry.rows.shard)
            leaving[space.slot_class] += len(entry.slots)
        for space, slots in vacate_ahead(self._host.pool, self._limit_bytes - self.queued_bytes, leaving):
            lacking = self._copies.lacking(slots, self._clock())
            self._host.pool.abort(slots[~lacking])
            self._part_with(space, slots[lacking])
        self._parts.report_removed()

    def _reused_until(self, lease: Lease, shard: Shard) -> int:
        """The end of the last block of the run that has been hit often enough, in the tier that served it."""
        stop = lease.first_block
        for segment in lease.segments.get(shard, ()):
            tier = self._host if segment.tier is TierName.HOST else self._source()
            reads = history(tier.pool.extents, segment.slots).reads
            often = np.flatnonzero(reads >= self._options.reuse_count)
            if len(often):
                stop = segment.start + int(often[-1]) + 1
        return stop

    def _part_with(self, space: Space, slots: SlotArray) -> None:
        """Queue blocks that have left, heads first; their slots are free when they have been copied."""
        if not len(slots):
            return
        rows = self._host.pool.rows_of(slots)
        order = np.argsort(rows.indexes, kind="stable")
        entry = Entry(rows.pick(order), slots[order], space.payload_bytes, leaving=True)
        self.queued_bytes += entry.size
        self._to_redis.extend(self._batches(entry))

    def _queue(self, tier: TierName, rows: BlockRows, slots: SlotArray, payload_bytes: int) -> None:
        room = max(0, self._limit_bytes - self.queued_bytes) // payload_bytes
        below = TierName.HOST if tier is TierName.DEVICE else self._remote.name
        if room < len(slots):
            self._drop(below, rows, len(slots) - room, DropCause.QUEUE)
            rows, slots = rows.slice(0, room), slots[:room]
        if not len(slots):
            return
        entry = Entry(rows, slots, payload_bytes)
        pool = self._host.pool if tier is TierName.HOST else self._source().pool
        pool.pin(slots, self._clock() + self._options.flight_seconds)
        self.queued_bytes += entry.size
        if tier is TierName.DEVICE:
            self._to_host.append(entry)
        else:
            self._copies.begin(slots)
            self._to_redis.extend(self._batches(entry))

    def step(self) -> None:
        """Copy what waits for the host, and keep the workers busy with what waits for redis."""
        while self._to_host:
            self._copy_down(self._to_host.popleft())
        # One thread is for questions, and one is left to those who wait for blocks.
        while self._to_redis and len(self._sending) < max(1, self._options.threads - 2):
            self._send(self._to_redis.popleft())

    def _source(self) -> MemoryTier:
        assert self._device is not None
        return self._device

    def _batches(self, entry: Entry) -> list[Entry]:
        size = max(1, self._options.batch_bytes // entry.payload_bytes)
        return [
            Entry(
                entry.rows.slice(start, start + size),
                entry.slots[start : start + size],
                entry.payload_bytes,
                entry.leaving,
            )
            for start in range(0, len(entry.slots), size)
        ]

    def _copy_down(self, entry: Entry) -> None:
        device, pool, size = self._source(), self._host.pool, entry.payload_bytes
        began = self._clock()
        wanted = [at for at, is_ in enumerate(pool.residency(entry.rows)) if is_ is Residency.MISS]
        missing = np.array(wanted, dtype=np.int64)
        rows = entry.rows.pick(missing)
        space = self._space(self._host, rows.namespace, rows.shard)
        slots = pool.stage(space, len(missing), rows)
        if len(slots) < len(missing):
            self._drop(TierName.HOST, rows, len(missing) - len(slots), DropCause.FULL)
            rows, missing = rows.slice(0, len(slots)), missing[: len(slots)]
        memory, offsets = self._host.locate(slots)
        try:
            device.read_slots(entry.slots[missing], size, memory, offsets)
        except BaseException:
            pool.abort(slots, rows)
            raise
        finally:
            device.pool.unpin(entry.slots)
            self.queued_bytes -= entry.size
        if not len(slots):
            return
        checksums = [payload_checksum(view) for view in self._host.views(slots, size)]
        now = self._clock()
        fresh = pool.commit(slots, rows, checksums, time=now)
        assert fresh.all(), "a named staged slot is its block's only writer"
        moved = len(slots) * size
        self._emit(BytesMoved(now, TierName.DEVICE, TierName.HOST, moved, now - began))
        self._report_stored(TierName.HOST, rows, size)
        self.offer(TierName.HOST, rows, slots, size)

    def _send(self, entry: Entry) -> None:
        views = self._host.views(entry.slots, entry.payload_bytes)
        checksums = self._host.checksums(entry.slots)
        began, seconds = self._clock(), self._options.flight_seconds
        self._sending.append(entry)
        self._mailbox.submit(
            lambda: self._remote.save(entry.rows, views, checksums, self._clock() + seconds),
            lambda outcomes: self._sent(entry, outcomes, began),
        )

    def _sent(self, entry: Entry, outcomes: list[SaveOutcome] | None, began: float) -> None:
        self._sending.remove(entry)
        self.queued_bytes -= entry.size
        results = outcomes or [SaveOutcome.UNAVAILABLE] * len(entry.slots)
        rows, now, size = entry.rows, self._clock(), entry.payload_bytes
        if entry.leaving:
            self._host.pool.abort(entry.slots)
        else:
            self._host.pool.unpin(entry.slots)
            there = np.array([outcome in _THERE for outcome in results], dtype=np.bool_)
            self._copies.end(entry.slots, now, there=there)
        stored = np.flatnonzero([outcome is SaveOutcome.STORED for outcome in results])
        if len(stored):
            self._emit(BytesMoved(now, TierName.HOST, self._remote.name, len(stored) * size, now - began))
            self._report_stored(self._remote.name, rows.pick(stored), size)
        for outcome, cause in _DROPS.items():
            lost = results.count(outcome)
            if lost:
                self._drop(self._remote.name, rows, lost, cause)
        self.step()

    def _drop(self, tier: TierName, rows: BlockRows, blocks: int, cause: DropCause) -> None:
        self._emit(BlocksDropped(self._clock(), tier, rows.namespace, blocks, cause))
