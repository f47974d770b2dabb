"""How much of a chain's end the request that goes on from it leaves unused."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from kvstore.evict.columns import WHOLE
from kvstore.evict.hazard import TURN_CLASSES

_FORKS = 1.0
_USES = 1.0
_LEAST_COUNT = 1e-6
"""What a count fades to at least, if it ever was one: their sums are divided by, whatever was seen since."""


class Tails:
    """Shares of continuations by blocks left unused, and of those that use nothing of what was new.

    Who goes on from a conversation leaves a block or two; who asks another question about the same
    document leaves the whole question. The first is counted in blocks, the second by turn.
    """

    def __init__(self) -> None:
        self._counts = [1.0, 1.0]
        self._shares = [0.5, 1.0]
        self._forks = [_FORKS] * TURN_CLASSES
        self._uses = [_USES] * TURN_CLASSES
        self._past = [0.5] * TURN_CLASSES
        self._columns = self._as_columns()

    def count(self, unused: int, fresh: int, turn: int) -> None:
        """A chain of that turn class, of which the last ``fresh`` blocks were new, was continued."""
        if unused >= fresh:
            self._forks[turn] += 1
            return
        self._uses[turn] += 1
        if unused >= len(self._counts):
            self._counts.extend([0.0] * (unused + 1 - len(self._counts)))
        self._counts[unused] += 1

    def refresh(self, *, fade: bool) -> None:
        """Recompute the shares."""
        if fade:
            for counts in (self._counts, self._forks, self._uses):
                counts[:] = [count and max(_LEAST_COUNT, count / 2) for count in counts]
        total = sum(self._counts)
        running = 0.0
        shares = []
        for count in self._counts:
            running += count
            shares.append(running / total)
        self._shares = shares
        self._past = [uses / (uses + forks) for uses, forks in zip(self._uses, self._forks, strict=True)]
        self._columns = self._as_columns()

    def share(self, missing: int, fresh: int, turn: int) -> float:
        """Share of continuations that a chain without its last ``missing`` blocks still serves in full."""
        if missing >= fresh:
            return 1.0
        shares = self._shares
        return (shares[missing] if missing < len(shares) else 1.0) * self._past[turn]

    def shares(self, cuts: NDArray[np.int64], turns: NDArray[np.int64]) -> NDArray[np.float64]:
        """``share`` of many, by their columns."""
        shares, past = self._columns
        found = shares[np.minimum(cuts, len(shares) - 1)] * past[turns]
        return np.where(cuts == WHOLE, 1.0, found)

    def droppable(self, missing: int, fresh: int, turn: int, share: float) -> int:
        """How many more blocks may go while the share is at most ``share``; at least one."""
        if share >= 1.0:
            return 1 << 30
        if missing >= fresh:
            return 1
        past = self._past[turn]
        if share >= past:
            return fresh - missing
        return max(1, min(fresh, bisect_right(self._shares, share / past)) - missing)

    def _as_columns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.array([*self._shares, 1.0]), np.array(self._past)
