"""Clients of a sidecar in every kind there is, called in one way: blocking or asyncio, mapped or streamed."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvstore.block import WHOLE, Chain, Shard
from kvstore.service.client import (
    TLS,
    AsyncClient,
    Client,
    ClientNamespace,
    ClientOptions,
    HeldLease,
    StagedWrite,
)
from tests.support.stores import PAYLOAD_BYTES, payload_of

SECONDS = 10.0
FAST = ClientOptions(reconnect_seconds=0.1)


@dataclass(frozen=True)
class Kind:
    """How a client waits, and how its payloads travel."""

    asynchronous: bool
    mapped: bool

    def __str__(self) -> str:
        return f"{'asyncio' if self.asynchronous else 'blocking'}-{'mapped' if self.mapped else 'streamed'}"


MAPPED = Kind(asynchronous=False, mapped=True)
STREAMED = Kind(asynchronous=False, mapped=False)
ASYNC_STREAMED = Kind(asynchronous=True, mapped=False)
KINDS = (MAPPED, STREAMED, Kind(asynchronous=True, mapped=True), ASYNC_STREAMED)
OPPOSITES = (MAPPED, ASYNC_STREAMED)
"""Two that have nothing in common, for what takes a server of its own."""


class OnLoop:
    """An object of the asyncio client that looks like its blocking counterpart."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: Any) -> None:
        self._loop = loop
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._waiting(value) if inspect.ismethod(value) else self._wrapped(value)

    def __enter__(self) -> Self:
        self._waiting(self._target.__aenter__)()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waiting(self._target.__aexit__)(kind, error, trace)

    def namespace(self, *args: Any, **options: Any) -> OnLoop:
        return OnLoop(self._loop, self._target.namespace(*args, **options))

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(result, self._loop).result(SECONDS)  # type: ignore[arg-type]
            return self._wrapped(result)

        return call

    def _wrapped(self, value: Any) -> Any:
        ours = type(value).__module__ == "kvstore.service.client.aio"
        return OnLoop(self._loop, value) if ours else value


@contextmanager
def client_of(
    kind: Kind, address: str, *, token: str | None = None, tls: TLS | None = None
) -> Iterator[Client]:
    """A client of that kind; an asyncio one has a loop of its own in a thread."""
    options = ClientOptions(reconnect_seconds=0.1, map_pool=kind.mapped)
    if not kind.asynchronous:
        with Client(address, token=token, tls=tls, options=options) as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with OnLoop(loop, AsyncClient(address, token=token, tls=tls, options=options)) as client:
            yield client  # type: ignore[misc]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


def put(namespace: ClientNamespace, chain: Chain, shard: Shard = WHOLE, first_block: int = 0) -> StagedWrite:
    """Write a prompt with the right bytes."""
    with namespace.write(chain, shard=shard, first_block=first_block) as write:
        fill(write, chain, shard, first_block)
    return write


def fill(write: StagedWrite, chain: Chain, shard: Shard = WHOLE, first_block: int = 0) -> None:
    rows = chain.rows(shard)
    yours = [place for place, status in enumerate(write.status, first_block) if status == "yours"]
    for block, payload in zip(yours, write.payloads, strict=True):
        payload[:] = payload_of(rows, block, len(payload))


def assert_right(lease: HeldLease, chain: Chain, blocks: int, shard: Shard = WHOLE) -> None:
    """The lease is on ``blocks`` blocks, and they have the bytes of this prompt, in place and as copies."""
    rows = chain.rows(shard)
    assert lease.blocks == blocks
    views = lease.views(shard)
    assert len(views) == blocks
    copies = [np.zeros(len(view), dtype=np.uint8) for view in views]
    assert lease.copy_out(copies, shard) == blocks
    for block in range(blocks):
        expected = payload_of(rows, block, len(views[block])).tobytes()
        assert views[block].tobytes() == expected, f"block {block} in place is wrong"
        assert copies[block].tobytes() == expected, f"the copy of block {block} is wrong"
    assert lease.valid(shard) == blocks


def resident(namespace: ClientNamespace, chain: Chain) -> int:
    """Blocks of the leading run, asked in a way that leaves no trace."""
    return namespace.lookup(chain).matched_tokens // chain.root.block_size


def eventually(what: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def empty_payload() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros(PAYLOAD_BYTES, dtype=np.uint8)
