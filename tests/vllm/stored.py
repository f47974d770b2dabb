"""What a sidecar has, seen from outside, and how to damage it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.block import WHOLE, TierName
from kvstore.service.client import Client
from kvstore.service.operator import Operator
from kvstore.spec import NamespaceSpec
from tests.support.sidecars import Sidecar

SECONDS = 20.0


def eventually(what: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def operator(sidecar: Sidecar) -> Iterator[Operator]:
    with Operator(sidecar.address) as asking:
        yield asking


def blocks_in(sidecar: Sidecar) -> int:
    """Blocks in memory, of all namespaces."""
    with operator(sidecar) as asking:
        return sum(each.blocks.get(TierName.HOST, 0) for each in asking.namespaces())


def spec_in(sidecar: Sidecar) -> NamespaceSpec:
    """The only namespace."""
    with operator(sidecar) as asking:
        [report] = asking.namespaces()
    return report.spec


def await_blocks(sidecar: Sidecar, count: int) -> None:
    """Saves are asynchronous: wait until so many blocks are there, and no write is open."""
    eventually(lambda: blocks_in(sidecar) == count)
    await_idle(sidecar)


def await_idle(sidecar: Sidecar) -> None:
    """Until nobody holds anything."""

    def idle() -> bool:
        with operator(sidecar) as asking:
            status = asking.status()
        return (status.leases, status.writes) == (0, 0)

    eventually(idle)


def matched(sidecar: Sidecar, spec: NamespaceSpec, prompt: list[int]) -> int:
    """Tokens of the leading run that is stored."""
    with Client(sidecar.address) as client:
        return client.namespace(spec).lookup(prompt).matched_tokens


def overwrite(sidecar: Sidecar, spec: NamespaceSpec, prompt: list[int], block: int, data: bytes) -> None:
    """Write over the beginning of a stored payload, behind its checksum; empty data means all zeros."""
    with Client(sidecar.address) as client, client.namespace(spec).acquire(prompt) as lease:
        ticket = lease.ticket()
        assert ticket is not None
        offset = int(ticket.places[WHOLE].offsets[block])
        size = ticket.sizes[WHOLE]
        lease.release(0)
    descriptor = os.open(sidecar.pool_path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, data or bytes(size), offset)
    finally:
        os.close(descriptor)
