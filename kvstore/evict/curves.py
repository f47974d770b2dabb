"""What a chain is worth by kind and age: the Gittins index of its hazard, for the kinds asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

BUCKETS = 32
"""Ages are told apart by bucket: 2 s wide at first, each 1.4 times as wide as the one before."""
_SPAN = 2.0
_GROWTH = 1.4
EDGES = _SPAN * (_GROWTH ** np.arange(BUCKETS + 1) - 1)
WIDTHS = np.diff(EDGES)
MIDDLES = (EDGES[:-1] + EDGES[1:]) / 2
_EDGES: list[float] = EDGES.tolist()
_WIDTHS: list[float] = WIDTHS.tolist()
_UPPER = _EDGES[1:BUCKETS]
_LEAST_RATE = 1e-12


def bucket(age: float) -> int:
    """The bucket of an age in seconds."""
    return bisect_right(_UPPER, age)


def buckets(ages: _Floats) -> _Ints:
    """The bucket of each age."""
    return np.searchsorted(EDGES[1:BUCKETS], ages, side="right")


class Curves:
    """Worth by kind and age under one state of the model; ``rates_of`` gives rates by kind and bucket.

    Within a bucket it is interpolated. Before age 0 nobody comes, and keeping a chain costs.
    """

    def __init__(self, rates_of: Callable[[_Ints], _Floats]) -> None:
        self._rates_of = rates_of
        self._index = np.zeros((0, BUCKETS + 1))
        """At the beginning of each bucket, and at the end of the last one."""
        self._wait = np.zeros((0, 2))
        """Hits, and seconds, to expect of a chain that is kept from age 0 to its best stopping age."""
        self._known = bytearray()

    def cover(self, kinds: int) -> None:
        """There are so many kinds now."""
        self._known.extend(bytes(kinds - len(self._known)))
        if len(self._index) < kinds:
            more = max(64, kinds // 2)
            self._index = np.concatenate((self._index, np.zeros((more, BUCKETS + 1))))
            self._wait = np.concatenate((self._wait, np.zeros((more, 2))))

    def clear(self) -> None:
        """The model has changed."""
        self._known = bytearray(len(self._known))

    def worth(self, kind: int, age: float) -> float:
        """Of one chain."""
        if not self._known[kind]:
            self._compute(np.array([kind]))
        if age < 0:
            return float(self._wait.item(kind, 0) / (self._wait.item(kind, 1) - age))
        at = bisect_right(_UPPER, age)
        start: float = self._index.item(kind, at)
        end: float = self._index.item(kind, at + 1)
        return start + (end - start) * (age - _EDGES[at]) / _WIDTHS[at]

    def worths(self, kinds: _Ints, ages: _Floats) -> _Floats:
        """Of many chains."""
        asked = np.zeros(len(self._known), dtype=np.bool_)
        asked[kinds] = True
        unknown = np.flatnonzero(asked > np.frombuffer(self._known, dtype=np.bool_))
        if len(unknown):
            self._compute(unknown)
        at = buckets(ages)
        start = self._index[kinds, at]
        worth = start + (self._index[kinds, at + 1] - start) * (ages - EDGES[at]) / WIDTHS[at]
        if len(early := np.flatnonzero(ages < 0)):
            hits, seconds = self._wait[kinds[early]].T
            worth[early] = hits / (seconds - ages[early])
        return worth

    def _compute(self, kinds: _Ints) -> None:
        indexes = gittins(self._rates_of(kinds))
        self._index[kinds] = [[*each.worth, each.worth[-1]] for each in indexes]
        self._wait[kinds] = [each.wait for each in indexes]
        for kind in kinds.tolist():
            self._known[kind] = 1


class Gittins(NamedTuple):
    """Most hits a second that keeping a chain can bring, from each bucket on; (hits, seconds) from age 0."""

    worth: list[float]
    wait: tuple[float, float]


def gittins(rates: _Floats) -> list[Gittins]:
    """The index of each row of hazards by bucket; constant hazard within a bucket.

    From the last bucket backwards: a span of buckets that is worth less than the one behind it is
    joined to that, since who keeps a chain through the former keeps it through the latter too. So
    each bucket is joined at most once.
    """
    going = np.maximum(rates, _LEAST_RATE)
    stay = np.exp(-going * WIDTHS)
    hit = -np.expm1(-going * WIDTHS)
    seconds = hit / going
    return [_index(*row) for row in zip(hit.tolist(), seconds.tolist(), stay.tolist(), strict=True)]


def _index(hit: list[float], seconds: list[float], stay: list[float]) -> Gittins:
    spans = [(0.0, 0.0, 0.0, -1.0)]
    worth: list[float] = []
    hits = kept = 0.0
    for hits, kept, left in zip(reversed(hit), reversed(seconds), reversed(stay), strict=True):
        ratio = hits / kept
        while (behind := spans[-1])[3] > ratio:
            hits += left * behind[0]
            kept += left * behind[1]
            left *= behind[2]
            ratio = hits / kept
            spans.pop()
        spans.append((hits, kept, left, ratio))
        worth.append(ratio)
    worth.reverse()
    return Gittins(worth, (hits, kept))
