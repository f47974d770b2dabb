"""Promotions from redis to the host tier: owned by the store, shared by all who wait for them."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, BlockRows, MissCause, Residency, Shard, SlotArray, TierName
from kvstore.events import (
    BlocksDropped,
    BlocksRemoved,
    BytesMoved,
    DropCause,
    RemovalCause,
)
from kvstore.failpoints import Step
from kvstore.index import Space
from kvstore.lease import Lease
from kvstore.store.load_gate import LoadGate
from kvstore.store.parts import Parts
from kvstore.tiers.base import LoadResult, TierMatch

_BlockKey = tuple[bytes, Shard, bytes]
_NO_ANSWER = (MissCause.TIMEOUT, MissCause.UNAVAILABLE)


class Batch(NamedTuple):
    """Blocks of a flight that one call fetches: their place in its rows, and staged slots."""

    positions: SlotArray
    slots: SlotArray
    rows: BlockRows


@dataclass(slots=True, eq=False)
class Flight:
    """One promotion under way, from the block where the local run of its first waiter ended.

    ``asked_bytes`` are what is fetched since ``began``, of which ``late`` says that some did not come in
    time; ``came_before`` is what had come of all flights until then. Nobody waits for what is ``explored``:
    it is fetched to learn how fast that is.
    """

    rows: BlockRows
    space: Space
    waiters: list[Lease]
    keys: list[_BlockKey]
    batches_left: int = 0
    began: float = 0.0
    asked_bytes: int = 0
    came_before: int = 0
    late: bool = False
    explored: bool = False
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
        gate: LoadGate,
    ) -> None:
        """Made by the store, which is told what becomes of each lease that waits.

        ``extend(lease, fetched)`` is called when blocks arrived, ``landed(lease, end, cause)`` when
        no more will: at block ``end`` the flight broke for ``cause``, None if not for this lease.
        """
        self._remote = parts.tiers.remote
        self._host = parts.tiers.host
        self._mailbox = parts.mailbox
        self._options = parts.options
        self._clock = parts.clock
        self._space = parts.space
        self._report_stored = parts.report_stored
        self._emit = parts.bus.emit
        self._failpoint = parts.failpoint
        self._extend = extend
        self._landed = landed
        self._gate = gate
        self._copies = parts.copies
        self._active: dict[_BlockKey, Flight] = {}
        # Payload bytes of all flights: those that are on their way, and those that came since the start.
        self._coming_bytes = 0
        self._came_bytes = 0

    def join(self, lease: Lease, shard: Shard) -> None:
        """Wait for what redis has from the lease's end on; starts a flight where none is under way."""
        rows = lease.chain.rows(shard, lease.end)
        key = (rows.namespace, shard, bytes(rows.hash_at(0)))
        flight = self._active.get(key)
        if flight is None:
            flight = Flight(rows, self._space(self._host, rows.namespace, shard), [], [key])
            self._active[key] = flight
            self._probe(flight)
        elif flight.explored and lease.waits:
            lease.cause = MissCause.SLOWER
            lease.broke = lease.end, MissCause.SLOWER  # so whatever other ranks get, it does not ask again
            return
        flight.waiters.append(lease)
        lease.pending += 1

    def _probe(self, flight: Flight) -> None:
        rows, deadline = flight.rows, self._clock() + self._options.probe_seconds

        def ask() -> tuple[TierMatch, float]:
            began = self._clock()
            return self._remote.match(rows, deadline), self._clock() - began

        def answered(answer: tuple[TierMatch, float] | None) -> None:
            match, seconds = answer or (TierMatch(0, MissCause.UNAVAILABLE), 0.0)
            if match.cause not in _NO_ANSWER:
                self._gate.answered(seconds)
            self._probed(flight, match)

        self._mailbox.ask(ask, answered)

    def _probed(self, flight: Flight, match: TierMatch) -> None:
        self._failpoint(Step.PROMOTION_PROBED)
        count = match.blocks
        flight.broke_at, flight.cause = count, match.cause
        wanted = flight.rows.slice(0, count)
        missing = np.array(
            [at for at, is_ in enumerate(self._host.pool.residency(wanted)) if is_ is Residency.MISS],
            dtype=np.int64,
        )
        if len(missing) and not self._is_worth_it(flight, len(missing), count):
            flight.broke_at, flight.cause, flight.explored = int(missing[0]), MissCause.SLOWER, True
            self._arrived(flight)
            self._dismiss(flight)
            missing = missing[: self._gate.explored_blocks(flight.space.payload_bytes, len(missing))]
        slots = self._host.pool.stage(flight.space, len(missing), wanted.pick(missing))
        if len(slots) < len(missing):
            flight.broke_at = int(missing[len(slots)])
            flight.cause = MissCause.QUOTA
            self._dropped(flight, len(missing) - len(slots), DropCause.FULL)
        self._failpoint(Step.PROMOTION_STAGED)
        batches = self._cut_batches(flight, missing[: len(slots)], slots)
        flight.batches_left, flight.began = len(batches), self._clock()
        flight.asked_bytes, flight.came_before = len(slots) * flight.space.payload_bytes, self._came_bytes
        if not batches:
            self._arrived(flight)
            self._finish(flight)
        for batch in batches:
            self._fetch(flight, batch)

    def _is_worth_it(self, flight: Flight, missing: int, found: int) -> bool:
        """Whether those who wait get ``found`` blocks sooner when ``missing`` of them are loaded.

        What is on its way comes first, over the same link, and so do the other ranks' parts of the
        prompt, which may be on their way already. Who prefetches does not wait.
        """
        waiting = [lease for lease in flight.waiters if lease.waits and not lease.over]
        if not waiting:
            return True
        size = missing * flight.space.payload_bytes
        others = size * (max(len(lease.shards) for lease in waiting) - 1)
        tokens = found * flight.space.slot_class.block_size
        return self._gate.allows(size + max(others, self._coming_bytes), tokens)

    def _cut_batches(self, flight: Flight, positions: SlotArray, slots: SlotArray) -> list[Batch]:
        size = max(1, self._options.batch_bytes // flight.space.payload_bytes)
        batches = []
        for start in range(0, len(slots), size):
            part = slice(start, start + size)
            rows = flight.rows.pick(positions[part])
            batches.append(Batch(positions[part], slots[part], rows))
            for block in range(len(rows)):
                # Who fetches a block carries it, also where another flight begins by asking for it.
                key = (rows.namespace, rows.shard, bytes(rows.hash_at(block)))
                self._active[key] = flight
                flight.keys.append(key)
        return batches

    def _fetch(self, flight: Flight, batch: Batch) -> None:
        views = self._host.views(batch.slots, flight.space.payload_bytes)
        self._coming_bytes += len(batch.slots) * flight.space.payload_bytes
        began, seconds = self._clock(), self._options.flight_seconds
        # Its time begins when a thread takes it up: it may wait behind other batches.
        self._mailbox.submit(
            lambda: self._remote.load(batch.rows, views, self._clock() + seconds),
            lambda result: self._fetched(flight, batch, result, began),
        )

    def _fetched(self, flight: Flight, batch: Batch, result: LoadResult | None, began: float) -> None:
        self._failpoint(Step.PROMOTION_LOADED)
        count = len(batch.slots)
        self._coming_bytes -= count * flight.space.payload_bytes
        outcome = result or LoadResult([MissCause.UNAVAILABLE] * count, [0] * count)
        good = np.array([cause is None for cause in outcome.causes], dtype=np.bool_)
        self._commit(flight, batch, good, outcome.checksums, began)
        bad = np.flatnonzero(~good)
        if len(bad):
            self._host.pool.abort(batch.slots[bad], batch.rows.pick(bad))
            self._report_corrupt(flight, batch.rows, outcome)
            first = int(batch.positions[bad[0]])
            flight.late |= MissCause.TIMEOUT in outcome.causes
            if first < flight.broke_at:
                flight.broke_at, flight.cause = first, outcome.causes[int(bad[0])]
        self._arrived(flight)
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
        fresh = self._host.pool.commit(slots, rows, sums, time=now)
        assert fresh.all(), "a named staged slot is its block's only writer"
        self._host.pool.pin(slots, now + self._options.flight_seconds)
        flight.held.append(slots)
        flight.fetched.update(slots.tolist())
        self._failpoint(Step.PROMOTION_COMMITTED)
        size = flight.space.payload_bytes
        self._came_bytes += len(slots) * size
        self._emit(BytesMoved(now, self._remote.name, TierName.HOST, len(slots) * size, now - began))
        self._report_stored(TierName.HOST, rows, size)
        self._copies.end(slots, now, there=np.ones(len(slots), dtype=np.bool_))

    def _arrived(self, flight: Flight) -> None:
        for lease in flight.waiters:
            self._extend(lease, flight.fetched)

    def _finish(self, flight: Flight) -> None:
        for key in flight.keys:
            if self._active.get(key) is flight:
                del self._active[key]
        self._measure(flight)
        self._dismiss(flight)
        for slots in flight.held:
            self._host.pool.unpin(slots)

    def _measure(self, flight: Flight) -> None:
        """Tell the gate how long the flight took, and how much came meanwhile: others share the link.

        What did not come in time counts as if it had come just then.
        """
        loaded = len(flight.fetched) * flight.space.payload_bytes
        if loaded or flight.late:
            late = flight.asked_bytes - loaded if flight.late else 0
            came = self._came_bytes - flight.came_before
            self._gate.loaded(came + late, self._clock() - flight.began)

    def _dismiss(self, flight: Flight) -> None:
        """Tell those who wait that no more will come."""
        waiters, flight.waiters = flight.waiters, []
        ended = int(flight.rows.indexes[0]) + flight.broke_at
        for lease in waiters:
            lease.pending -= 1
            self._landed(lease, ended, flight.cause if _asked_for(lease, ended, flight) else None)

    def carry(self, lease: Lease) -> bool:
        """Whether a flight is under way that brings the block at which the lease ends."""
        chain, at = lease.chain, lease.end * HASH_BYTES
        key = chain.hashes[at : at + HASH_BYTES]
        return any((chain.namespace, shard, key) in self._active for shard in lease.shards)

    def pins(self) -> list[SlotArray]:
        """What flights hold in the host tier until they end."""
        flights = {id(flight): flight for flight in self._active.values()}
        return [slots for flight in flights.values() for slots in flight.held]

    def _report_corrupt(self, flight: Flight, rows: BlockRows, outcome: LoadResult) -> None:
        """Redis has deleted what failed its checksum; a sidecar keeps it, and each find counts again."""
        corrupt = [at for at, cause in enumerate(outcome.causes) if cause is MissCause.CORRUPT]
        if corrupt:
            hashes = rows.pick(np.array(corrupt, dtype=np.int64)).hashes
            now, size = self._clock(), flight.space.payload_bytes
            self._emit(
                BlocksRemoved(
                    now, self._remote.name, rows.namespace, rows.shard, hashes, RemovalCause.CORRUPT, size
                )
            )

    def _dropped(self, flight: Flight, blocks: int, cause: DropCause) -> None:
        now = self._clock()
        self._emit(BlocksDropped(now, TierName.HOST, flight.rows.namespace, blocks, cause))


def _asked_for(lease: Lease, block: int, flight: Flight) -> bool:
    """Whether the block at which a flight ended is the lease's too: another prompt may have begun it."""
    if flight.broke_at == len(flight.rows):
        return False
    own = lease.chain.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
    return own == flight.rows.hash_at(flight.broke_at)
