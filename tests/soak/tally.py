"""Counters in shared memory, which outlive the processes that count, however these end."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Count(IntEnum):
    """What one worker counts, over all its lives."""

    OPERATIONS = 0
    READ_BLOCKS = 1
    WRITTEN_BLOCKS = 2
    WRONG_BLOCKS = 3
    """Blocks that were said to be right and were not: never."""
    STALE_BLOCKS = 4
    """Blocks that changed while they were copied, and were known to have."""
    SHORTENED = 5
    """Reads that ended with less than was promised."""
    TURNED_AWAY = 6
    """Calls that came to nothing: no server, or a limit, or too late."""
    OVERSLEPT = 7
    """Writes that went on after their deadline, and came to nothing."""
    PARKED = 8
    """1 while it does nothing, because it was asked to."""


class Tally:
    """One row of counters a worker, and two flags from their director to all of them."""

    def __init__(self, path: Path, workers: int) -> None:
        size = (workers + 1) * len(Count) * 8
        if not path.exists():
            path.write_bytes(bytes(size))
        cells: NDArray[np.int64] = np.memmap(path, dtype=np.int64, mode="r+", shape=(workers + 1, len(Count)))
        self._flags = cells[workers]
        self._rows = cells[:workers]

    @property
    def pausing(self) -> bool:
        """Whether workers are to finish what they do, and begin nothing."""
        return bool(self._flags[0])

    @pausing.setter
    def pausing(self, value: bool) -> None:
        self._flags[0] = value

    @property
    def ending(self) -> bool:
        """Whether workers are to end."""
        return bool(self._flags[1])

    @ending.setter
    def ending(self, value: bool) -> None:
        self._flags[1] = value

    def add(self, worker: int, count: Count, amount: int = 1) -> None:
        self._rows[worker, count] += amount

    def park(self, worker: int, *, parked: bool) -> None:
        self._rows[worker, Count.PARKED] = parked

    @property
    def all_parked(self) -> bool:
        return bool(self._rows[:, Count.PARKED].all())

    def total(self, count: Count) -> int:
        return int(self._rows[:, count].sum())
