"""What the connector counts, in sums that add up over ranks and steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

COUNTERS = {
    "lookups": "Requests for which the sidecar was asked.",
    "late_lookups": "Requests that were computed since the answer did not come in time.",
    "hits": "Requests for which blocks were loaded, or tried to be.",
    "loaded_tokens": "Tokens whose KV was loaded.",
    "failed_load_blocks": "Engine blocks that could not be loaded and were computed instead.",
    "loaded_bytes": "Bytes copied into the engine, all ranks.",
    "load_seconds": "Time that loads took, all ranks.",
    "saved_blocks": "Blocks that became visible to others, all ranks.",
    "saved_bytes": "Bytes copied out of the engine, all ranks.",
    "save_seconds": "Time that saves took, all ranks.",
    "dropped_saves": "Saves given up since they were computed from a load that failed.",
    "refused_saves": "Saves not begun since earlier ones still pin too many blocks.",
    "failed_saves": "Saves that came to nothing.",
    "server_failures": "Calls to the sidecar that came to nothing.",
    "scheduler_seconds": "Time that the scheduler spent in the connector.",
    "worker_seconds": "Time that the workers spent in the connector, outside of its threads.",
}
WAITS = "scheduler_wait_seconds"
"""What each step of the scheduler that waited for answers waited for them: a list."""

Sums = dict[str, Any]
"""Floats by name of a counter, and the list of ``WAITS``."""


class Tally:
    """Sums since they were last taken. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Sums = {}

    def add(self, name: str, value: float) -> None:
        """Add to one of ``COUNTERS``."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + value

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._sums.setdefault(WAITS, []).append(seconds)

    @contextmanager
    def span(self, name: str, clock: Callable[[], float]) -> Iterator[None]:
        """Time a piece of the caller's thread into a sum."""
        began = clock()
        try:
            yield
        finally:
            self.add(name, clock() - began)

    def take(self) -> Sums:
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums


def merge(into: Sums, other: Sums) -> None:
    """Add sums to sums."""
    for name, value in other.items():
        into[name] = into[name] + value if name in into else value
