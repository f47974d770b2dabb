"""What a client has compared, and what it has only been promised: a damaged payload is never a hit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.block import WHOLE, MissCause
from kvstore.service.client import Client, ClientNamespace, HeldLease
from kvstore.service.operator import Operator
from tests.support.clients import FAST, MAPPED, STREAMED, Kind, assert_right, client_of, empty_payload, put
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import PAYLOAD_BYTES, make_chain, make_spec, payload_of

SPEC = make_spec()
CHAIN = make_chain(SPEC, "abcdefgh")
DAMAGED = 3


def damage(pool: Path, block: int) -> None:
    """Flip one bit of the payload of a block."""
    at = pool.read_bytes().index(payload_of(CHAIN.rows(WHOLE), block).tobytes()) + PAYLOAD_BYTES // 2
    with pool.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def restarted_with_damage(server: Sidecar) -> None:
    with Client(server.address, options=FAST) as writer:
        put(writer.namespace(SPEC), CHAIN)
    server.kill()
    damage(server.pool_path, DAMAGED)
    server.restart()


def release_unread(namespace: ClientNamespace) -> None:
    with namespace.acquire(CHAIN) as lease:
        lease.valid()


def claim_all(namespace: ClientNamespace) -> None:
    namespace.acquire(CHAIN).release(used_blocks=8)


def forget(namespace: ClientNamespace) -> None:
    namespace.acquire(CHAIN)
    gc.collect()


def keep_until_the_client_closes(namespace: ClientNamespace) -> HeldLease:
    return namespace.acquire(CHAIN)


@pytest.mark.parametrize("kind", [MAPPED, STREAMED], ids=str)
@pytest.mark.parametrize("use", [release_unread, claim_all, forget, keep_until_the_client_closes])
def test_a_reader_that_reads_nothing_vouches_for_nothing(
    kind: Kind, use: Callable[[ClientNamespace], HeldLease | None]
) -> None:
    with sidecar() as server:
        restarted_with_damage(server)
        with client_of(kind, server.address) as idle:
            held = use(idle.namespace(SPEC))
        del held
        with Client(server.address, options=FAST) as client, client.namespace(SPEC).acquire(CHAIN) as lease:
            copied = lease.copy_out([empty_payload() for _ in range(8)])
            assert copied == DAMAGED
            assert_right(lease, CHAIN, DAMAGED)
            assert lease.cause in (MissCause.CORRUPT, MissCause.COLD)


def hits(server: Sidecar) -> int:
    with Operator(server.address) as operator:
        return operator.status().hit_tokens.get("host", 0)


def test_blocks_that_nobody_had_to_compare_count_as_used() -> None:
    """After a restart the first reader may not have read when it releases: that makes no miss."""
    with sidecar() as server, Client(server.address, options=FAST) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        server.restart()
        with namespace.acquire(CHAIN) as lease:
            assert lease.blocks == 8
        assert hits(server) == CHAIN.root.block_size * 8
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 8)
        assert hits(server) == CHAIN.root.block_size * 16


def test_what_one_reader_compared_the_next_need_not() -> None:
    with sidecar() as server, Client(server.address, options=FAST) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        server.restart()
        with namespace.acquire(CHAIN) as lease:
            lease.views()
            lease.release(used_blocks=5)
        damage(server.pool_path, 2)
        damage(server.pool_path, 6)
        with namespace.acquire(CHAIN) as lease:
            assert len(lease.views()) == 6, "block 2 was compared before its damage, block 6 was not"
