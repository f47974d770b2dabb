"""Which blocks of the host tier redis has, too, as far as this store knows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.block import SlotArray
from kvstore.extents import grown

_KNOWN_SHARE = 0.75
"""Of its time to live for which a key is taken to be there: its readers renew it when less is left."""
_ON_ITS_WAY = np.inf


class Copies:
    """By slot, until when redis has a copy. Owner: one store; it is told of every block that leaves.

    A server that evicts early, or was emptied, is not noticed: those blocks are missed once, when they
    have left the host tier. Nothing is known after a restart, so copies are made once more then.
    """

    def __init__(self, ttl_seconds: float) -> None:
        self._known_seconds = ttl_seconds * _KNOWN_SHARE
        self._until = np.zeros(0)

    def lacking(self, slots: SlotArray, now: float) -> NDArray[np.bool_]:
        """Which of these slots hold blocks of which redis has no copy, and is not being given one."""
        self._cover(slots)
        lacking: NDArray[np.bool_] = self._until[slots] <= now
        return lacking

    def coming(self, slots: SlotArray) -> NDArray[np.bool_]:
        """Which of these slots hold blocks that redis is being given now."""
        self._cover(slots)
        coming: NDArray[np.bool_] = self._until[slots] == _ON_ITS_WAY
        return coming

    def begin(self, slots: SlotArray) -> None:
        """Copies of these are on their way."""
        self._cover(slots)
        self._until[slots] = _ON_ITS_WAY

    def end(self, slots: SlotArray, now: float, *, there: NDArray[np.bool_]) -> None:
        """Redis has copies of those that are ``there``, stored or read just now, and of no others."""
        self._cover(slots)
        self._until[slots] = np.where(there, now + self._known_seconds, 0.0)

    def forget(self, slots: SlotArray) -> None:
        """Other blocks will be in these slots."""
        self._cover(slots)
        self._until[slots] = 0.0

    def _cover(self, slots: SlotArray) -> None:
        size = int(slots.max(initial=-1)) + 1
        if size > len(self._until):
            self._until = grown(self._until, max(size, len(self._until) * 3 // 2), 0)
