"""Chains under watch: how long, at which ages, each could have been continued since it was last counted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.evict.hazard import BUCKETS, bucket, spans

_FREE = -1


class Watched:
    """Seconds at risk and continuations of chains by kind and age, counted in batches.

    A chain is a row of columns, so that a batch costs array operations and no loop.
    """

    def __init__(self) -> None:
        self._kind = np.full(0, _FREE, dtype=np.int64)
        self._since = np.zeros(0)
        self._counted = np.zeros(0)
        self._free: list[int] = []
        self._events: list[int] = []
        self._ended: list[tuple[int, float, float]] = []
        self._kinds = 0

    @property
    def waiting(self) -> int:
        """Chains that have ended since the last ``collect``."""
        return len(self._ended)

    def kinds(self) -> NDArray[np.int64]:
        """The kinds of the chains that are watched now, each once."""
        return np.unique(self._kind[self._kind != _FREE])

    def begin(self, kind: int, now: float) -> int:
        """Watch a chain that can be continued from ``now`` on; the row that names it."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._kind[row] = kind
        self._since[row] = now
        self._counted[row] = 0
        self._kinds = max(self._kinds, kind + 1)
        return row

    def end(self, row: int | None, now: float, *, continued: bool) -> None:
        """A chain was continued, or is watched no longer."""
        if row is None:
            return
        kind, age = int(self._kind[row]), max(0.0, now - float(self._since[row]))
        self._ended.append((kind, float(self._counted[row]), age))
        if continued:
            self._events.append(kind * BUCKETS + bucket(age))
        self._kind[row] = _FREE
        self._free.append(row)

    def change(self, row: int | None, kind: int, since: float) -> None:
        """A chain is of another kind, and can be continued from another time on."""
        if row is None:
            return
        self._kind[row] = kind
        if since != self._since[row]:
            self._since[row] = since
            self._counted[row] = 0
        self._kinds = max(self._kinds, kind + 1)

    def collect(self, now: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(kinds, buckets) of continuations and of seconds at risk since the last time."""
        size = self._kinds
        live = np.flatnonzero(self._kind != _FREE)
        ages = np.maximum(now - self._since[live], 0)
        ended = np.array(self._ended, dtype=np.float64).reshape(-1, 3)
        kinds = np.concatenate((self._kind[live], ended[:, 0].astype(np.int64)))
        before = np.concatenate((self._counted[live], ended[:, 1]))
        after = np.concatenate((ages, ended[:, 2]))
        exposure = spans(after, kinds, size) - spans(before, kinds, size)
        events = np.bincount(self._events, minlength=size * BUCKETS).astype(np.float64).reshape(size, BUCKETS)
        self._counted[live] = ages
        self._events.clear()
        self._ended.clear()
        return events, exposure

    def _grow(self) -> None:
        size = len(self._kind)
        more = max(64, size // 2)
        self._kind = np.concatenate((self._kind, np.full(more, _FREE, dtype=np.int64)))
        self._since = np.concatenate((self._since, np.zeros(more)))
        self._counted = np.concatenate((self._counted, np.zeros(more)))
        self._free.extend(range(size + more - 1, size - 1, -1))
