"""Copies of fresh blocks going down a tier, behind the request that made them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvstore.block import BlockRows, Residency, SlotArray, TierName
from kvstore.events import BlocksDropped, BytesMoved, DropCause
from kvstore.store.parts import Parts
from kvstore.tiers.base import SaveOutcome
from kvstore.tiers.memory import MemoryTier, payload_checksum
from kvstore.tiers.null import NullTier

_DROPS = {
    SaveOutcome.FULL: DropCause.FULL,
    SaveOutcome.TIMEOUT: DropCause.UNAVAILABLE,
    SaveOutcome.UNAVAILABLE: DropCause.UNAVAILABLE,
    SaveOutcome.REFUSED: DropCause.REFUSED,
}


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Blocks of one chain waiting to go down, pinned in the tier that they are in."""

    rows: BlockRows
    slots: SlotArray
    payload_bytes: int

    @property
    def size(self) -> int:
        return len(self.slots) * self.payload_bytes


class Demotions:
    """Write-through: device to host on the owner's thread, host to redis on a worker's.

    Bounded in bytes. Entries pin what they name; what does not fit is dropped from the tail, so
    that what a lower tier has of a chain stays reachable.
    """

    def __init__(self, parts: Parts) -> None:
        self._redis = parts.tiers.redis
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
        return [entry.slots for entry in waiting]

    def offer(self, tier: TierName, rows: BlockRows, slots: SlotArray, payload_bytes: int) -> None:
        """Blocks became READY in ``tier``: queue them for the tier below."""
        if tier is TierName.HOST and isinstance(self._redis, NullTier):
            return
        room = max(0, self._limit_bytes - self.queued_bytes) // payload_bytes
        below = TierName.HOST if tier is TierName.DEVICE else TierName.REDIS
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
            lambda: self._redis.save(entry.rows, views, checksums, self._clock() + seconds),
            lambda outcomes: self._sent(entry, outcomes, began),
        )

    def _sent(self, entry: Entry, outcomes: list[SaveOutcome] | None, began: float) -> None:
        self._sending.remove(entry)
        self.queued_bytes -= entry.size
        self._host.pool.unpin(entry.slots)
        results = outcomes or [SaveOutcome.UNAVAILABLE] * len(entry.slots)
        rows, now, size = entry.rows, self._clock(), entry.payload_bytes
        stored = np.flatnonzero([outcome is SaveOutcome.STORED for outcome in results])
        if len(stored):
            self._emit(BytesMoved(now, TierName.HOST, TierName.REDIS, len(stored) * size, now - began))
            self._report_stored(TierName.REDIS, rows.pick(stored), size)
        for outcome, cause in _DROPS.items():
            lost = results.count(outcome)
            if lost:
                self._drop(TierName.REDIS, rows, lost, cause)
        self.step()

    def _drop(self, tier: TierName, rows: BlockRows, blocks: int, cause: DropCause) -> None:
        self._emit(BlocksDropped(self._clock(), tier, rows.namespace, blocks, cause))
