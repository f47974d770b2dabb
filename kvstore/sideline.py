"""Work beside the owner's thread: a bounded queue, one thread, and a count of what did not fit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")

QUEUE_BYTES = 16 << 20
PAUSE_SECONDS = 0.0005
"""Between two items: the owner, who may wait for the interpreter's lock, is let go first."""
IDLE_SECONDS = 0.5

_log = logging.getLogger(__name__)


def _nothing() -> None:
    return


class Sideline(Generic[Item]):
    """Hands items to ``work`` on a thread of its own, in order. ``put`` never waits: one owner calls it.

    An item that ``work`` fails on is logged and counted in ``failures``, and the next one follows. ``idle``
    must not raise.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Item], None],
        *,
        idle: Callable[[], None] = _nothing,
        queue_bytes: int = QUEUE_BYTES,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """``idle`` is called on the thread when nothing is left to do, again and again, and at the end."""
        self._pause_seconds = pause_seconds
        self._work = work
        self._idle = idle
        self._queue: SimpleQueue[tuple[Item, int] | None] = SimpleQueue()
        self._queue_bytes = queue_bytes
        # Each is written by one thread only, so that neither needs a lock.
        self._put_bytes = self._done_bytes = 0
        self._ending = False
        self.dropped = 0
        """Items that came when the queue was full."""
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item, size: int) -> None:
        """Have an item of ``size`` bytes worked on, or counted as dropped."""
        if self._put_bytes - self._done_bytes + size > self._queue_bytes:
            self.dropped += 1
            return
        self._put_bytes += size
        self._queue.put((item, size))

    @property
    def skipped(self) -> int:
        """Items that were dropped, or that ``work`` failed on."""
        return self.dropped + self.failures

    @property
    def idle(self) -> bool:
        """Whether everything that was put is done."""
        return self._put_bytes == self._done_bytes

    def close(self, seconds: float = 5.0) -> bool:
        """Take no more; False when what is queued is not done in time. Idempotent."""
        self._ending = True
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            item, size = entry
            self._work_on(item)
            if self._queue.empty():
                self._idle()
            self._done_bytes += size
            if not self._ending:
                time.sleep(self._pause_seconds)
        self._idle()

    def _next(self) -> tuple[Item, int] | None:
        while True:
            try:
                return self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                self._idle()

    def _work_on(self, item: Item) -> None:
        try:
            self._work(item)
        except Exception:  # noqa: BLE001 - whatever it is, the next item has nothing to do with it
            self.failures += 1
            _log.exception("%s failed", self._thread.name)
