"""One client leases, others read: by ticket, mapped or streamed, in any combination of the two."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.block import WHOLE, Chain
from kvstore.errors import LeaseError
from kvstore.service.client import Client, Ticket
from kvstore.spec import NamespaceSpec
from tests.support.clients import MAPPED, STREAMED, Kind, client_of, put
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import SPLIT, make_chain, make_spec, payload_of

both_kinds = pytest.mark.parametrize("reading", [MAPPED, STREAMED], ids=str)


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with sidecar() as running:
        yield running


@pytest.fixture(params=[MAPPED, STREAMED], ids=lambda kind: f"leased by {kind}")
def holder(server: Sidecar, request: pytest.FixtureRequest) -> Iterator[Client]:
    with client_of(request.param, server.address) as made:
        yield made


def stored(server: Sidecar, spec: NamespaceSpec, letters: str) -> Chain:
    chain = make_chain(spec, letters)
    with client_of(MAPPED, server.address) as writer:
        put(writer.namespace(spec), chain)
    return chain


def assert_borrowed(
    server: Sidecar, reading: Kind, spec: NamespaceSpec, ticket: Ticket, chain: Chain
) -> None:
    """A fresh client reads what the ticket names, and it is right."""
    rows = chain.rows(WHOLE)
    with client_of(reading, server.address) as reader:
        borrowed = reader.namespace(spec).borrow(pickle.loads(pickle.dumps(ticket)))  # noqa: S301 - ours
        views = borrowed.views()
        assert len(views) == ticket.blocks
        for block, view in enumerate(views, ticket.first_block):
            np.testing.assert_array_equal(view, payload_of(rows, block, len(view)))
        assert borrowed.valid() == ticket.blocks
        del views, view


@both_kinds
def test_a_ticket_is_enough_to_read(server: Sidecar, holder: Client, reading: Kind) -> None:
    spec = make_spec(f"ticket-{reading}")
    chain = stored(server, spec, "abcde")
    with holder.namespace(spec).acquire(chain) as lease:
        ticket = lease.ticket()
        assert ticket is not None
        assert_borrowed(server, reading, spec, ticket, chain)
        assert_borrowed(server, reading, spec, ticket.part(1, 3), chain)
        assert_borrowed(server, reading, spec, ticket.part(1, 3).part(2, 1), chain)


@both_kinds
def test_of_a_lease_that_is_over_nothing_wrong_is_read(server: Sidecar, reading: Kind) -> None:
    """What is in place may still be there, and then it is right; nobody streams it any more."""
    spec = make_spec(f"over-{reading}")
    chain = stored(server, spec, "abc")
    with client_of(MAPPED, server.address) as holder:
        lease = holder.namespace(spec).acquire(chain)
        ticket = lease.ticket()
        lease.release()
        assert ticket is not None
        assert lease.ticket() is None
        if reading.mapped:
            assert_borrowed(server, reading, spec, ticket, chain)
            return
        with client_of(reading, server.address) as reader:
            borrowed = reader.namespace(spec).borrow(ticket)
            assert (borrowed.views(), borrowed.valid()) == ([], 0)


@both_kinds
def test_a_ticket_of_the_server_before(reading: Kind) -> None:
    spec = make_spec("before")
    with sidecar() as own:
        chain = stored(own, spec, "abc")
        with client_of(MAPPED, own.address) as holder, client_of(reading, own.address) as reader:
            namespace = reader.namespace(spec)
            namespace.register()
            ticket = holder.namespace(spec).acquire(chain).ticket()
            assert ticket is not None
            own.restart()
            borrowed = namespace.borrow(ticket)
            borrowed.views()
            assert borrowed.valid() == 0
            # The reader is not lost for the new one.
            again = holder.namespace(spec).acquire(chain)
            fresh = again.ticket()
            assert fresh is not None
            assert len(namespace.borrow(fresh).views()) == 3


def test_what_borrowers_have_compared_counts_as_read(server: Sidecar) -> None:
    """After a restart payloads are compared by whoever reads them first, and once is enough."""
    spec = make_spec("compared")
    with sidecar() as own:
        chain = stored(own, spec, "abcde")
        own.restart()
        with client_of(MAPPED, own.address) as holder:
            namespace = holder.namespace(spec)
            lease = namespace.acquire(chain)
            ticket = lease.ticket()
            assert ticket is not None
            unread = namespace.borrow(ticket)
            assert len(unread.views()) == 5
            # The server itself looks at the block behind those that were compared.
            lease.release(5, borrowed=range(2))
            damage(own, int(ticket.places[WHOLE].offsets[0]))
            damage(own, int(ticket.places[WHOLE].offsets[4]))
            again = namespace.acquire(chain).ticket()
            assert again is not None
            assert len(namespace.borrow(again).views()) == 4


def damage(server: Sidecar, offset: int) -> None:
    with server.pool_path.open("r+b") as file:
        file.seek(offset)
        file.write(b"damage")


def test_mistakes(server: Sidecar) -> None:
    spec = make_spec("mistakes")
    chain = stored(server, spec, "ab")
    with client_of(MAPPED, server.address) as client, client.namespace(spec).acquire(chain) as lease:
        ticket = lease.ticket()
        assert ticket is not None
        with pytest.raises(LeaseError, match="the ticket has 2"):
            ticket.part(1, 2)
        with pytest.raises(LeaseError, match=r"the ticket is for shards 0\.1\.0\.1"):
            client.namespace(spec).borrow(ticket).views(SPLIT[1])
