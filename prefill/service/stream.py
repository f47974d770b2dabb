"""One request's outputs on their way from the engine's thread to a reader on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvstore.errors import PoolError
from prefill.output import StepOutput
from prefill.request import Result
from prefill.service.errors import Refusal, ServiceError


class Stream:
    """An async iterator over the outputs of one request. Used on the event loop only.

    It holds at most ``limit`` outputs: of a reader that lags further behind the request is
    cancelled, and the reader is told so after what it still finds here.
    """

    def __init__(self, request_id: str, limit: int, end: Callable[[Stream], None]) -> None:
        """``end`` is called once: nobody reads any more, or the last output is here."""
        self.request_id = request_id
        self.is_finished = False
        """Whether the engine is done with the request by itself."""
        self.result: Result | None = None
        """What came of it, once the engine has said."""
        self._limit = limit
        self._end: Callable[[Stream], None] | None = end
        self._is_open = False
        self._outputs: deque[StepOutput] = deque()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def open(self) -> None:
        """The engine has the request: outputs from now on are its own."""
        self._is_open = True

    def deliver(self, output: StepOutput) -> None:
        """Called with each output, in order. Those before ``open`` are of another with this id."""
        if self._end is None or not self._is_open:
            return
        self.result = output.result
        if output.error is not None:
            self.is_finished = True
            self.fail(output.error)
        elif len(self._outputs) >= self._limit:
            self.fail(_too_slow(self._limit))
        else:
            self.is_finished = output.finished is not None or output.handoff is not None
            self._outputs.append(output)
            self._changed.set()
            if self.is_finished:
                self.close()

    def fail(self, error: Exception) -> None:
        """End the request; the reader gets ``error`` behind what is here. Nothing where it is over."""
        if self._end is not None:
            self._failure = _as_passing(error)
            self._changed.set()
            self.close()

    def close(self) -> None:
        """Nobody reads any more: what the request holds is given back. Idempotent."""
        if self._end is not None:
            end, self._end = self._end, None
            end(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepOutput:
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            if self._end is None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._outputs.popleft()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.close()


def _as_passing(error: Exception) -> Exception:
    """What can never fit is refused before it has a stream, so memory that lacks now may be there later."""
    return ServiceError(Refusal.MEMORY, str(error)) if isinstance(error, PoolError) else error


def _too_slow(limit: int) -> ServiceError:
    return ServiceError(
        Refusal.READER,
        f"the reader is {limit} tokens behind, which is all that is kept for it, and the request was "
        "cancelled; read faster, or raise stream_tokens",
    )
