"""How threads hand results back to the store's one owner."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Mailbox:
    """Runs blocking work on threads and its continuation on the owner's thread.

    ``wake`` is called from a worker thread whenever there is something to collect; an event loop
    passes ``loop.call_soon_threadsafe`` bound to its own pump, a plain owner needs none.
    """

    def __init__(self, threads: int, wake: Callable[[], None] | None = None) -> None:
        self._executor = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="kvstore-io")
        # A single thread does everything in one order.
        self._questions = (
            ThreadPoolExecutor(1, thread_name_prefix="kvstore-ask") if threads > 1 else self._executor
        )
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = wake
        self._closed = False
        self.pending = 0
        """Pieces of work whose continuation has not been run."""

    def ask(self, work: Callable[[], _T], then: Callable[[_T | None], None]) -> None:
        """``submit`` for a short question, which must not wait behind payloads."""
        self._run(self._questions, work, then)

    def submit(self, work: Callable[[], _T], then: Callable[[_T | None], None]) -> None:
        """Run ``work`` on a thread, then ``then(result)`` in a later ``collect``.

        ``then`` gets None when the work raised, was cancelled or came after ``close``. Tiers answer
        with outcomes, so an exception is a defect, logged with its traceback, and it must not hang
        those who wait.
        """
        self._run(self._executor, work, then)

    def _run(
        self, executor: ThreadPoolExecutor, work: Callable[[], _T], then: Callable[[_T | None], None]
    ) -> None:
        self.pending += 1
        if self._closed:
            self._done.put(lambda: then(None))
            return

        def finished(future: Future[_T]) -> None:
            result = None
            if not future.cancelled():
                error = future.exception()
                if error is not None:
                    _log.error("background work failed", exc_info=error)
                else:
                    result = future.result()
            self._done.put(lambda: then(result))
            if self._wake is not None:
                self._wake()

        executor.submit(work).add_done_callback(finished)

    def collect(self, timeout: float = 0.0) -> bool:
        """Run the continuations that are due, waiting up to ``timeout`` for the first if one is to come."""
        if not self.pending:
            return False
        try:
            then = self._done.get(timeout=timeout) if timeout > 0 else self._done.get_nowait()
        except queue.Empty:
            return False
        self._go_on(then)
        while not self._done.empty():
            self._go_on(self._done.get_nowait())
        return True

    def close(self) -> None:
        """Let running work end (it has deadlines), drop what has not begun. Idempotent."""
        self._closed = True
        for executor in (self._questions, self._executor):
            executor.shutdown(wait=True, cancel_futures=True)
        self.collect()

    def _go_on(self, then: Callable[[], None]) -> None:
        self.pending -= 1
        then()
