"""Promotions from redis to the host tier: owned by the store, shared by all who wait for them."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import BlockRows, MissCause, Residency, Shard, SlotArray, TierName
from kvstore.events import BlocksDropped, BlocksStored, BytesMoved, DropCause
from kvstore.index import Space
from kvstore.lease import Lease
from kvstore.store.parts import Parts
from kvstore.tiers.base import LoadResult

_BlockKey = tuple[bytes, Shard, bytes]


class Batch(NamedTuple):
    """Blocks of a flight that one call fetches: their place in its rows, and staged slots."""

    positions: SlotArray
    slots: SlotArray
    rows: BlockRows


@dataclass(slots=True, eq=False)
class Flight:
    """One promotion under way, from the block where the local run of its first waiter ended."""

    rows: BlockRows
    space: Space
    waiters: list[Lease]
    keys: list[_BlockKey]
    batches_left: int = 0
    fetched: set[int] = field(default_factory=set)
    held: list[SlotArray] = field(default_factory=list)
    broke_at: int = 0
    cause: MissCause | None = None


class Flights:
    """Starts, shares and ends promotions. A waiter that gives up does not end one."""

    def __init__(
        self,
        parts: Parts,
        extend: Callable[[Lease, Container[int]], None],
        landed: Callable[[Lease, int, MissCause | None], None],
    ) -> None:
        """``extend(lease, fetched)`` is called when blocks arrived, ``landed(lease, end,
        cause)`` when no more will: the flight ended at block ``end`` of its chain."""
        self._redis = parts.tiers.redis
        self._host = parts.tiers.host
        self._mailbox = parts.mailbox
        self._options = parts.options
        self._clock = parts.clock
        self._emit = parts.bus.emit
        self._extend = extend
        self._landed = landed
        self._active: dict[_BlockKey, Flight] = {}

    def __len__(self) -> int:
        return len({id(flight) for flight in self._active.values()})

    def join(self, lease: Lease, shard: Shard) -> None:
        """Wait for what redis has from the lease's end on; starts a flight where none is under way."""
        rows = lease.chain.rows(shard, lease.blocks)
        key = (rows.namespace, shard, bytes(rows.hash_at(0)))
        flight = self._active.get(key)
        if flight is None:
            space = self._host.pool.space(rows.namespace, shard)
            assert space is not None
            flight = Flight(rows, space, [], [key])
            self._active[key] = flight
            self._probe(flight)
        flight.waiters.append(lease)
        lease.pending += 1

    def _probe(self, flight: Flight) -> None:
        rows, seconds = flight.rows, self._options.probe_seconds
        self._mailbox.submit(
            lambda: self._redis.match(rows, self._clock() + seconds),
            lambda count: self._probed(flight, count or 0),
        )

    def _probed(self, flight: Flight, count: int) -> None:
        flight.broke_at = count
        flight.cause = None if count == len(flight.rows) else self._absent()
        wanted = flight.rows.slice(0, count)
        missing = np.array(
            [at for at, is_ in enumerate(self._host.pool.residency(wanted)) if is_ is Residency.MISS],
            dtype=np.int64,
        )
        slots = self._host.pool.stage(flight.space, len(missing), wanted.pick(missing))
        if len(slots) < len(missing):
            flight.broke_at = int(missing[len(slots)])
            flight.cause = MissCause.QUOTA
            self._dropped(flight, len(missing) - len(slots), DropCause.FULL)
        batches = self._cut_batches(flight, missing[: len(slots)], slots)
        flight.batches_left = len(batches)
        if not batches:
            self._finish(flight)
        for batch in batches:
            self._fetch(flight, batch)

    def _absent(self) -> MissCause:
        return MissCause.COLD if self._redis.status().healthy else MissCause.UNAVAILABLE

    def _cut_batches(self, flight: Flight, positions: SlotArray, slots: SlotArray) -> list[Batch]:
        size = max(1, self._options.batch_bytes // flight.space.payload_bytes)
        batches = []
        for start in range(0, len(slots), size):
            part = slice(start, start + size)
            rows = flight.rows.pick(positions[part])
            batches.append(Batch(positions[part], slots[part], rows))
            for block in range(len(rows)):
                key = (rows.namespace, rows.shard, bytes(rows.hash_at(block)))
                if key not in self._active:
                    self._active[key] = flight
                    flight.keys.append(key)
        return batches

    def _fetch(self, flight: Flight, batch: Batch) -> None:
        views = self._host.views(batch.slots, flight.space.payload_bytes)
        began = self._clock()
        self._mailbox.submit(
            lambda: self._redis.load(batch.rows, views, began + self._options.flight_seconds),
            lambda result: self._fetched(flight, batch, result, began),
        )

    def _fetched(
        self, flight: Flight, batch: Batch, result: LoadResult | None, began: float
    ) -> None:
        count = len(batch.slots)
        outcome = result or LoadResult([MissCause.UNAVAILABLE] * count, [0] * count)
        good = np.array([cause is None for cause in outcome.causes], dtype=np.bool_)
        self._commit(flight, batch, good, outcome.checksums, began)
        bad = np.flatnonzero(~good)
        if len(bad):
            self._host.pool.abort(batch.slots[bad], batch.rows.pick(bad))
            first = int(batch.positions[bad[0]])
            if first < flight.broke_at:
                flight.broke_at, flight.cause = first, outcome.causes[int(bad[0])]
        for lease in flight.waiters:
            self._extend(lease, flight.fetched)
        flight.batches_left -= 1
        if flight.batches_left == 0:
            self._finish(flight)

    def _commit(
        self, flight: Flight, batch: Batch, good: NDArray[np.bool_], checksums: list[int], began: float
    ) -> None:
        kept = np.flatnonzero(good)
        if not len(kept):
            return
        slots, rows, now = batch.slots[kept], batch.rows.pick(kept), self._clock()
        sums = [checksums[block] for block in kept.tolist()]
        fresh = self._host.pool.commit(slots, rows, sums, ahead=slots[:0], time=now)
        # A named staged slot is its block's only writer, so nobody can have been faster.
        assert fresh.all()
        self._host.pool.pin(slots, now + self._options.flight_seconds)
        flight.held.append(slots)
        flight.fetched.update(slots.tolist())
        size = flight.space.payload_bytes
        self._emit(BytesMoved(now, TierName.REDIS, TierName.HOST, len(slots) * size, now - began))
        self._emit(BlocksStored(now, TierName.HOST, rows.namespace, rows.shard, rows.hashes, size))

    def _finish(self, flight: Flight) -> None:
        for key in flight.keys:
            del self._active[key]
        waiters, flight.waiters = flight.waiters, []
        for lease in waiters:
            lease.pending -= 1
            self._landed(lease, int(flight.rows.indexes[0]) + flight.broke_at, flight.cause)
        for slots in flight.held:
            self._host.pool.unpin(slots)

    def _dropped(self, flight: Flight, blocks: int, cause: DropCause) -> None:
        now = self._clock()
        self._emit(BlocksDropped(now, TierName.HOST, flight.rows.namespace, blocks, cause))
