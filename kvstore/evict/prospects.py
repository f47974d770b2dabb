"""What each chain is worth, and how that is learned from what became of others."""

from __future__ import annotations

from math import inf

import numpy as np

from kvstore.evict.chains import Chain
from kvstore.evict.columns import NOBODY, UNWATCHED, WHOLE, Columns, floats, integers
from kvstore.evict.hazard import Group, HazardModel, Kind, turn_class
from kvstore.evict.tails import Tails
from kvstore.evict.watch import Watched
from kvstore.hints import PRIORITY_MOST, Hints

_LEARN_EVERY_MOST = 64
_LEARN_EVERY_LEAST = 32
_LEARN_SHARE = 8
_NEWS = 12
_LATE_MOST = 192
"""Where fewer chains than ``_NEWS`` were continued there is little to learn: it can wait so many requests."""
_FADE_EVERY = 4096
_WAITING_MOST = 4096
"""Chains that ended since the model last learned; where clients only write there is no request to do it."""
_UNREACHABLE = -1.0
_FAVOURED_SHARE = 0.25
"""Where chains of higher priority fill more than this share of what is resident, it counts for nothing."""


class Prospects:
    """The worth of chains: hits per second that each block brings, at best, while it is kept.

    Learned in batches: at first after every 32 requests, then after every 64, later where little comes back.
    """

    def __init__(self) -> None:
        self._model = HazardModel()
        self._curves = self._model.curves
        self._tails = Tails()
        self._columns = Columns()
        self._watched = Watched(self._columns)
        self._requests = 0
        self._learn_at = _LEARN_EVERY_LEAST
        self._fade_at = _FADE_EVERY
        self.now = 0.0
        self.blocks = 0
        """Resident blocks; the policy counts them."""
        self.favoured = 0
        """Those of them in chains of higher priority."""

    def request(self) -> None:
        """One more request was made."""
        self._requests += 1
        late = self._requests - self._learn_at
        if late < 0 or (self._watched.continued < _NEWS and late < _LATE_MOST):
            return
        step = min(_LEARN_EVERY_MOST, max(_LEARN_EVERY_LEAST, self._requests // _LEARN_SHARE))
        self._learn_at = self._requests + step
        self._learn()
        fade = self._requests >= self._fade_at
        if fade:
            self._fade_at += _FADE_EVERY
            self._model.fade()
        self._tails.refresh(fade=fade)

    # -- the life of a chain ----------------------------------------------------------------------

    def enter(self, chain: Chain) -> None:
        """A new chain, which is not watched yet."""
        chain.row = self._columns.take()
        self._columns.step[chain.row] = turn_class(chain.turn)

    def begin(self, chain: Chain, kind: Kind) -> None:
        """Watch a chain, as of this kind."""
        self._watched.begin(chain.row, self._model.number(kind), chain.time)

    def continued(self, chain: Chain, unused: int) -> None:
        """A request goes on from a chain, without its last ``unused`` blocks: it is watched no longer."""
        self._tails.count(unused, chain.fresh, self._columns.step[chain.row])
        self._watched.end(chain.row, self.now, continued=True)

    def ended(self, chain: Chain) -> None:
        """A chain is forgotten."""
        self._watched.end(chain.row, self.now, continued=False)
        self._columns.give_back(chain.row)
        if self._watched.waiting > _WAITING_MOST:
            self._learn()

    def tell(self, chain: Chain, hints: Hints) -> None:
        """What a chain's request says of its own future, in place of what it said before."""
        self._favour(chain, hints.priority)
        kind = self._model.kind(self._columns.kind[chain.row])._replace(group=group_of(hints, chain.turn))
        self._watched.change(chain.row, self._model.number(kind), chain.time + (hints.idle_seconds or 0.0))

    def resized(self, chain: Chain, blocks: int) -> None:
        """So many more of a chain's blocks are resident, or fewer, or others of them."""
        columns, row = self._columns, chain.row
        self.blocks += blocks
        if columns.favour[row] > 1:
            self.favoured += blocks
        missing = chain.missing
        columns.cut[row] = WHOLE if chain.whole or missing >= chain.fresh else missing
        self.offer(chain)

    def offer(self, chain: Chain) -> None:
        """A chain's end may go, or is kept by what hangs from it."""
        self._columns.number[chain.row] = chain.number if chain.gate is None and len(chain.slots) else NOBODY

    def _learn(self) -> None:
        self._model.learn(*self._watched.collect(self.now))

    # -- worth --------------------------------------------------------------------------------------

    def ranked(self) -> list[tuple[float, int]]:
        """(Worth, number) of every chain that is on offer, least first."""
        columns = self._columns
        rows = np.flatnonzero(integers(columns.number))
        numbers, kinds = integers(columns.number)[rows], integers(columns.kind)[rows]
        worths = np.full(len(rows), _UNREACHABLE)
        reached = np.flatnonzero(kinds != UNWATCHED)
        rows = rows[reached]
        worth = self._curves.worths(kinds[reached], self.now - floats(columns.since)[rows])
        favour = floats(columns.favour)[rows]
        worth *= favour if self._favours() else np.minimum(favour, 1.0)
        worths[reached] = worth * self._tails.shares(
            integers(columns.cut)[rows], integers(columns.step)[rows]
        )
        order = np.lexsort((numbers, worths))
        return list(zip(worths[order].tolist(), numbers[order].tolist(), strict=True))

    def worth(self, chain: Chain) -> float:
        """Of its last resident block, less than which those before it are not worth."""
        if chain.lost:
            return _UNREACHABLE
        worth, columns = self._full(chain), self._columns
        cut = columns.cut[chain.row]
        return worth if cut == WHOLE else worth * self._tails.share(cut, chain.fresh, columns.step[chain.row])

    def droppable(self, chain: Chain, worth: float, following: float) -> int:
        """How many of a chain's last blocks go, ``worth`` the last of them, before another is worth less."""
        if chain.whole or worth <= 0:
            return chain.length
        missing, fresh, step = chain.missing, chain.fresh, self._columns.step[chain.row]
        share = self._tails.share(missing, fresh, step) * following / worth
        return self._tails.droppable(missing, fresh, step, share)

    def refuse(self, newest: Chain, present: float) -> tuple[int, float]:
        """Plan a chain without what at its end is worth less than what would go for it.

        (So many blocks, worth of the last that is not refused.)
        """
        worth, step = self._full(newest), self._columns.step[newest.row]
        while newest.planned > newest.end:
            missing = newest.length - newest.planned
            offered = worth * self._tails.share(missing, newest.fresh, step)
            if offered >= present:
                return missing, offered
            refused = self._tails.droppable(missing, newest.fresh, step, present / worth)
            newest.planned -= min(refused, newest.planned - newest.end)
        return newest.length - newest.planned, inf

    def _full(self, chain: Chain) -> float:
        """With nothing of it missing."""
        columns, row = self._columns, chain.row
        worth = self._curves.worth(columns.kind[row], self.now - columns.since[row])
        favour = columns.favour[row]
        return worth * favour if favour <= 1 or self._favours() else worth

    def _favours(self) -> bool:
        """Whether higher priorities count."""
        return self.favoured <= _FAVOURED_SHARE * self.blocks

    def _favour(self, chain: Chain, priority: int) -> None:
        columns, row = self._columns, chain.row
        if columns.favour[row] > 1:
            self.favoured -= len(chain.slots)
        columns.favour[row] = 2.0 ** (max(-PRIORITY_MOST, min(PRIORITY_MOST, priority)) / 2)
        if columns.favour[row] > 1:
            self.favoured += len(chain.slots)


def group_of(hints: Hints, turn: int) -> Group:
    """Requests that say something are of a kind of their own: they are believed as far as it proves true."""
    if hints.ended:
        return Group.ENDED
    if hints.idle_seconds:
        return Group.IDLE
    return Group.LATER if turn else Group.FIRST
