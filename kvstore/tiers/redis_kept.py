"""An embedded server that comes back when it ends before its owner does."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from kvstore.errors import TierError
from kvstore.tiers.redis_embedded import EmbeddedRedis

_log = logging.getLogger(__name__)

_STEADY_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 30.0


class KeptRedis:
    """An ``EmbeddedRedis`` that comes back, empty, under the same ``url``. Use ``start``, then ``close``.

    Before each new start there is a pause, which doubles up to half a minute with every server that did
    not live for a minute: six starts in the first minute, two in each further one.
    """

    def __init__(self, server: EmbeddedRedis, first_pause_seconds: float) -> None:
        self._server = server
        self._first_pause = first_pause_seconds
        self._closing = threading.Event()
        # It lives as long as its servers: Linux ends a server with the thread that started it.
        self._thread = threading.Thread(target=self._keep, name="kvstore-embedded-redis", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, first_pause_seconds: float = 0.5) -> Self:
        """Start a server and wait until it answers. Raises TierError."""
        return cls(EmbeddedRedis.start(), first_pause_seconds)

    @property
    def url(self) -> str:
        """How clients reach it."""
        return self._server.url

    def close(self) -> None:
        """End the server, with its contents. Idempotent."""
        self._closing.set()
        self._server.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self) -> None:
        pause = self._first_pause
        while True:
            status = self._server.wait(_STEADY_SECONDS)
            if status is None:
                pause, status = self._first_pause, self._server.wait()
            if self._closing.is_set():
                return
            _log.warning(
                "the embedded redis %s: what it had is lost, another is started in %g s",
                f"was ended by signal {-status}" if status and status < 0 else f"ended with status {status}",
                pause,
            )
            while not self._closing.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                if self._start_again():
                    break

    def _start_again(self) -> bool:
        port = self._server.port
        self._server.close()
        try:
            self._server = EmbeddedRedis.start(port=port)
        except (TierError, OSError) as error:
            _log.warning("the embedded redis was not started again: %s", error)
            return False
        _log.info("the embedded redis runs again, and is empty")
        if self._closing.is_set():
            self._server.close()
        return True
