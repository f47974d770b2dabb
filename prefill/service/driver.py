"""The engine's thread, which is also the store's owner, and how an event loop speaks with it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvstore.errors import PoolError
from prefill.assemble import Worker
from prefill.errors import RequestError
from prefill.handoff import Handoff
from prefill.output import StepOutput
from prefill.request import Request, Result
from prefill.service.errors import Refusal, ServiceError
from prefill.service.landing import Landing
from prefill.service.stream import Stream

_T = TypeVar("_T")
_TICK_SECONDS = 0.25
"""At rest: leases lapse, and what others wait for is looked at."""
_PAUSE_SECONDS = 0.002
"""Where the engine can do nothing for the requests that it has, such as while Redis brings blocks."""
_RED_SECONDS = 5.0
"""Health is red for this long after a step that raised: long enough for those who look now and then."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """Outputs that a reader may lag behind, and the longest wait of a handoff for its blocks to land."""

    stream_tokens: int
    landing_seconds: float


class Wake:
    """What other threads call when the store has something to collect; does nothing until it is bound."""

    def __init__(self) -> None:
        self.bound: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.bound is not None:
            self.bound()


class Driver:
    """Runs one worker's engine on a thread of its own.

    The methods are called on the event loop that called ``start``. The engine has a request from
    ``submit`` until its stream is over or closed.
    """

    def __init__(
        self,
        worker: Worker,
        wake: Wake,
        clock: Callable[[], float],
        limits: DriverLimits,
    ) -> None:
        self.clock = clock
        self._worker = worker
        self._limits = limits
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        where, seconds = worker.tiers.remote.name, limits.landing_seconds
        self._landing = Landing(worker.store, worker.spec.root, where, clock, seconds)
        self._streams: dict[str, Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="prefill-engine", daemon=True)
        self._ended = False
        self._is_over = False
        self._red_until: float | None = None
        self.health_changed = asyncio.Event()
        """Set on the loop whenever ``is_healthy`` may say another thing; whoever waits for it clears it."""
        wake.bound = partial(self._commands.put, _nothing)

    def start(self) -> None:
        """Begin; must be called on the loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step that it is in. The worker stays open."""
        self._commands.put(self._end)
        await asyncio.to_thread(self._thread.join)

    def is_healthy(self) -> bool:
        """Whether the thread runs, and no step has raised lately: what a step raises is a defect."""
        return self._thread.is_alive() and self._red_until is None and not self._is_over

    async def submit(self, request: Request) -> Stream:
        """Queue a request. Raises what ``Engine.submit`` raises."""
        return await self._open(request.request_id, lambda: self._worker.engine.submit(request))

    async def submit_prefill(self, request: Request) -> Stream:
        """Queue a prompt whose stream has one output, the handoff, once its blocks have landed."""
        return await self._open(request.request_id, lambda: self._worker.engine.submit_prefill(request))

    async def resume(self, handoff: Handoff) -> Stream:
        """Queue the rest of a request that another worker has prefilled."""
        return await self._open(handoff.request_id, lambda: self._worker.engine.resume(handoff))

    async def complete(self, stream: Stream) -> Result | None:
        """End a request whose answer is as long as its reader wants it; what came of it.

        None where it has no token yet, or is not known any more.
        """
        if stream.result is None and not stream.is_finished:
            result = await self.ask(lambda: self._worker.engine.complete(stream.request_id))
            if result is not None:
                stream.is_finished = True
                return result
        return stream.result

    def acknowledge(self, request_id: str) -> None:
        """Let go of what a handoff holds. Idempotent."""
        self._commands.put(lambda: self._worker.engine.acknowledge(request_id))

    def fail_all(self, error: Exception) -> None:
        """End every request with ``error``."""
        for stream in list(self._streams.values()):
            stream.fail(error)

    async def ask(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` on the engine's thread, between two steps. ServiceError where that has ended."""
        command = _Command(work)
        self._commands.put(command)
        if self._is_over:
            self._refuse_commands()
        return await asyncio.wrap_future(command.future)

    async def _open(self, request_id: str, submit: Callable[[], None]) -> Stream:
        if request_id in self._streams:
            raise RequestError(
                f"request id {request_id!r} is in use, expected one that no unfinished request has; "
                "choose another, or leave it out"
            )
        stream = self._streams[request_id] = Stream(request_id, self._limits.stream_tokens, self._close)

        def begin() -> None:
            submit()
            # What comes before this is of a request that had the same id.
            self._tell(Stream.open, stream)

        try:
            await self.ask(begin)
        except asyncio.CancelledError:
            stream.close()
            raise
        except Exception:
            self._streams.pop(request_id, None)
            raise
        return stream

    def _close(self, stream: Stream) -> None:
        self._streams.pop(stream.request_id, None)
        if not stream.is_finished:
            self._commands.put(partial(self._cancel, stream.request_id))

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)
            elif output.handoff is not None:
                self.acknowledge(output.request_id)  # whoever asked for it has gone

    # On the engine's thread.

    def _run(self) -> None:
        wait = 0.0
        try:
            while True:
                self._work_off(wait)
                if self._ended:
                    return
                wait = self._step()
        finally:
            # Whatever ends this thread, nobody may wait for it for ever.
            self._is_over = True
            if not self._ended:
                _log.critical("the engine's thread has ended; no request is served any more")
            self._refuse_commands()
            self._tell(self.fail_all, _over())
            self._tell(asyncio.Event.set, self.health_changed)

    def _work_off(self, wait: float) -> None:
        """Run the commands that are there, waiting a while for the first."""
        try:
            command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            while True:
                self._run_command(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _run_command(self, command: Callable[[], object]) -> None:
        try:
            command()
        except Exception:  # noqa: BLE001 - the thread is all that this worker has, and nobody waits for it
            _log.exception("a command to the engine failed")

    def _cancel(self, request_id: str) -> None:
        self._worker.engine.cancel(request_id)
        self._landing.forget(request_id)

    def _step(self) -> float:
        """One step of the engine; seconds to wait for commands before the next."""
        engine, began = self._worker.engine, self.clock()
        try:
            outputs = engine.step()
            self._landing.check()
            self._pass_on(outputs)
        except Exception as error:  # noqa: BLE001 - the thread is all that this worker has
            _log.exception("a step of the engine failed; the requests that it had are ended")
            self._turn_red_until(self.clock() + _RED_SECONDS)
            self._tell(self.fail_all, error)
            return _TICK_SECONDS
        if self._red_until is not None and self._red_until <= self.clock():
            self._turn_red_until(None)
        if engine.idle:
            return _TICK_SECONDS if self._landing.idle else _PAUSE_SECONDS
        return _PAUSE_SECONDS if not outputs and self.clock() - began < _PAUSE_SECONDS else 0.0

    def _pass_on(self, outputs: list[StepOutput]) -> None:
        """Tell the loop; of a handoff once its blocks have landed."""
        told = []
        for output in outputs:
            if isinstance(output.error, PoolError):
                _log.warning("request %r failed: %s", output.request_id, output.error)
            elif output.error is not None:
                _log.error("request %r failed", output.request_id, exc_info=output.error)
            if output.handoff is not None:
                self._landing.watch(output.handoff, partial(self._tell, self._deliver, [output]))
            else:
                told.append(output)
        if told:
            self._tell(self._deliver, told)

    def _turn_red_until(self, end: float | None) -> None:
        self._red_until = end
        self._tell(asyncio.Event.set, self.health_changed)

    def _refuse_commands(self) -> None:
        """The thread has ended: whoever asks it is told so. Called on any thread."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Command):
                command.refuse(_over())

    def _tell(self, call: Callable[[_T], None], what: _T) -> None:
        assert self._loop is not None, "started"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, what)

    def _end(self) -> None:
        self._ended = True


class _Command(Generic[_T]):
    """Work for the engine's thread whose result somebody awaits; not begun where that one has gone."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self.future: Future[_T] = Future()
        self._work = work

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except Exception as error:  # noqa: BLE001 - it is the asker's
            self.future.set_exception(error)
        except BaseException:
            self.future.set_exception(_over())
            raise

    def refuse(self, error: Exception) -> None:
        """Do nothing of it; the asker gets ``error``."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _over() -> ServiceError:
    return ServiceError(Refusal.FAILED, "the engine's thread has ended; start the worker again")


def _nothing() -> None:
    """Wakes the thread: the next step collects what there is."""
