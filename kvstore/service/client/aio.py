"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from hashing import Extras
from kvstore.block import WHOLE, MissCause, Shard, TierName
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client.core import Core
from kvstore.service.client.lease import Grant, Lease
from kvstore.service.client.messages import Acquisition, LookupResult, PrefetchResult
from kvstore.service.client.namespace import Namespace, Prompt
from kvstore.service.client.opening import Opening
from kvstore.service.client.options import REDIS_WAIT_SECONDS, TLS, ClientOptions, Clock, Outcome
from kvstore.service.client.transport import AsyncTransport
from kvstore.service.client.write import Opened, Source, Write
from kvstore.service.codec import Parallelism
from kvstore.spec import NamespaceSpec
from kvstore.tiers.base import Payload

_DEFAULTS = ClientOptions()


class AsyncClient:
    """``Client`` for one event loop: the same contract, and nothing blocks the loop.

    Payloads are copied and summed on the loop's default executor.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: TLS | None = None,
        options: ClientOptions = _DEFAULTS,
        clock: Clock = time.monotonic,  # noqa: TID251 - the caller's program has no composition root of ours
    ) -> None:
        """As ``Client``; the loop is the one that is running at the first call."""
        self._core = Core(address, options, clock)
        self._transport = AsyncTransport(self._core.link, token, tls, options.reconnect_seconds)
        self._renewal = _Renewal(self._core, self._transport)

    def namespace(self, spec: NamespaceSpec, *, tp_size: int = 1, pp_size: int = 1) -> AsyncNamespace:
        """A namespace of a model that is cut over ``tp_size`` × ``pp_size`` ranks."""
        return AsyncNamespace(self._core, self._transport, self._renewal, spec, Parallelism(tp_size, pp_size))

    @property
    def failures(self) -> dict[Outcome, int]:
        """Calls, leases and writes that came to nothing since the start, by outcome."""
        return self._core.link.failures

    @property
    def shortened(self) -> dict[MissCause, int]:
        """Runs that turned out to be shorter than the server had promised, by cause."""
        return self._core.shortened

    async def close(self) -> None:
        """Release all leases and let go of connection and mapping, as ``Client.close``. Idempotent."""
        if not self._core.begin_close():
            return
        await self._renewal.stop()
        await self._transport.run(self._core.release_all())
        self._core.finish_close()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Renewal:
    """The task that keeps leases and tells of lost writes; there is none before the first of either."""

    def __init__(self, core: Core, transport: AsyncTransport) -> None:
        self._core = core
        self._transport = transport
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """See to it that it runs, also after it died."""
        if not self._stopped and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="kvstore-renewal")

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._core.period_seconds)
            await self._transport.run(self._core.renew())


class AsyncNamespace(Namespace):
    """``ClientNamespace`` for one event loop."""

    def __init__(
        self,
        core: Core,
        transport: AsyncTransport,
        renewal: _Renewal,
        spec: NamespaceSpec,
        cut: Parallelism,
    ) -> None:
        super().__init__(core, spec, cut)
        self._transport = transport
        self._renewal = renewal

    async def register(self) -> Outcome:
        """Make the namespace known now, for its ``root``; every other call does it by itself."""
        return await self._transport.run(self._register())

    async def lookup(
        self,
        prompt: Prompt,
        *,
        extras: Extras | None = None,
        tiers: Sequence[TierName] = (),
        max_blocks: int = 0,
    ) -> LookupResult:
        """How much is cached, and where; changes nothing. No ``tiers`` asks all, 0 blocks is no limit."""
        return await self._transport.run(self._look_up(prompt, extras, tiers, max_blocks))

    async def prefetch(
        self, prompt: Prompt, *, extras: Extras | None = None, wait_seconds: float = 0.0
    ) -> PrefetchResult:
        """Bring blocks from redis into memory ahead of time, without a lease."""
        return await self._transport.run(self._prefetch(prompt, extras, wait_seconds))

    def acquire(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        extras: Extras | None = None,
        wait_seconds: float = REDIS_WAIT_SECONDS,
        hints: Hints = NO_HINTS,
        first_block: int = 0,
    ) -> Opening[AsyncHeldLease]:
        """As ``ClientNamespace.acquire``: ``async with namespace.acquire(…) as lease``, or ``await`` it.

        One that is cancelled leaves a lease that runs out by itself.
        """
        asked = Acquisition(request_id or self._core.request_id(), wait_seconds, hints, first_block)
        return Opening(self._hold(prompt, extras, asked))

    async def _hold(self, prompt: Prompt, extras: Extras | None, asked: Acquisition) -> AsyncHeldLease:
        grant = await self._transport.run(self._acquire(prompt, extras, asked))
        if grant.held is not None and grant.held.kept is not None:
            self._renewal.start()
        return AsyncHeldLease(self._core, self._transport, grant)

    def write(
        self,
        prompt: Prompt,
        *,
        shard: Shard = WHOLE,
        extras: Extras | None = None,
        first_block: int = 0,
    ) -> Opening[AsyncStagedWrite]:
        """Begin to write blocks ``first_block`` … of a prompt: ``async with namespace.write(…) as write``.

        It may be awaited instead. One that is cancelled leaves nothing: the server hears of it with the
        next call, or within a second.
        """
        return Opening(self._stage(prompt, extras, shard, first_block))

    async def _stage(
        self, prompt: Prompt, extras: Extras | None, shard: Shard, first_block: int
    ) -> AsyncStagedWrite:
        try:
            opened = await self._transport.run(self._begin_write(prompt, extras, shard, first_block))
        finally:
            if self._core.may_owe:
                self._renewal.start()
        return AsyncStagedWrite(self._core, self._transport, opened)


class AsyncHeldLease(Lease):
    """``HeldLease`` for one event loop."""

    def __init__(self, core: Core, transport: AsyncTransport, grant: Grant) -> None:
        super().__init__(core, grant)
        self._transport = transport

    async def views(self, shard: Shard = WHOLE) -> list[Payload]:
        """The payloads of the run, as ``HeldLease.views``."""
        return await self._transport.run(self._fetch(shard))

    async def copy_out(self, destinations: Sequence[Payload], shard: Shard = WHOLE) -> int:
        """Copy the run's first blocks, one a destination; how many of them are right afterwards."""
        return await self._transport.run(self._copy(destinations, shard))

    async def release(self, used_blocks: int | None = None, *, hints: Hints | None = None) -> None:
        """End the lease and report how many blocks were used, as ``HeldLease.release``. Idempotent."""
        await self._transport.run(self._release(used_blocks, range(0), hints))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncStagedWrite(Write):
    """``StagedWrite`` for one event loop."""

    def __init__(self, core: Core, transport: AsyncTransport, opened: Opened) -> None:
        super().__init__(core, opened)
        self._transport = transport

    async def copy_in(self, sources: Sequence[Source]) -> None:
        """As ``StagedWrite.copy_in``."""
        await self._transport.run(self._fill(sources))

    async def commit(self, hints: Hints | None = None) -> None:
        """Make the blocks visible, all or none, as ``StagedWrite.commit``."""
        await self._transport.run(self._commit(hints))

    async def abort(self) -> None:
        """Give the slots back; nothing becomes visible. Idempotent."""
        await self._transport.run(self._abort())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._open:
            await self.commit()
        else:
            await self.abort()
