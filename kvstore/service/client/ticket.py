"""A lease that one client holds and others read: an engine's scheduler acquires, its workers copy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from kvstore.block import WHOLE, Shard
from kvstore.errors import LeaseError
from kvstore.service.client.calls import READ_BLOCKS, Steps, receive, work
from kvstore.service.client.channel import StaleError
from kvstore.service.client.core import Core
from kvstore.service.client.messages import Places, shard_message
from kvstore.service.client.options import CallError
from kvstore.service.client.sessions import Session
from kvstore.service.client.streams import Received
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import payload_checksum
from kvstore.v1 import block_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """What another client of the same server and tenant needs to read blocks of a lease. Picklable.

    It holds nothing: what it names is readable while the lease lasts. Blocks ``first_block`` …
    ``first_block + blocks`` of the leased run are on it; ``sizes`` are payload bytes by shard.
    """

    epoch: int
    number: int
    lease_id: int
    first_block: int
    blocks: int
    sizes: Mapping[Shard, int]
    places: Mapping[Shard, Places]

    def part(self, first_block: int, blocks: int) -> Ticket:
        """A ticket for some of these blocks; ``first_block`` counts from the first of them."""
        if not 0 <= first_block <= first_block + blocks <= self.blocks:
            raise LeaseError(
                f"blocks {first_block} … {first_block + blocks} were asked for, the ticket has "
                f"{self.blocks}; stay inside it"
            )
        cut = slice(first_block, first_block + blocks)
        places = {
            shard: Places(each.offsets[cut], each.generations[cut]) for shard, each in self.places.items()
        }
        return replace(self, first_block=self.first_block + first_block, blocks=blocks, places=places)


class BorrowedBlocks:
    """The blocks of a ticket as this client reads them; none where its server is another by now."""

    def __init__(self, core: Core, session: Session | None, ticket: Ticket) -> None:
        self._core = core
        self._session = session
        self._ticket = ticket
        self._limits: dict[Shard, int] = {}
        self._own: set[Shard] = set()

    def valid(self, shard: Shard = WHOLE) -> int:
        """Leading blocks of what was read that are right. Ask after reading."""
        limit = self._limits.get(shard, 0)
        if self._session is None or not limit or shard in self._own:
            return limit
        return self._session.unchanged(self._ticket.places[shard], limit)

    def fetch(self, shard: Shard) -> Steps[list[Payload]]:
        """The payloads of the ticket's blocks, in place where both clients map the pool."""
        session, ticket = self._session, self._ticket
        if session is None or not ticket.blocks:
            return []
        if shard not in ticket.sizes:
            raise LeaseError(
                f"the ticket is for shards {', '.join(map(str, ticket.sizes))}, not {shard}; acquire with "
                "the engine's tp_size and pp_size"
            )
        places = ticket.places.get(shard)
        if session.mapped and places is not None and len(places.offsets) == ticket.blocks:
            return (yield from self._in_place(session, places, shard))
        return (yield from self._streamed(session, shard))

    def _in_place(self, session: Session, places: Places, shard: Shard) -> Steps[list[Payload]]:
        payloads = session.views(places.offsets, self._ticket.sizes[shard])
        unread = session.unread(places.offsets)
        intact = yield from work(lambda: _intact(payloads, unread))
        self._limits[shard] = intact
        return payloads[:intact]

    def _streamed(self, session: Session, shard: Shard) -> Steps[list[Payload]]:
        ticket = self._ticket
        received = Received(ticket.blocks, ticket.sizes[shard])
        request = block_pb2.ReadBlocksRequest(
            client=ticket.number,
            epoch=session.epoch,
            lease_id=ticket.lease_id,
            shard=shard_message(shard),
            first_block=ticket.first_block,
            blocks=ticket.blocks,
        )
        with suppress(StaleError, CallError):  # counted where it was noticed; what came whole is right
            yield from receive(READ_BLOCKS, request, received.take, self._core.options.transfer_seconds)
        intact = yield from work(received.intact_blocks)
        self._limits[shard] = intact
        self._own.add(shard)
        return received.payloads(intact)


def _intact(payloads: list[Payload], sums: list[tuple[int, int]]) -> int:
    """Leading payloads that have their checksum, where they have to be compared at all."""
    for position, checksum in sums:
        if position < len(payloads) and payload_checksum(payloads[position]) != checksum:
            return position
    return len(payloads)
