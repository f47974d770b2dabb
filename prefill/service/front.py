"""From a request to its tokens: computed here, or prefilled by another worker and continued here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from prefill.errors import HandoffError
from prefill.handoff import Handoff
from prefill.request import FinishReason, Request, Result
from prefill.service.driver import Driver
from prefill.service.metrics import Fallback, FrontMetrics
from prefill.service.stream import Stream


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took. ``cached_tokens`` are those of its prompt that nobody computed for it."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_seconds: float
    execution_seconds: float

    @classmethod
    def of(cls, result: Result, output_tokens: int) -> Self:
        return cls(
            result.prompt_tokens,
            result.cached_tokens,
            output_tokens,
            result.queue_seconds,
            result.execution_seconds,
        )

    @classmethod
    def of_handed(cls, handoff: Handoff, output_tokens: int) -> Self:
        """Of a prompt that another worker has prefilled."""
        return cls(
            handoff.prompt_tokens,
            handoff.cached_tokens,
            output_tokens,
            handoff.queue_seconds,
            handoff.execution_seconds,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """The next tokens of an answer. The last part has ``finished`` STOP or LENGTH, and ``usage``.

    With STOP, the last token is the one that ended the answer.
    """

    tokens: list[int]
    finished: FinishReason | None = None
    usage: Usage | None = None
    admitted: bool = False
    """Said once, of a request that another worker prefilled: its blocks are leased here now."""


class Handed(Protocol):
    """A prompt that another worker has prefilled, and holds until it is acknowledged."""

    @property
    def handoff(self) -> Handoff: ...

    def acknowledge(self) -> None:
        """Tell that worker, in the background. Idempotent, and never raises: its lease lapses by itself."""

    def reject(self, reason: str) -> None:
        """The handoff does not fit this worker: ask that one no more for a while."""


class Prefillers(Protocol):
    """Other workers that prefill."""

    async def prefill(self, request: Request) -> Handed | None:
        """None where none of them can now. PromptError, or BusyError where all that answer are busy."""


class Answer:
    """The parts of one answer, as an async iterator."""

    def __init__(
        self,
        driver: Driver,
        stream: Stream,
        begun: Callable[[], None],
        handed: Handed | None = None,
        ends: Collection[int] = (),
    ) -> None:
        """``handed`` is what ``stream`` goes on from, where the reader is to have its tokens too.

        One of ``ends`` ends an answer. ``begun`` is called with the first token.
        """
        self._begun: Callable[[], None] | None = begun
        self._driver = driver
        self._stream = stream
        self._handed = handed
        self._ends = ends
        self._is_admitted = False
        self._parts = self._read()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        part = await anext(self._parts)
        if part.tokens and self._begun is not None:
            self._begun()
            self._begun = None
        return part

    async def complete(self, output_tokens: int) -> Usage | None:
        """The reader wants no more than ``output_tokens``: end the request as one that is answered.

        None where the worker does not know it any more.
        """
        if self._handed is not None and not self._is_admitted:
            return Usage.of_handed(self._handed.handoff, output_tokens)
        result = await self._driver.complete(self._stream)
        return None if result is None else self._usage(result, output_tokens)

    async def _read(self) -> AsyncIterator[Part]:
        head: list[int] = []
        if self._handed is not None:
            head = list(self._handed.handoff.output)
            # A token that ends the answer belongs to its last part.
            if head[-1] not in self._ends:
                yield Part(head)
                head = []
        async for output in self._stream:
            if output.admitted and self._handed is not None:
                self._is_admitted = True
                self._handed.acknowledge()
                continue
            tokens, head = head + ([] if output.token is None else [output.token]), []
            result = output.result
            usage = None if result is None else self._usage(result, len(result.tokens))
            yield Part(tokens, output.finished, usage, output.admitted)

    def _usage(self, result: Result, output_tokens: int) -> Usage:
        if self._handed is not None:
            return Usage.of_handed(self._handed.handoff, output_tokens)
        return Usage.of(result, output_tokens)


class Front:
    """Where every API gets its answers."""

    def __init__(
        self,
        driver: Driver,
        prefillers: Prefillers | None,
        eos_ids: tuple[int, ...],
        metrics: FrontMetrics,
    ) -> None:
        """``prefillers`` None: prompts are computed here. ``eos_ids`` are the model's own end tokens."""
        self._metrics = metrics
        self._driver = driver
        self._prefillers = prefillers
        self._eos_ids = eos_ids

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[Answer]:
        """The answer to a request. Leaving the context ends it wherever it is.

        Raises what ``Engine.submit`` raises, before the first part.
        """
        handed = None if self._prefillers is None else await self._prefillers.prefill(request)
        if handed is None:
            if self._prefillers is not None:
                self._metrics.fallback(Fallback.NO_WORKER)
            async with await self._driver.submit(request) as stream:
                yield Answer(self._driver, stream, partial(self._begun, request, None))
            return
        try:
            try:
                stream, taken = await self._driver.resume(handed.handoff), handed
            except HandoffError as error:
                handed.reject(str(error))
                self._metrics.fallback(Fallback.REJECTED)
                stream, taken = await self._driver.submit(request), None
            begun = partial(self._begun, request, None if taken is None else taken.handoff)
            ends = request.stop_ids if request.ignore_eos else (*request.stop_ids, *self._eos_ids)
            async with stream:
                yield Answer(self._driver, stream, begun, taken, ends)
        finally:
            handed.acknowledge()

    @asynccontextmanager
    async def resume(self, handoff: Handoff) -> AsyncIterator[Answer]:
        """The rest of an answer, behind what the handoff holds."""
        async with await self._driver.resume(handoff) as stream:
            # Its first token was told by whoever hands over.
            yield Answer(self._driver, stream, _nothing)

    def _begun(self, request: Request, handoff: Handoff | None) -> None:
        self._metrics.first_token(self._driver.clock() - request.arrived, handoff)


def _nothing() -> None:
    """Nobody counts this one."""
