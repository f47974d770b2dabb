"""What is waited for or entered: ``await acquire(…)`` and ``async with acquire(…)`` are both right."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

Entered = TypeVar("Entered", bound=AbstractAsyncContextManager[Any])


class Opening(Coroutine[object, object, Entered], Generic[Entered]):
    """A coroutine that gives a context manager, and may be entered in its place. For one use."""

    def __init__(self, opening: Coroutine[Any, Any, Entered]) -> None:
        self._opening = opening
        self._entered: Entered | None = None

    def __await__(self) -> Generator[Any, None, Entered]:
        return self._opening.__await__()

    def send(self, value: object) -> object:
        return self._opening.send(value)

    def throw(self, *error: Any) -> object:  # noqa: ANN401 - one to three, as its base has them
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()

    async def __aenter__(self) -> Entered:
        self._entered = await self._opening
        await self._entered.__aenter__()
        return self._entered

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._entered is not None
        await self._entered.__aexit__(kind, error, trace)
