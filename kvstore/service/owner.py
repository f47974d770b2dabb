"""The event loop as the one owner of a store: it pumps, ticks, sweeps and grows the pool."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from kvstore.lease import Lease
from kvstore.store import TieredStore

_T = TypeVar("_T")
_TICK_SECONDS = 0.25
_RESTART_SECONDS = 1.0
_log = logging.getLogger(__name__)


class Wake:
    """What worker threads call when there is something to collect; bound to a loop once that runs."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: Callable[[], None] | None = None

    def bind(self, loop: asyncio.AbstractEventLoop, pump: Callable[[], None]) -> None:
        self._loop, self._pump = loop, pump

    def __call__(self) -> None:
        loop, pump = self._loop, self._pump
        if loop is not None and pump is not None and not loop.is_closed():
            loop.call_soon_threadsafe(pump)


class Owner:
    """Runs one store on the running event loop."""

    def __init__(
        self,
        store: TieredStore,
        wake: Wake,
        sweep: Callable[[], None],
        clock: Callable[[], float],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """``sweep`` lets go of what clients that are gone have held; it is called at each tick.

        ``changed`` is called when a background task has died, and when it goes on.
        """
        self._changed = changed
        self.now = clock
        self._store = store
        self._wake = wake
        self._sweep = sweep
        self._tasks: list[asyncio.Task[None]] = []
        self.failures: Counter[str] = Counter()
        """How often each background task died."""
        self.failing: set[str] = set()
        """Background tasks that died and have not yet run through since."""

    def start(self) -> None:
        """Begin; must be called on the loop."""
        self._wake.bind(asyncio.get_running_loop(), self._store.pump)
        self.repeat("tick", self._tick)
        self._spawn("growth", self._grow)

    def repeat(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run ``step`` again and again until ``stop``; how long it waits is its own affair."""

        async def run() -> None:
            while True:
                await step()
                if name in self.failing:
                    self.failing.discard(name)
                    await self._changed()

        self._spawn(name, run)

    async def stop(self) -> None:
        """End the background tasks. The store stays open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def pump_soon(self) -> None:
        """Send what is queued for redis on its way, once the calls that wait have been served."""
        asyncio.get_running_loop().call_soon(self._store.pump)

    async def settle(self, lease: Lease, seconds: float) -> None:
        """Wait until nothing is pending for a lease, for at most ``seconds``; costs no thread."""
        if lease.pending and seconds > 0:
            settled = asyncio.Event()
            self._store.when_settled(lease, settled.set)
            try:
                await asyncio.wait_for(settled.wait(), seconds)
            except TimeoutError:
                return

    async def ask(self, begin: Callable[[Callable[[_T], None]], None]) -> _T:
        """Wait for what the store hands to a callback: ``begin(then)``."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def then(result: _T) -> None:
            if not future.done():  # the caller may have gone
                future.set_result(result)

        begin(then)
        return await future

    def _spawn(self, name: str, run: Callable[[], Coroutine[None, None, None]]) -> None:
        self._tasks.append(asyncio.create_task(self._keep(name, run), name=f"kvstore-{name}"))

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """A background task that dies is logged, counted and started again."""
        while True:
            try:
                await run()
            except Exception:  # noqa: BLE001 - whatever it was, the others go on
                self.failures[name] += 1
                self.failing.add(name)
                await self._changed()
                _log.exception("background task %s died and is started again", name)
                await asyncio.sleep(_RESTART_SECONDS)
            else:
                self.failing.discard(name)
                return

    async def _tick(self) -> None:
        self._store.pump()
        self._sweep()
        await asyncio.sleep(_TICK_SECONDS)

    async def _grow(self) -> None:
        """Reserve the pool's extents one by one; clients are served from the first one on."""
        host = self._store.host
        for number in host.pool.extents.unreserved():
            # Clearing the pages is most of the work, and is done beside the loop.
            if not await asyncio.to_thread(host.file.allocate, number):
                _log.warning(
                    "the pool stays at %d of %d bytes: there is no memory for more",
                    host.pool.extents.reserved_bytes,
                    host.pool.limit_bytes,
                )
                return
            # A write that could not wait may have taken it meanwhile.
            if number in host.pool.extents.unreserved()[:1]:
                host.pool.extents.reserve_next()
