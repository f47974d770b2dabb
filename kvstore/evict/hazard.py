"""How soon a chain of blocks is wanted again: a hazard by age, learned online, and what it is worth.

A chain is the blocks that one request was the last to use. Its hazard is the rate, per second, at which
a later request goes on where it ended. It is learned from every chain that is watched, the ones
that were never continued too: those that end otherwise are censored, and bias nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
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
_WIDTHS = np.diff(EDGES)
_MIDDLES = (EDGES[:-1] + EDGES[1:]) / 2
_UPPER = EDGES[1:BUCKETS].tolist()

# What is assumed before anything was seen: half of all chains come back, the later the rarer. An assumption
# weighs as much as five events.
_PRIOR_SECONDS = 30.0
_PRIOR_SHARE = 0.5
_PRIOR_EVENTS = 5.0
_GROUP_EVENTS = 5.0
_DECAY = ((EDGES[:-1] + _PRIOR_SECONDS) / (EDGES[1:] + _PRIOR_SECONDS)) ** 1.5
_GENERAL = _PRIOR_SHARE / (_MIDDLES + _PRIOR_SECONDS)

_CONFIDENCE = 5.0
_CONFIDENCE_MOST = 400.0
_NEIGHBOURS = 0.25
_UNEVEN = 6
"""Age over last gap is told apart up to so many buckets in either direction."""
NO_GAP = -1


class Group(IntEnum):
    """What kind of chain: the first request of a session, a later one, or what a later one did not use.

    A request that says that its session ended, or pauses, is of a kind of its own.
    """

    FIRST = 0
    LATER = 1
    LEFTOVER = 2
    ENDED = 3
    IDLE = 4


class Kind(NamedTuple):
    """The features of a chain that its hazard depends on. Sizes and turns are classes on a log scale."""

    group: Group
    turn: int
    fresh: int
    """Class of how many of its blocks nobody had asked for before."""
    length: int
    gap: int
    """Class of the time since the chain that it goes on from was used, or NO_GAP."""


TURN_CLASSES = 14
SIZE_CLASSES = 12


def turn_class(turn: int) -> int:
    """0 to 5 as they are, then by doublings: what came back often is told from what came back once."""
    return turn if turn < 6 else min(TURN_CLASSES - 2, turn.bit_length() + 3)


LEFTOVER_TURN = TURN_CLASSES - 1


def size_class(blocks: int) -> int:
    """Doublings: 0 for up to one block, 11 for more than 1,024."""
    return min(SIZE_CLASSES - 1, (blocks - 1).bit_length()) if blocks > 1 else 0


def bucket(age: float) -> int:
    """The bucket of an age in seconds."""
    return bisect_right(_UPPER, age)


def gap_class(gap: float) -> int:
    """The bucket of a gap, every other one: fewer kinds to learn, and no worse."""
    return bucket(gap) & ~1


class _Multiplier:
    """One factor of the hazard by the value of one feature, with the confidence in each."""

    def __init__(self, values: int) -> None:
        self.factor = np.ones(values)
        self._confidence = np.full(values, _CONFIDENCE)

    def learn(self, values: _Ints, events: _Floats, expected: _Floats) -> None:
        """Move each factor by what was seen over what the whole model expected."""
        size = len(self.factor)
        seen = np.bincount(values, events, size)
        foreseen = np.bincount(values, expected, size)
        self.factor *= (self._confidence + seen) / (self._confidence + foreseen)
        self._confidence = np.minimum(self._confidence + seen, _CONFIDENCE_MOST)


class HazardModel:
    """Rates by kind and age: a base by group and age, times one factor for each feature.

    Bounded: there are finitely many kinds. Not updated until ``learn``, so that within a batch all
    chains are judged alike.
    """

    def __init__(self) -> None:
        self._number_of: dict[Kind, int] = {}
        self._kind_of: list[Kind] = []
        self._kinds = np.zeros((0, len(Kind._fields)), dtype=np.int64)
        self._turn = _Multiplier(TURN_CLASSES)
        self._fresh = _Multiplier(SIZE_CLASSES)
        self._shape = _Multiplier(SIZE_CLASSES * SIZE_CLASSES + 1)
        self._pace = _Multiplier(2 * _UNEVEN + 2)
        self._events = np.zeros((len(Group), BUCKETS))
        self._exposure = np.zeros((len(Group), BUCKETS))
        self._base = _base(self._events, self._exposure)
        self._curves: dict[int, _Curve] = {}

    def number(self, kind: Kind) -> int:
        """A small number for a kind, by which it is named from then on."""
        number = self._number_of.get(kind)
        if number is None:
            number = self._number_of[kind] = len(self._number_of)
            if number == len(self._kinds):
                more = np.zeros((max(64, number), len(Kind._fields)), dtype=np.int64)
                self._kinds = np.concatenate((self._kinds, more))
            self._kinds[number] = kind
            self._kind_of.append(kind)
        return number

    def kind(self, number: int) -> Kind:
        return self._kind_of[number]

    def worth(self, kind: int, age: float) -> float:
        """The Gittins index of a chain: most hits per second that keeping it from this age on can bring.

        The best stopping age is looked for, so a chain that is due later is not taken for a dead one.
        Within a bucket it is interpolated. Before age 0 nobody comes, and keeping it costs.
        """
        curve = self._curves.get(kind)
        if curve is None:
            self.weigh(np.array([kind]))
            curve = self._curves[kind]
        if age < 0:
            return curve.hits / (curve.seconds - age)
        at = bisect_right(_UPPER, age)
        return curve.start[at] + curve.slope[at] * age

    def rates(self, kinds: _Ints) -> _Floats:
        """Hazard, per second, of each kind in each bucket."""
        group = self._kinds[kinds, 0]
        return np.asarray(self._base[group] * self._factors(kinds))

    def learn(self, events: _Floats, exposure: _Floats) -> None:
        """Take in what happened since last time: (kinds, buckets) of continuations and of seconds watched."""
        busy = np.flatnonzero(exposure.any(axis=1) | events.any(axis=1))
        events, exposure = events[busy], exposure[busy]
        expected = self.rates(busy) * exposure
        weighted = self._factors(busy) * exposure
        columns = self._kinds[busy]
        for group in Group:
            of_group = columns[:, 0] == group
            self._events[group] += _smooth(events[of_group].sum(axis=0))
            self._exposure[group] += _smooth(weighted[of_group].sum(axis=0))
        seen, foreseen = events.sum(axis=1), expected.sum(axis=1)
        self._turn.learn(columns[:, 1], seen, foreseen)
        self._fresh.learn(columns[:, 2], seen, foreseen)
        self._shape.learn(_shapes(columns), seen, foreseen)
        self._pace.learn(_paces(columns).ravel(), events.ravel(), expected.ravel())
        self._base = _base(self._events, self._exposure)
        self._curves.clear()

    def fade(self) -> None:
        """Halve what was seen, so that the base follows a workload that changes."""
        self._events /= 2
        self._exposure /= 2

    def _factors(self, kinds: _Ints) -> _Floats:
        columns = self._kinds[kinds]
        by_kind = (
            self._turn.factor[columns[:, 1]]
            * self._fresh.factor[columns[:, 2]]
            * self._shape.factor[_shapes(columns)]
        )
        return np.asarray(by_kind[:, None] * self._pace.factor[_paces(columns)])

    def weigh(self, kinds: _Ints) -> None:
        """Compute what these kinds are worth at every age: all at once costs little more than one."""
        rates = self.rates(kinds)
        worth = gittins(rates)
        slope = np.zeros_like(worth)
        slope[:, :-1] = np.diff(worth) / _WIDTHS[:-1]
        start = worth - slope * EDGES[:BUCKETS]
        hits, seconds = _best_stop(rates)
        rows = (start.tolist(), slope.tolist(), hits.tolist(), seconds.tolist())
        self._curves.update(zip(kinds.tolist(), map(_Curve, *rows), strict=True))


class _Curve(NamedTuple):
    """Worth by age, as a line in each bucket; hits and seconds to expect of a chain kept from age 0 on."""

    start: list[float]
    slope: list[float]
    hits: float
    seconds: float


def gittins(rates: _Floats) -> _Floats:
    """For each row of hazards by bucket, and each bucket, the best ratio of hits to seconds kept.

    From the last bucket backwards, for all stopping ages at once; constant hazard within a bucket.
    """
    going = np.maximum(rates, 1e-12)
    stay = np.exp(-going * _WIDTHS)
    hit = 1 - stay
    seconds = hit / going
    hits = np.zeros_like(rates)
    kept = np.zeros_like(rates)
    best = np.zeros_like(rates)
    for start in range(BUCKETS - 1, -1, -1):
        here = stay[:, start, None]
        hits[:, start:] = hit[:, start, None] + here * hits[:, start:]
        kept[:, start:] = seconds[:, start, None] + here * kept[:, start:]
        best[:, start] = (hits[:, start:] / kept[:, start:]).max(axis=1)
    return best


def _best_stop(rates: _Floats) -> tuple[_Floats, _Floats]:
    """Expected hits, and seconds kept, of each row that is kept from age 0 to its best stopping age."""
    stay = np.exp(-rates * _WIDTHS)
    alive = np.ones_like(stay)
    alive[:, 1:] = np.cumprod(stay[:, :-1], axis=1)
    hits = np.cumsum(alive * (1 - stay), axis=1)
    seconds = np.cumsum(alive * (1 - stay) / np.maximum(rates, 1e-12), axis=1)
    rows, best = np.arange(len(rates)), (hits / seconds).argmax(axis=1)
    return hits[rows, best], seconds[rows, best]


def _base(events: _Floats, exposure: _Floats) -> _Floats:
    """Rates by group and bucket. A bucket in which little was seen goes on from the one before.

    Groups share what they know: each is drawn to the common curve, scaled by its own total.
    """
    pooled_events = events[: Group.LEFTOVER].sum(axis=0).tolist()
    pooled_exposure = exposure[: Group.LEFTOVER].sum(axis=0).tolist()
    common = np.zeros(BUCKETS)
    for at in range(BUCKETS):
        assumed = _PRIOR_SHARE / (1 + _PRIOR_SECONDS)
        if at:
            assumed = min(common[at - 1], _GENERAL[at]) * _DECAY[at]
        common[at] = (pooled_events[at] + _PRIOR_EVENTS) / (pooled_exposure[at] + _PRIOR_EVENTS / assumed)
    total = events.sum(axis=1) + _GROUP_EVENTS
    scale = total / ((exposure * common).sum(axis=1) + _GROUP_EVENTS)
    assumed_of = scale[:, None] * common
    return np.asarray((events + _GROUP_EVENTS) / (exposure + _GROUP_EVENTS / assumed_of))


def _smooth(row: _Floats) -> _Floats:
    smoothed = row.copy()
    smoothed[1:] += _NEIGHBOURS * row[:-1]
    smoothed[:-1] += _NEIGHBOURS * row[1:]
    return smoothed


def _shapes(columns: _Ints) -> _Ints:
    """Length and fresh part together, for chains that go on from another; one value for all others."""
    later = columns[:, 0] == Group.LATER
    return np.where(later, columns[:, 3] * SIZE_CLASSES + columns[:, 2], SIZE_CLASSES * SIZE_CLASSES)


def _paces(columns: _Ints) -> _Ints:
    """Age relative to the last gap by kind and bucket; one value for chains without a gap."""
    gap = columns[:, 4, None]
    relative = np.clip(np.arange(BUCKETS) - gap, -_UNEVEN, _UNEVEN) + _UNEVEN
    return np.where(gap == NO_GAP, 2 * _UNEVEN + 1, relative)


def spans(ages: _Floats, kinds: _Ints, size: int) -> _Floats:
    """(size, BUCKETS) seconds from age 0 to each age, added up by kind."""
    at = np.searchsorted(EDGES[1:BUCKETS], ages, side="right")
    cells = kinds * BUCKETS + at
    full = np.bincount(cells, minlength=size * BUCKETS).reshape(size, BUCKETS)
    partial = np.bincount(cells, ages - EDGES[at], size * BUCKETS).reshape(size, BUCKETS)
    beyond = full[:, ::-1].cumsum(axis=1)[:, ::-1] - full
    return np.asarray(partial + beyond * _WIDTHS)
