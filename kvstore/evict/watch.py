"""Chains under watch: how long, at which ages, each could have been continued since it was last counted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.evict.columns import UNWATCHED, Columns, floats, integers
from kvstore.evict.curves import BUCKETS, bucket
from kvstore.evict.hazard import spans

_Floats = NDArray[np.float64]


class Watched:
    """Seconds at risk and continuations of chains by kind and age, counted in batches.

    A chain is a row of ``columns``, so that a batch costs array operations and no loop.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._standing: _Floats = np.zeros((0, BUCKETS))
        """Seconds of chains that are watched now, by kind and bucket, until they were counted last."""
        self._counted_at = 0.0
        self._ended_kinds: list[int] = []
        self._ended_ages: list[float] = []
        self._events: list[int] = []
        self._kinds = 0

    @property
    def waiting(self) -> int:
        """Chains that have ended since the last ``collect``."""
        return len(self._ended_kinds)

    @property
    def continued(self) -> int:
        """Those of them that were continued."""
        return len(self._events)

    def begin(self, row: int, kind: int, since: float) -> None:
        """Watch a chain that can be continued from then on, which is not before the last ``collect``."""
        self._columns.kind[row] = kind
        self._columns.since[row] = since
        self._kinds = max(self._kinds, kind + 1)

    def end(self, row: int, now: float, *, continued: bool) -> None:
        """A chain was continued, or is watched no longer, if it is watched."""
        kind = self._columns.kind[row]
        if kind == UNWATCHED:
            return
        age = max(0.0, now - self._columns.since[row])
        self._ended_kinds.append(kind)
        self._ended_ages.append(age)
        if continued:
            self._events.append(kind * BUCKETS + bucket(age))
        self._columns.kind[row] = UNWATCHED

    def change(self, row: int, kind: int, since: float) -> None:
        """A chain is of another kind, and can be continued from another time on."""
        columns = self._columns
        self._stand(columns.kind[row], columns.since[row], -1)
        self.begin(row, kind, since)
        self._stand(kind, since, 1)

    def collect(self, now: float) -> tuple[_Floats, _Floats]:
        """(kinds, buckets) of continuations and of seconds at risk since the last time."""
        size = self._kinds
        kinds = integers(self._columns.kind)
        live = np.flatnonzero(kinds != UNWATCHED)
        ages = np.maximum(now - floats(self._columns.since)[live], 0)
        # One sum for both: chains that have ended count for kinds of their own.
        ended = np.array(self._ended_kinds, dtype=np.int64) + size
        all_ages = np.concatenate((ages, self._ended_ages))
        standing, over = spans(all_ages, np.concatenate((kinds[live], ended)), 2 * size).reshape(
            2, size, BUCKETS
        )
        exposure = standing + over
        exposure[: len(self._standing)] -= self._standing
        events = np.bincount(self._events, minlength=size * BUCKETS).astype(np.float64).reshape(size, BUCKETS)
        self._standing = standing
        self._counted_at = now
        for done in (self._events, self._ended_kinds, self._ended_ages):
            done.clear()
        return events, exposure

    def _stand(self, kind: int, since: float, sign: int) -> None:
        age = self._counted_at - since
        if age <= 0:
            return
        if kind >= len(self._standing):
            more = np.zeros((self._kinds - len(self._standing), BUCKETS))
            self._standing = np.concatenate((self._standing, more))
        self._standing[kind] += sign * spans(np.array([age]), np.zeros(1, dtype=np.int64), 1)[0]
