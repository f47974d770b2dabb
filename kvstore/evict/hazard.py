"""How soon a chain of blocks is wanted again: a hazard by age, learned online, and what it is worth.

A chain is the blocks that one request was the last to use. Its hazard is the rate, per second, at which
a later request goes on where it ended. It is learned from every chain that is watched, the ones
that were never continued too: those that end otherwise are censored, and bias nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.evict.curves import BUCKETS, EDGES, MIDDLES, WIDTHS, Curves, bucket, buckets

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

# What is assumed before anything was seen: half of all chains come back, the later the rarer. An assumption
# weighs as much as five events.
_PRIOR_SECONDS = 30.0
_PRIOR_SHARE = 0.5
_PRIOR_EVENTS = 5.0
_GROUP_EVENTS = 5.0
_DECAY = (((EDGES[:-1] + _PRIOR_SECONDS) / (EDGES[1:] + _PRIOR_SECONDS)) ** 1.5).tolist()
_GENERAL = (_PRIOR_SHARE / (MIDDLES + _PRIOR_SECONDS)).tolist()

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


def gap_class(gap: float) -> int:
    """The bucket of a gap, every other one: fewer kinds to learn, and no worse."""
    return bucket(gap) & ~1


# Where the factors for each feature begin in one column of them all.
_FRESH = TURN_CLASSES
_SHAPE = _FRESH + SIZE_CLASSES
_NO_SHAPE = _SHAPE + SIZE_CLASSES * SIZE_CLASSES
_PACE = _NO_SHAPE + 1
_NO_PACE = _PACE + 2 * _UNEVEN + 1
_FACTORS = _NO_PACE + 1
# Behind them, where learning adds up by group and bucket.
_GROUPS = _FACTORS + np.arange(len(Group) * BUCKETS).reshape(len(Group), BUCKETS)
_CELLS = _FACTORS + _GROUPS.size


def _paces() -> _Ints:
    """Age relative to the last gap, by gap (NO_GAP: the last row) and bucket: which factor it has."""
    ages, gaps = np.arange(BUCKETS), np.arange(BUCKETS + 1)
    paces = np.clip(ages - gaps[:, None], -_UNEVEN, _UNEVEN) + _PACE + _UNEVEN
    paces[NO_GAP] = _NO_PACE
    return np.asarray(paces)


_PACES = _paces()


class _Columns(NamedTuple):
    """Kinds as the numbers of their groups, and of the factors of their features."""

    groups: _Ints
    features: _Ints
    paces: _Ints


class HazardModel:
    """Rates by kind and age: a base by group and age, times one factor for each feature.

    Bounded: there are finitely many kinds. Not updated until ``learn``, so that within a batch all
    chains are judged alike.
    """

    def __init__(self) -> None:
        self._number_of: dict[Kind, int] = {}
        self._kind_of: list[Kind] = []
        self._kinds = np.zeros((0, 5), dtype=np.int64)
        self._factor = np.ones(_FACTORS)
        self._confidence = np.full(_FACTORS, _CONFIDENCE)
        self._seen = np.zeros((2, len(Group), BUCKETS))
        """Events, and exposure, by group and bucket."""
        self._base = _base(*self._seen)
        self.curves = Curves(self.rates)
        """What kinds are worth by this model, as it is now."""

    def number(self, kind: Kind) -> int:
        """A small number for a kind, by which it is named from then on."""
        number = self._number_of.get(kind)
        return self._enter(kind) if number is None else number

    def kind(self, number: int) -> Kind:
        return self._kind_of[number]

    def rates(self, kinds: _Ints) -> _Floats:
        """Hazard, per second, of each kind in each bucket."""
        columns = self._columns(kinds)
        return np.asarray(self._base[columns.groups] * self._factors(columns))

    def learn(self, events: _Floats, exposure: _Floats) -> None:
        """Take in what happened since last time: (kinds, buckets) of continuations and of seconds watched."""
        busy = np.flatnonzero((exposure != 0).any(axis=1) | (events != 0).any(axis=1))
        events, exposure = events[busy], exposure[busy]
        columns = self._columns(busy)
        weighted = self._factors(columns) * exposure
        expected = self._base[columns.groups] * weighted
        sums = self._add_up(columns, (events, events), (expected, weighted))
        # Each factor moves by what was seen over what the whole model expected, as far as it is uncertain.
        seen, foreseen = sums[:, :_FACTORS]
        self._factor *= (self._confidence + seen) / (self._confidence + foreseen)
        self._confidence = np.minimum(self._confidence + seen, _CONFIDENCE_MOST)
        added = sums[:, _FACTORS:].reshape(self._seen.shape)
        self._seen += added
        added *= _NEIGHBOURS
        self._seen[..., 1:] += added[..., :-1]
        self._seen[..., :-1] += added[..., 1:]
        self._base = _base(*self._seen)
        self.curves.clear()

    def fade(self) -> None:
        """Halve what was seen, so that the base follows a workload that changes."""
        self._seen /= 2

    def _enter(self, kind: Kind) -> int:
        number = self._number_of[kind] = len(self._kind_of)
        self._kind_of.append(kind)
        self.curves.cover(number + 1)
        if number == len(self._kinds):
            more = np.zeros((max(64, number), self._kinds.shape[1]), dtype=np.int64)
            self._kinds = np.concatenate((self._kinds, more))
        # Length and fresh part count together, for chains that go on from another; one value for all others.
        later = kind.group == Group.LATER
        shape = _SHAPE + kind.length * SIZE_CLASSES + kind.fresh if later else _NO_SHAPE
        self._kinds[number] = kind.group, kind.turn, _FRESH + kind.fresh, shape, kind.gap
        return number

    def _columns(self, kinds: _Ints) -> _Columns:
        rows = self._kinds[kinds]
        return _Columns(rows[:, 0], rows[:, 1:4], _PACES[rows[:, 4]])

    def _factors(self, columns: _Columns) -> _Floats:
        by_kind = np.multiply.reduce(self._factor[columns.features], axis=1)
        return np.asarray(by_kind[:, None] * self._factor[columns.paces])

    @staticmethod
    def _add_up(columns: _Columns, *pairs: tuple[_Floats, _Floats]) -> _Floats:
        """(pairs, cells): of each pair of (kinds, buckets) one by features and pace, the other by group."""
        cells = np.concatenate((columns.features, columns.paces, _GROUPS[columns.groups]), axis=1)
        weights = np.empty((len(pairs), *cells.shape))
        features, paces = columns.features.shape[1], BUCKETS
        for row, (for_factors, for_groups) in zip(weights, pairs, strict=True):
            row[:, :features] = for_factors.sum(axis=1, keepdims=True)
            row[:, features : features + paces] = for_factors
            row[:, features + paces :] = for_groups
        cells = np.concatenate([cells + place * _CELLS for place in range(len(pairs))])
        sums = np.bincount(cells.ravel(), weights.ravel(), len(pairs) * _CELLS)
        return np.asarray(sums.reshape(len(pairs), _CELLS), dtype=np.float64)


def _base(events: _Floats, exposure: _Floats) -> _Floats:
    """Rates by group and bucket. A bucket in which little was seen goes on from the one before.

    Groups share what they know: each is drawn to the common curve, scaled by its own total.
    """
    pooled = zip(
        events[: Group.LEFTOVER].sum(axis=0).tolist(),
        exposure[: Group.LEFTOVER].sum(axis=0).tolist(),
        _GENERAL,
        _DECAY,
        strict=True,
    )
    rates: list[float] = []
    assumed = _PRIOR_SHARE / (1 + _PRIOR_SECONDS)
    for seen, seconds, general, decay in pooled:
        if rates:
            assumed = min(rates[-1], general) * decay
        rates.append((seen + _PRIOR_EVENTS) / (seconds + _PRIOR_EVENTS / assumed))
    common = np.array(rates)
    total = events.sum(axis=1) + _GROUP_EVENTS
    scale = total / ((exposure * common).sum(axis=1) + _GROUP_EVENTS)
    assumed_of = scale[:, None] * common
    return np.asarray((events + _GROUP_EVENTS) / (exposure + _GROUP_EVENTS / assumed_of))


def spans(ages: _Floats, kinds: _Ints, size: int) -> _Floats:
    """(size, BUCKETS) seconds from age 0 to each age, added up by kind."""
    at = buckets(ages)
    cells = kinds * BUCKETS + at
    full = np.bincount(cells, minlength=size * BUCKETS).reshape(size, BUCKETS)
    partial = np.bincount(cells, ages - EDGES[at], size * BUCKETS).reshape(size, BUCKETS)
    beyond = full[:, ::-1].cumsum(axis=1)[:, ::-1] - full
    return np.asarray(partial + beyond * WIDTHS)
