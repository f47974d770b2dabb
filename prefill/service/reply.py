"""One HTTP answer on its way out: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from prefill.service.errors import Refusal, ServiceError, answer_to, message_of, retry_after_seconds

_T = TypeVar("_T")
_DONE = b"data: [DONE]\n\n"
_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"


class Reply:
    """Sends one answer. ``stall_seconds`` is how long a client may take no bytes."""

    def __init__(self, send: Send, stall_seconds: float) -> None:
        self._send_message = send
        self._stall_seconds = stall_seconds
        self._is_streaming = False

    async def whole(
        self, content: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer, as JSON."""
        body = _encode(content)
        extra = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        lines = [(b"content-type", _JSON), (b"content-length", str(len(body)).encode()), *extra]
        await self._send({"type": "http.response.start", "status": status, "headers": lines})
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self) -> None:
        """The head of a stream."""
        self._is_streaming = True
        headers = [(b"content-type", _EVENTS), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, content: Mapping[str, object]) -> None:
        """One part of a stream."""
        await self._write(b"data: " + _encode(content) + b"\n\n", more=True)

    async def done(self) -> None:
        """The end of a stream that is complete."""
        await self._write(_DONE, more=False)

    async def refuse(self, error: Exception) -> None:
        """Tell of an error: by its status, or as the last part of a stream that has begun."""
        answer = answer_to(error)
        content = {"error": error_object(error)}
        if self._is_streaming:
            await self._write(b"data: " + _encode(content) + b"\n\n", more=False)
            return
        headers = {}
        seconds = retry_after_seconds(error)
        if seconds is not None:
            headers["retry-after"] = str(max(1, round(seconds)))
        if answer is Refusal.KEY.value:
            headers["www-authenticate"] = "Bearer"
        await self.whole(content, answer.http, headers)

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            await asyncio.wait_for(self._send_message(message), self._stall_seconds)
        except TimeoutError as error:
            raise ServiceError(
                Refusal.READER,
                f"no bytes were taken in {self._stall_seconds:g} s and the request was cancelled; "
                "read faster, or raise stall_seconds",
            ) from error


def error_object(error: Exception) -> dict[str, object]:
    """OpenAI's form of an error."""
    answer = answer_to(error)
    param = error.param if isinstance(error, ServiceError) else None
    return {"message": message_of(error), "type": answer.kind, "param": param, "code": answer.code}


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """``work``, which is cancelled at once when the client hangs up; ServiceError then."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ServiceError(Refusal.CANCELLED, "the client hung up")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encode(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
