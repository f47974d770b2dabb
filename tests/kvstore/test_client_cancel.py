"""Calls that their callers give up, at any moment: nothing of them stays at the server."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.block import Chain
from kvstore.failpoints import Step
from kvstore.service.client import AsyncClient, Client, ClientOptions, Outcome
from kvstore.service.client.aio import AsyncNamespace
from kvstore.service.operator import Operator
from tests.support.clients import (
    ASYNC_STREAMED,
    FAST,
    KINDS,
    Kind,
    client_of,
    eventually,
    fill,
    put,
    resident,
)
from tests.support.proxy import Behaviour, Proxy
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import make_chain, make_spec

SPEC = make_spec()
CHAIN = make_chain(SPEC, "abcd")
WRITES = 240
LONG = 600.0
"""Seconds after which a write would end by itself: long after the test."""
ASYNC_MAPPED = Kind(asynchronous=True, mapped=True)

by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def idle(server: Sidecar) -> bool:
    """No write is open, and no slot waits for its writer to end."""
    with Operator(server.address) as operator:
        status = operator.status()
    pool = status.tiers[0].pool
    assert pool is not None
    return not status.writes and not pool.quarantined_bytes


def prompt(number: int) -> Chain:
    return make_chain(SPEC, "".join(chr(0x3000 + 4 * number + block) for block in range(4)))


async def cancelled(call: Callable[[], Awaitable[object]], seconds: float) -> bool:
    """Whether a call was still going on when it was cancelled after so long."""
    task = asyncio.ensure_future(call())
    await asyncio.sleep(seconds)
    task.cancel()
    return isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)


async def give_up_many(namespace: AsyncNamespace) -> int:
    """Writes that are cancelled at random moments; how many were under way."""
    chance = random.Random(7)

    async def write(number: int) -> None:
        async with namespace.write(prompt(number)) as staged:
            assert staged.outcome is Outcome.OK
            for payload in staged.payloads:
                payload[:] = number % 251

    count = 0
    for first in range(0, WRITES, 4):
        turn = [
            cancelled(lambda number=number: write(number), chance.uniform(0, 0.006))  # type: ignore[misc]
            for number in range(first, first + 4)
        ]
        count += sum(await asyncio.gather(*turn))
    return count


@pytest.mark.parametrize(("kind", "write_seconds"), [(ASYNC_MAPPED, 1.0), (ASYNC_STREAMED, LONG)], ids=str)
def test_writes_that_are_cancelled_at_any_moment_leave_nothing(kind: Kind, write_seconds: float) -> None:
    """An engine aborts requests all the time; their slots come back without its end."""

    async def scenario(server: Sidecar) -> None:
        async with AsyncClient(server.address, options=ClientOptions(map_pool=kind.mapped)) as client:
            namespace = client.namespace(SPEC)
            await namespace.register()
            assert await give_up_many(namespace) > WRITES / 10
            await asyncio.sleep(1.2)  # longer than a mapped write may take
            await asyncio.to_thread(eventually, lambda: idle(server))
            async with namespace.write(CHAIN) as staged:
                assert len(staged.payloads) == 4
            assert staged.committed_blocks == 4
            assert client.failures == {}

    with sidecar(write_seconds=write_seconds) as server:
        asyncio.run(scenario(server))
        assert idle(server)


def test_a_write_that_is_cancelled_once_it_is_staged_is_told_without_another_call() -> None:
    async def scenario(server: Sidecar) -> None:
        async with AsyncClient(server.address) as client:
            namespace = client.namespace(SPEC)
            await namespace.register()
            write = asyncio.create_task(namespace.write(CHAIN))
            await asyncio.to_thread(server.await_stopped)
            write.cancel()
            with pytest.raises(asyncio.CancelledError):
                await write
            server.resume()
            await asyncio.to_thread(eventually, lambda: idle(server))

    with sidecar(write_seconds=LONG, stop_at={Step.WRITE_STAGED: 1}) as server:
        asyncio.run(scenario(server))


def test_what_is_awaited_may_be_entered_at_once() -> None:
    async def scenario(server: Sidecar) -> None:
        async with AsyncClient(server.address, options=FAST) as client:
            namespace = client.namespace(SPEC)
            async with namespace.write(CHAIN) as staged:
                for payload in staged.payloads:
                    payload[:] = 5
            assert staged.committed_blocks == 4
            async with namespace.acquire(CHAIN) as lease:
                assert [view[0] for view in await lease.views()] == [5] * 4
            with pytest.raises(ZeroDivisionError):
                async with namespace.write(prompt(1)):
                    raise ZeroDivisionError
            assert (await namespace.lookup(prompt(1))).matched_tokens == 0
            async with await namespace.write(prompt(2)) as staged:
                assert len(staged.payloads) == 4
            assert staged.committed_blocks == 4
            held = await asyncio.create_task(namespace.acquire(CHAIN))  # as of any coroutine
            assert held.blocks == 4
            await held.release()

    with sidecar() as server:
        asyncio.run(scenario(server))
        assert idle(server)


@by_kind
def test_a_write_that_nobody_can_end_any_more_is_aborted(kind: Kind) -> None:
    with sidecar(write_seconds=LONG) as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        write = namespace.write(CHAIN)
        assert write.outcome is Outcome.OK
        place = write.payloads[0]
        del write
        gc.collect()
        with pytest.raises(ValueError, match="read-only"):
            place[:] = 1
        eventually(lambda: idle(server))
        assert resident(namespace, CHAIN) == 0
        with namespace.write(CHAIN) as second:
            fill(second, CHAIN)
        assert second.committed_blocks == 4


def test_a_write_whose_begin_got_no_answer_leaves_nothing(tmp_path: Path) -> None:
    options = ClientOptions(rpc_seconds=0.5, reconnect_seconds=0.1)
    with sidecar(write_seconds=LONG, listen=f"unix:{tmp_path}/socket,127.0.0.1:0") as server:
        port = int(server.serving["addresses"][1].rpartition(":")[2])
        with Proxy(port, Behaviour()) as proxy, Client(f"127.0.0.1:{proxy.port}", options=options) as client:
            namespace = client.namespace(SPEC)
            put(namespace, make_chain(SPEC, "xy"))
            proxy.behaviour = Behaviour(delay_seconds=1.0)  # the server answers in time, and nobody hears it
            write = namespace.write(CHAIN)
            assert (write.outcome, write.payloads) == (Outcome.UNREACHABLE, [])
            assert not idle(server)
            proxy.behaviour = Behaviour()
            eventually(lambda: idle(server))
            eventually(lambda: put(namespace, CHAIN).committed_blocks == 4)
