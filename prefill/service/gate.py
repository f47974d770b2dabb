"""What every request passes, over HTTP and gRPC: its key, whether the worker takes requests, the count."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefill.service.errors import Refusal, ServiceError, answer_to

_BEARER = "bearer "
_OK = "ok"
_CANCELLED = "cancelled"
_log = logging.getLogger(__name__)


class Gate:
    """One a worker. Used on the event loop."""

    def __init__(self, key: str | None, count: Callable[[str, str], None]) -> None:
        """``key`` None: whoever reaches the worker may use it. ``count`` is told (api, outcome)."""
        self._key = key
        self._count = count
        self.draining = False
        """The worker is about to end: new requests are turned away."""
        self.running = 0
        """Requests that are being served."""

    def require_key(self, authorization: str) -> None:
        """ServiceError unless an Authorization header holds the key."""
        if self._key is None:
            return
        scheme, token = authorization[: len(_BEARER)], authorization[len(_BEARER) :].strip()
        if scheme.lower() != _BEARER or not hmac.compare_digest(token.encode(), self._key.encode()):
            raise ServiceError(
                Refusal.KEY,
                "the API key is missing or wrong; send 'Authorization: Bearer <key>' with the key in "
                "api_key_file",
            )

    @contextmanager
    def request(self, api: str, authorization: str) -> Iterator[None]:
        """A request is served inside. ServiceError where it may not be; whatever leaves it is counted."""
        self.running += 1
        outcome = _OK
        try:
            self.require_key(authorization)
            if self.draining:
                raise ServiceError(
                    Refusal.DRAINING, "the worker is shutting down; ask another, or this one later again"
                )
            yield
        except (asyncio.CancelledError, GeneratorExit):
            outcome = _CANCELLED
            raise
        except Exception as error:
            answer = answer_to(error)
            outcome = answer.label
            if answer is Refusal.FAILED.value:
                _log.exception("a request to %s failed", api)
            raise
        finally:
            self.running -= 1
            self._count(api, outcome)
