"""What each path answers. The store has one owner, an event loop: pages ask it and wait, and never look."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import TypeVar

from kvstore.block import TierName
from kvstore.tiers.base import TierStatus

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_STALLED = "stalled"
_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class State(StrEnum):
    """What a server is doing; it takes requests while it is SERVING."""

    LOADING = "loading"
    SERVING = "serving"
    FAILING = "failing"
    """A background task died and is about to be started again."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests are welcome.

    A tier that is down is shown with its reason and changes nothing: it costs hits, never a request;
    to take the whole server out of service for it would cost all hits.
    """

    state: State
    tiers: Mapping[TierName, TierStatus]


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked on the owner's loop."""

    metrics: Callable[[str], Awaitable[tuple[bytes, str]]]
    """Body and content type for an ``Accept`` header."""
    readiness: Callable[[], Awaitable[Readiness]]


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: HTTPStatus
    content_type: str
    body: bytes


class OwnerSilentError(Exception):
    """The owner's loop did not answer in time, or is closed."""


class OwnerFailedError(Exception):
    """The answer was an exception."""


class Pages:
    """Thread-safe; each call waits for the loop for at most ``owner_seconds``."""

    def __init__(
        self, questions: Questions, loop: asyncio.AbstractEventLoop, *, owner_seconds: float
    ) -> None:
        self._questions = questions
        self._loop = loop
        self._owner_seconds = owner_seconds
        self._paths: Mapping[str, Callable[[str], Page]] = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._readiness,
        }

    def page(self, path: str, accept: str) -> Page:
        """The answer to a GET of ``path`` (no query) with this ``Accept`` header."""
        if path not in self._paths:
            known = ", ".join(self._paths)
            return _text(HTTPStatus.NOT_FOUND, f"there is no {path}, expected one of {known}")
        try:
            return self._paths[path](accept)
        except OwnerSilentError:
            return self._stalled(path)
        except OwnerFailedError as error:
            _log.error("%s cannot be answered", path, exc_info=error.__cause__)
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{path} failed; the log says why")

    def _metrics(self, accept: str) -> Page:
        body, content_type = self._ask(lambda: self._questions.metrics(accept))
        return Page(HTTPStatus.OK, content_type, body)

    def _health(self, _accept: str) -> Page:
        self._ask(lambda: asyncio.sleep(0))
        return _text(HTTPStatus.OK, "ok")

    def _readiness(self, _accept: str) -> Page:
        readiness = self._ask(self._questions.readiness)
        is_ready = readiness.state is State.SERVING
        tiers = {
            str(tier): {"healthy": status.healthy, "reason": status.reason}
            for tier, status in readiness.tiers.items()
        }
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json(status, {"ready": is_ready, "state": readiness.state, "tiers": tiers})

    def _stalled(self, path: str) -> Page:
        if path == "/readyz":
            stalled = {"ready": False, "state": _STALLED, "tiers": {}}
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, stalled)
        return _text(
            HTTPStatus.SERVICE_UNAVAILABLE, f"the store has not answered within {self._owner_seconds:g} s"
        )

    def _ask(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        async def answer() -> _Answer:
            return await question()

        coroutine = answer()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise OwnerSilentError from error
        try:
            failure = future.exception(self._owner_seconds)
        except (TimeoutError, asyncio.CancelledError) as error:
            future.cancel()
            raise OwnerSilentError from error
        if failure is not None:
            raise OwnerFailedError from failure
        return future.result()


def _text(status: HTTPStatus, line: str) -> Page:
    return Page(status, _TEXT, f"{line}\n".encode())


def _json(status: HTTPStatus, content: Mapping[str, object]) -> Page:
    return Page(status, _JSON, json.dumps(content).encode() + b"\n")
