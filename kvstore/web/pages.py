"""What each path answers. The store has one owner, an event loop: pages ask it and wait, and never look."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from kvstore.web.assets import load_assets
from kvstore.web.history import Past
from kvstore.web.live import Live, live_json, past_json
from kvstore.web.readiness import Readiness, State

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_STALLED = "stalled"
_SHOWN_CHARACTERS = 100
_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked on the owner's loop."""

    metrics: Callable[[str], Awaitable[tuple[bytes, str]]]
    """Body and content type for an ``Accept`` header."""
    readiness: Callable[[], Awaitable[Readiness]]
    live: Callable[[], Awaitable[Live]]
    past: Callable[[], Awaitable[tuple[str, Past]]]
    """And of which instance, as ``Live`` says it."""


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
        self._files = {
            path: Page(HTTPStatus.OK, asset.content_type, asset.body) for path, asset in load_assets().items()
        }
        self._paths: Mapping[str, Callable[[str], Page]] = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/live.json": self._live,
            "/history.json": self._history,
        }

    def page(self, path: str, accept: str) -> Page:
        """The answer to a GET of ``path`` (no query) with this ``Accept`` header."""
        if path in self._files:
            return self._files[path]
        if path not in self._paths:
            known = ", ".join(("/", *self._paths))
            return _text(
                HTTPStatus.NOT_FOUND, f"there is no {path[:_SHOWN_CHARACTERS]}, expected one of {known}"
            )
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
        return _json(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, readiness.as_json())

    def _live(self, _accept: str) -> Page:
        return Page(HTTPStatus.OK, _JSON, live_json(self._ask(self._questions.live)))

    def _history(self, _accept: str) -> Page:
        return Page(HTTPStatus.OK, _JSON, past_json(*self._ask(self._questions.past)))

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
        except (TimeoutError, CancelledError) as error:
            future.cancel()
            raise OwnerSilentError from error
        if failure is not None:
            raise OwnerFailedError from failure
        return future.result()


def _text(status: HTTPStatus, line: str) -> Page:
    return Page(status, _TEXT, f"{line}\n".encode())


def _json(status: HTTPStatus, content: Mapping[str, object]) -> Page:
    return Page(status, _JSON, json.dumps(content).encode() + b"\n")
