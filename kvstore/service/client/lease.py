"""A lease as its holder sees it, apart from how it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.block import WHOLE, MissCause, Shard, TierName
from kvstore.errors import LeaseError
from kvstore.hints import Hints, checked
from kvstore.service.client.calls import READ_BLOCKS, Steps, receive, work
from kvstore.service.client.channel import StaleError
from kvstore.service.client.core import Core
from kvstore.service.client.leases import Kept, Use
from kvstore.service.client.messages import Promise, shard_message
from kvstore.service.client.options import CallError, Outcome
from kvstore.service.client.sessions import Session
from kvstore.service.client.streams import Received
from kvstore.service.client.ticket import Ticket
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import payload_checksum
from kvstore.v1 import block_pb2

_NO_LEASE = {
    Outcome.UNREACHABLE: MissCause.UNAVAILABLE,
    Outcome.REJECTED: MissCause.UNAVAILABLE,
    Outcome.REFUSED: MissCause.QUOTA,
}


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a lease is on: the server's promise, of which the first ``blocks`` were verified here.

    ``kept`` is None where the server holds nothing. ``sizes`` are payload bytes by shard.
    """

    session: Session
    kept: Kept | None
    sizes: dict[Shard, int]
    promise: Promise
    blocks: int
    cause: MissCause | None


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Answer to an acquire; without ``held`` there was no server, or it gave nothing."""

    outcome: Outcome
    block_size: int
    held: Held | None = None


class Lease:
    """The run of a prompt, from its first block or the one asked for, that is readable until the lease ends.

    Places in the run count from there.
    Everything here is known without asking. A run may get shorter while it is read: where a payload
    turns out to be damaged, or the lease ran out and blocks were evicted.
    """

    def __init__(self, core: Core, grant: Grant) -> None:
        self._core = core
        self._held = grant.held
        self._outcome = grant.outcome
        self._block_size = grant.block_size
        blocks = 0 if grant.held is None else grant.held.blocks
        self._cause = _NO_LEASE.get(grant.outcome) if grant.held is None else grant.held.cause
        self._limits = {} if grant.held is None else dict.fromkeys(grant.held.sizes, blocks)
        self._payloads: dict[Shard, list[Payload]] = {}
        self._received: dict[Shard, list[int]] = {}

    @property
    def outcome(self) -> Outcome:
        """OK; LOST once it is known that the lease ended by itself; or why there never was one."""
        kept = None if self._held is None else self._held.kept
        return Outcome.LOST if kept is not None and kept.lost else self._outcome

    @property
    def blocks(self) -> int:
        """Blocks of the run that every rank may use, as far as is known."""
        return min(self._limits.values(), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.blocks * self._block_size

    @property
    def pending(self) -> bool:
        """Whether more blocks may be on their way: acquire again by the same request id to learn of them."""
        return self._held is not None and self._held.promise.pending

    @property
    def cause(self) -> MissCause | None:
        """Why the run ends where it does; None where it is the whole chain."""
        return self._cause

    @property
    def hit_blocks(self) -> dict[TierName, int]:
        """The run by the tier that its blocks came from. What was cut off counts against the slowest."""
        left, hits = self.blocks, {}
        promised = {} if self._held is None else self._held.promise.hit_blocks
        for tier in TierName:
            count = min(left, promised.get(tier, 0))
            if count:
                hits[tier] = count
                left -= count
        return hits

    def ticket(self) -> Ticket | None:
        """What other clients of this server need to read the run; None where nothing is leased."""
        held = self._held
        if held is None or held.kept is None or not held.kept.live or not self.blocks:
            return None
        places = held.promise.places if held.session.mapped else {}
        session = held.session
        whole = Ticket(
            session.epoch, session.number, held.kept.lease_id, 0, held.promise.blocks, held.sizes, places
        )
        return whole.part(0, self.blocks)

    def valid(self, shard: Shard = WHOLE) -> int:
        """Leading blocks that are this moment what was promised: all that was read of them is right.

        Ask after reading. It is the truth of a lease that is over, too: blocks stay valid until they
        are evicted. Payloads that were streamed are the holder's own.
        """
        if self._held is None:
            return 0
        limit = self._limit(shard)
        if self._held.session.mapped:
            return self._held.session.unchanged(self._held.promise.places[shard], limit) if limit else 0
        live = self._held.kept is not None and self._held.kept.live
        return limit if live or shard in self._received else 0

    def _fetch(self, shard: Shard) -> Steps[list[Payload]]:
        """The payloads of the valid part of the run."""
        held = self._held
        if held is None or not self._limit(shard):
            return []
        if held.kept is None or held.kept.released:
            raise LeaseError("the lease was released, nothing holds its blocks; read before releasing it")
        if shard not in self._payloads:
            read = self._in_place if held.session.mapped else self._streamed
            self._payloads[shard] = yield from read(held, shard)
        return self._payloads[shard][: self.valid(shard)]

    def _sums(self, shard: Shard) -> Steps[list[int]]:
        """Checksums of the payloads, as their writers gave them."""
        payloads = yield from self._fetch(shard)
        held = self._held
        if held is None or not payloads:
            return []
        if not held.session.mapped:
            return self._received[shard][: len(payloads)]
        return held.session.checksums(held.promise.places[shard].offsets[: len(payloads)])

    def _copy(self, destinations: Sequence[Payload], shard: Shard) -> Steps[int]:
        """Copy the run's first blocks; how many of the copies are right."""
        payloads = yield from self._fetch(shard)
        pairs = list(zip(destinations, payloads, strict=False))
        if pairs:
            _require_shape(destinations[: len(pairs)], pairs[0][1])
        yield from work(lambda: _copy_all(pairs))
        return min(len(pairs), self.valid(shard))

    def _release(self, used_blocks: int | None, borrowed: range, hints: Hints | None) -> Steps[None]:
        """End the lease and tell how many of its blocks were used: by default all that are valid.

        ``borrowed`` are blocks whose payloads borrowers compared, on every rank.
        """
        if hints is not None:
            checked(hints)
        held = self._held
        if held is None or held.kept is None:
            return
        used = min(map(self.valid, self._limits), default=0)
        if used_blocks is not None:
            used = min(used, used_blocks)
        use = Use(used, min(used, self._compared(held, borrowed)), hints)
        self._payloads.clear()
        try:
            yield from self._core.leases.release(held.kept, use, self._core.options.rpc_seconds)
        except StaleError:
            self._core.sessions.end(held.session)
        except CallError:
            return  # counted, and tried once more with the next renewal

    def _compared(self, held: Held, borrowed: range) -> int:
        """Leading blocks whose payload was compared here, or had been before: the server takes it from here.

        Streamed payloads were compared with what the server sent for sums, and the server knows what
        it has read itself.
        """
        if not held.session.mapped:
            return 0
        compared = self.blocks
        for shard in self._limits.keys() - self._payloads.keys():
            unread = held.session.unread(held.promise.places[shard].offsets[:compared])
            compared = next((place for place, _ in unread if place not in borrowed), compared)
        return compared

    def _in_place(self, held: Held, shard: Shard) -> Steps[list[Payload]]:
        offsets = held.promise.places[shard].offsets[: self._limits[shard]]
        payloads = held.session.views(offsets, held.sizes[shard])
        unread = held.session.unread(offsets)
        if unread:
            intact = yield from work(lambda: _first_damaged(payloads, unread))
            if intact is not None:
                # An eviction changes payloads too, and is no damage.
                self._cut(shard, intact, MissCause.CORRUPT if self.valid(shard) > intact else MissCause.STALE)
        return payloads

    def _streamed(self, held: Held, shard: Shard) -> Steps[list[Payload]]:
        assert held.kept is not None
        blocks, cause = self._limits[shard], MissCause.CORRUPT
        received = Received(blocks, held.sizes[shard])
        request = block_pb2.ReadBlocksRequest(
            client=held.session.number,
            epoch=held.session.epoch,
            lease_id=held.kept.lease_id,
            shard=shard_message(shard),
            blocks=blocks,
        )
        try:
            yield from receive(READ_BLOCKS, request, received.take, self._core.options.transfer_seconds)
        except StaleError:
            self._core.leases.lose([held.kept])
            cause = MissCause.STALE
        except CallError:
            cause = MissCause.UNAVAILABLE
        intact = yield from work(received.intact_blocks)
        if intact < blocks:
            self._cut(shard, intact, MissCause.CORRUPT if intact < received.whole_blocks else cause)
        self._received[shard] = received.checksums
        return received.payloads(intact)

    def _cut(self, shard: Shard, blocks: int, cause: MissCause) -> None:
        self._limits[shard] = blocks
        self._cause = cause
        self._core.count_shortened(cause)

    def _limit(self, shard: Shard) -> int:
        limit = self._limits.get(shard)
        if limit is None:
            raise LeaseError(
                f"the lease is on shards {', '.join(map(str, self._limits))}, not on {shard}; "
                "name one of them, or register the namespace with the engine's tp_size and pp_size"
            )
        return limit


def _require_shape(destinations: Sequence[Payload], payload: Payload) -> None:
    """LeaseError where one is not as long as a payload, or not of its bytes."""
    shape, dtype = payload.shape, payload.dtype
    for target in destinations:
        # Arrays of one type share one object for it, almost always.
        if target.shape != shape or (target.dtype is not dtype and target.dtype != dtype):
            raise LeaseError(
                f"a destination has shape {target.shape} and dtype {target.dtype}, expected {shape} and "
                "uint8; pass one array of the payload's bytes a block"
            )


def _copy_all(pairs: list[tuple[Payload, Payload]]) -> None:
    for target, payload in pairs:
        np.copyto(target, payload)


def _first_damaged(payloads: list[Payload], sums: list[tuple[int, int]]) -> int | None:
    """Position of the first payload that does not have its checksum."""
    for position, checksum in sums:
        if payload_checksum(payloads[position]) != checksum:
            return position
    return None
