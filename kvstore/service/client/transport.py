"""Runs operations: makes their calls and waits, by blocking or on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from kvstore.address import Address, parse_address
from kvstore.errors import KVStoreError
from kvstore.service.client.calls import Receive, Result, Send, Steps, Unary, Work
from kvstore.service.client.channel import (
    StaleError,
    bearer,
    complaint_of_owner,
    credentials_of,
    explain,
    open_aio_channel,
    open_channel,
    require_trustworthy,
)
from kvstore.service.client.link import Link
from kvstore.service.client.options import TLS, CallError, Clock, Outcome, Silence

Call: TypeAlias = Unary | Receive | Send


class BlockingTransport:
    """One synchronous channel, for any number of threads."""

    def __init__(
        self, link: Link, token: str | None, tls: TLS | None, reconnect_seconds: float, clock: Clock
    ) -> None:
        require_trustworthy(link.address, token, tls)
        self._link = link
        self._clock = clock
        self._of_thread = threading.local()
        self._where = parse_address(link.address)
        # An interceptor costs each call several times what sending the token with it does.
        self._metadata = bearer(token)
        self._channel = open_channel(link.address, None, tls, reconnect_seconds=reconnect_seconds)
        self._callables: dict[str, Callable[..., Any]] = {}

    def run(self, steps: Steps[Result]) -> Result:
        """The result of an operation; raises what the operation raises."""
        try:
            step = next(steps)
            while True:
                try:
                    result = step.run() if isinstance(step, Work) else self._perform(step)
                except (KVStoreError, StaleError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as stop:
            finished: Result = stop.value
            return finished
        finally:
            steps.close()

    @contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Whatever this thread calls in the block has no more time than to ``deadline``, on the clock."""
        before = self._deadline
        self._of_thread.deadline = deadline
        try:
            yield
        finally:
            self._of_thread.deadline = before

    def close(self) -> None:
        self._channel.close()

    @property
    def _deadline(self) -> float | None:
        deadline: float | None = getattr(self._of_thread, "deadline", None)
        return deadline

    def _seconds(self, step: Call) -> float:
        """The time that a call has. CallError where it has none: then it is not made."""
        if self._deadline is None:
            return step.seconds
        left = self._deadline - self._clock()
        if left <= 0:
            self._link.count(Outcome.UNREACHABLE)
            raise CallError(Outcome.UNREACHABLE, f"{step.method.path}: no time is left", Silence.UNSENT)
        return min(step.seconds, left)

    def _perform(self, step: Call) -> object:
        seconds = self._seconds(step)
        with _accounted(self._link, self._where, step):
            made = self._callable(step)
            if isinstance(step, Unary):
                return made(step.request, timeout=seconds, metadata=self._metadata)
            if isinstance(step, Send):
                return made(step.requests, timeout=seconds, metadata=self._metadata)
            answers = made(step.request, timeout=seconds, metadata=self._metadata)
            try:
                for answer in answers:
                    step.take(answer)
            finally:
                answers.cancel()
        return None

    def _callable(self, step: Call) -> Callable[..., Any]:
        known = self._callables.get(step.method.path)
        if known is None:
            known = self._callables[step.method.path] = _multi_callable(self._channel, step)
        return known


class AsyncTransport:
    """One asyncio channel, of the loop that is running when it is first used."""

    def __init__(self, link: Link, token: str | None, tls: TLS | None, reconnect_seconds: float) -> None:
        require_trustworthy(link.address, token, tls)
        self._link = link
        self._where = parse_address(link.address)
        self._metadata = bearer(token)
        self._credentials = credentials_of(tls)
        self._reconnect_seconds = reconnect_seconds
        self._channel: grpc.aio.Channel | None = None
        self._callables: dict[str, Callable[..., Any]] = {}

    async def run(self, steps: Steps[Result]) -> Result:
        """The result of an operation; raises what the operation raises."""
        try:
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Work):
                        result = await _on_thread(step.run)
                    else:
                        result = await self._perform(step)
                except (KVStoreError, StaleError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as stop:
            finished: Result = stop.value
            return finished
        finally:
            steps.close()

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _perform(self, step: Call) -> object:
        with _accounted(self._link, self._where, step):
            made = self._callable(step)
            if isinstance(step, Unary):
                return await made(step.request, timeout=step.seconds, metadata=self._metadata)
            if isinstance(step, Send):
                return await made(step.requests, timeout=step.seconds, metadata=self._metadata)
            answers = made(step.request, timeout=step.seconds, metadata=self._metadata)
            try:
                async for answer in answers:
                    step.take(answer)
            finally:
                answers.cancel()
        return None

    def _callable(self, step: Call) -> Callable[..., Any]:
        known = self._callables.get(step.method.path)
        if known is None:
            if self._channel is None:
                self._channel = open_aio_channel(
                    self._link.address, self._credentials, reconnect_seconds=self._reconnect_seconds
                )
            known = self._callables[step.method.path] = _multi_callable(self._channel, step)
        return known


@contextmanager
def _accounted(link: Link, where: Address, step: Call) -> Iterator[None]:
    """One call: whether it may be made, what its status means, and what it says of the server."""
    probe, settled = link.begin(), False
    complaint = complaint_of_owner(where)
    if complaint is not None:
        refused = CallError(Outcome.REJECTED, complaint)
        link.failed(refused, probe=probe)
        raise refused
    try:
        yield
        link.answered()
        settled = True
    except grpc.RpcError as error:
        told = explain(error, f"{step.method.path} at {link.address}", step.method.error)
        link.failed(told, probe=probe)
        settled = True
        try:
            raise told from None
        finally:
            # Its traceback names this frame, and that its callers', who may have views of the pool: a cycle
            # would keep the mapping, and with it the slots of a lost write, until somebody collects it.
            del told
    finally:
        if not settled:
            link.abandoned(probe=probe)


def _multi_callable(channel: grpc.Channel | grpc.aio.Channel, step: Call) -> Callable[..., Any]:
    kind = {Unary: channel.unary_unary, Receive: channel.unary_stream, Send: channel.stream_unary}[type(step)]
    made: Callable[..., Any] = kind(
        step.method.path,
        request_serializer=step.method.request.SerializeToString,
        response_deserializer=step.method.answer.FromString,
    )
    return made


async def _on_thread(run: Callable[[], Result]) -> Result:
    """Run it apart from the loop.

    A caller that is cancelled meanwhile waits for its end: only then is the memory that it reads or
    writes the caller's again.
    """
    future = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait((future,))
        raise
