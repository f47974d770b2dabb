"""What each chain is worth, and how that is learned from what became of others."""

from __future__ import annotations

from math import inf

from kvstore.evict.chains import Chain
from kvstore.evict.hazard import Group, HazardModel, Kind, turn_class
from kvstore.evict.tails import Tails
from kvstore.evict.watch import Watched
from kvstore.hints import PRIORITY_MOST, Hints

_LEARN_EVERY_MOST = 64
_LEARN_EVERY_LEAST = 32
_LEARN_SHARE = 8
_FADE_EVERY = 4096
_WAITING_MOST = 4096
"""Chains that ended since the model last learned; where clients only write there is no request to do it."""
_UNREACHABLE = -1.0
_FAVOURED_SHARE = 0.25
"""Where chains of higher priority fill more than this share of what is resident, it counts for nothing."""


class Prospects:
    """The worth of chains: hits per second that each block brings, at best, while it is kept.

    Learned in batches, at first after every 32 requests, then after every 64.
    """

    def __init__(self) -> None:
        self._model = HazardModel()
        self._tails = Tails()
        self._watched = Watched()
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
        if self._requests < self._learn_at:
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

    def begin(self, chain: Chain, kind: Kind) -> None:
        """Watch a chain, as of this kind."""
        chain.kind = self._model.number(kind)
        chain.row = self._watched.begin(chain.kind, chain.time + chain.idle)

    def continued(self, chain: Chain, unused: int) -> None:
        """A request goes on from a chain, without its last ``unused`` blocks."""
        self._tails.count(unused, chain.fresh, turn_class(chain.turn))
        self._watched.end(chain.row, self.now, continued=True)

    def ended(self, chain: Chain) -> None:
        """A chain is watched no longer."""
        self._watched.end(chain.row, self.now, continued=False)
        if self._watched.waiting > _WAITING_MOST:
            self._learn()

    def tell(self, chain: Chain, hints: Hints) -> None:
        """What a chain's request says of its own future, in place of what it said before."""
        chain.idle = hints.idle_seconds or 0.0
        self._favour(chain, hints.priority)
        kind = self._model.kind(chain.kind)._replace(group=group_of(hints, chain.turn))
        chain.kind = self._model.number(kind)
        self._watched.change(chain.row, chain.kind, chain.time + chain.idle)

    def resized(self, chain: Chain, blocks: int) -> None:
        """So many more of a chain's blocks are resident, or fewer."""
        self.blocks += blocks
        if chain.favour > 1:
            self.favoured += blocks

    def _learn(self) -> None:
        self._model.learn(*self._watched.collect(self.now))
        self._model.weigh(self._watched.kinds())

    # -- worth --------------------------------------------------------------------------------------

    def worth(self, chain: Chain) -> float:
        """Of its last resident block, less than which those before it are not worth."""
        if chain.lost:
            return _UNREACHABLE
        worth = self._full(chain)
        if chain.whole or (missing := chain.missing) >= chain.fresh:
            return worth
        return worth * self._tails.share(missing, chain.fresh, turn_class(chain.turn))

    def droppable(self, chain: Chain, following: float) -> int:
        """How many of a chain's last blocks go before another is worth less than the chain."""
        if chain.whole or chain.lost:
            return chain.length
        share = following / self._full(chain)
        return self._tails.droppable(chain.missing, chain.fresh, turn_class(chain.turn), share)

    def refuse(self, newest: Chain, present: float) -> tuple[int, float]:
        """Plan a chain without what at its end is worth less than what would go for it.

        (So many blocks, worth of the last that is not refused.)
        """
        worth, step = self._full(newest), turn_class(newest.turn)
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
        worth = self._model.worth(chain.kind, self.now - chain.time - chain.idle)
        if chain.favour > 1 and self.favoured > _FAVOURED_SHARE * self.blocks:
            return worth
        return worth * chain.favour

    def _favour(self, chain: Chain, priority: int) -> None:
        if chain.favour > 1:
            self.favoured -= len(chain.slots)
        chain.favour = 2.0 ** (max(-PRIORITY_MOST, min(PRIORITY_MOST, priority)) / 2)
        if chain.favour > 1:
            self.favoured += len(chain.slots)


def group_of(hints: Hints, turn: int) -> Group:
    """Requests that say something are of a kind of their own: they are believed as far as it proves true."""
    if hints.ended:
        return Group.ENDED
    if hints.idle_seconds:
        return Group.IDLE
    return Group.LATER if turn else Group.FIRST
