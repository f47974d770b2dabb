"""Chains as rows of columns: each is written as it changes, and all are read at once."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

UNWATCHED = -1
WHOLE = -1
NOBODY = 0
_ROWS = 64


class Columns:
    """What has to be known of all chains at once, by row.

    ``kind`` of the hazard that a chain is watched for, UNWATCHED where it is for none, and ``since`` when;
    ``number`` of the chain while its end may go, else NOBODY. Its worth is that of its kind and age, times
    ``favour``, times the share of continuations that do without its last ``cut`` blocks after so many
    turns, ``step``; WHOLE: all do.
    """

    def __init__(self) -> None:
        self.kind = array("q")
        self.since = array("d")
        self.number = array("q")
        self.favour = array("d")
        self.cut = array("q")
        self.step = array("q")
        self._free: list[int] = []

    def take(self) -> int:
        """A row for a new chain."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.favour[row] = 1.0
        return row

    def give_back(self, row: int) -> None:
        """A chain is forgotten."""
        self.kind[row] = UNWATCHED
        self.number[row] = NOBODY
        self._free.append(row)

    def _grow(self) -> None:
        size = len(self.kind)
        more = max(_ROWS, size // 2)
        self.kind.extend([UNWATCHED] * more)
        self.cut.extend([WHOLE] * more)
        for ints in (self.number, self.step):
            ints.extend([0] * more)
        for floats in (self.since, self.favour):
            floats.extend([0.0] * more)
        self._free.extend(range(size + more - 1, size - 1, -1))


def integers(column: array[int]) -> NDArray[np.int64]:
    """A column as it is now; to be let go before the column grows."""
    return np.frombuffer(column, dtype=np.int64) if column else np.zeros(0, dtype=np.int64)


def floats(column: array[float]) -> NDArray[np.float64]:
    """As ``integers``."""
    return np.frombuffer(column, dtype=np.float64) if column else np.zeros(0)
