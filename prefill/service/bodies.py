"""Bodies of HTTP requests, within limits of time, of each one's size, and of what all of them take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from prefill.errors import BusyError
from prefill.service.errors import Refusal, ServiceError

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bytes of one body, bytes and number of all that are being read, and seconds that one may take."""

    each_bytes: int
    all_bytes: int
    number: int
    seconds: float


class Bodies:
    """Keeps count of the bodies that are not requests of the engine yet. Used on one event loop."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._number = 0
        self._bytes = 0

    @asynccontextmanager
    async def read(self, http: HttpRequest) -> AsyncIterator[bytearray]:
        """The body, whose memory counts until the context is left.

        BusyError where it would be one too many; ServiceError where it is too long or too slow.
        """
        limits, body = self._limits, bytearray()
        if self._number >= limits.number:
            raise _busy(f"{self._number} requests are being read, which is the most")
        self._number += 1
        try:
            await self._fill(body, http)
            yield body
        finally:
            self._number -= 1
            self._bytes -= len(body)

    async def _fill(self, body: bytearray, http: HttpRequest) -> None:
        limits = self._limits
        announced = http.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limits.each_bytes:
            raise _too_large(limits.each_bytes)
        try:
            async with asyncio.timeout(limits.seconds):
                async for piece in http.stream():
                    body += piece
                    self._bytes += len(piece)
                    if len(body) > limits.each_bytes:
                        raise _too_large(limits.each_bytes)
                    if self._bytes > limits.all_bytes:
                        raise _busy(f"the bodies that are being read have {self._bytes} bytes in all")
        except TimeoutError as error:
            raise ServiceError(
                Refusal.SLOW, f"the body did not come within {limits.seconds:g} s; send it at once"
            ) from error
        except ClientDisconnect as error:
            raise ServiceError(Refusal.CANCELLED, "the client hung up") from error


def _too_large(limit: int) -> ServiceError:
    return ServiceError(
        Refusal.TOO_LARGE,
        f"the body has more than {limit} bytes, which no prompt of this model's context needs; "
        "send a shorter one",
    )


def _busy(what: str) -> BusyError:
    return BusyError(f"{what}; send the request again in a second", _RETRY_SECONDS)
