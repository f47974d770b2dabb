"""Least likely to be used again soon: the chain goes first that is worth least per second it is kept.

Prompts come back as conversations do: where a chain ended, another one goes on, or none ever will. How
likely that is by the chain's age and kind is learned online (``hazard``), from the chains that were
evicted too, of which a short record stays.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.chains import NO_SLOTS, NOBODY, Chain, Chains
from kvstore.evict.hazard import (
    LEFTOVER_TURN,
    NO_GAP,
    Group,
    HazardModel,
    Kind,
    TailCounts,
    gap_class,
    size_class,
    turn_class,
)
from kvstore.evict.order import runs_below
from kvstore.evict.watch import Watched

_CONTINUED = 0.5
"""A request goes on from a chain when it uses more than this share of what the chain was the last to use."""
_HUB = 4
"""From a block with so many children prompts fork: who comes by there goes on from nobody."""
_LEARN_EVERY = 64
_FADE_EVERY = 4096
_RESCORE_SHARE = 16
_GHOSTS_A_BLOCK = 2
_GHOSTS_LEAST = 64
_LOOKS = 8
_UNREACHABLE = -1.0
_NO_KIND = -1


class Reuse:
    """Victims by the Gittins index of their chain, its tail first; the same constants for every workload.

    A request takes over the blocks that it uses, so a chain keeps what nobody has used since. A request
    that says ``ended`` is a kind of its own: the hint is believed as far as it has proved true.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._owner = np.zeros(0, dtype=np.int64)
        self._chains = Chains()
        self._cached: dict[int, Chain] = {}
        self._gated: dict[int, int] = {}
        self._heap: list[tuple[float, int]] = []
        self._model = HazardModel()
        self._tails = TailCounts()
        self._watched = Watched()
        self._requests = 0
        self._rescore_at = 0
        self._blocks = 0
        self._now = 0.0

    # -- requests -------------------------------------------------------------------------------

    def touch(self, touch: Touch) -> None:
        self._cover()
        self._now = max(self._now, touch.time)
        self._requests += 1
        if touch.hashes:
            self._use(touch)
        if self._requests % _LEARN_EVERY == 0:
            self._learn()
        self._drop_ghosts()

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        self._cover()
        self._now = max(self._now, time)
        self._blocks += len(slots)
        chain = self._chains.awaiting(hashes[:HASH_BYTES]) or self._ending_at(parent)
        if chain is None:
            size = size_class(len(slots))
            chain = self._open(len(slots), 0, Kind(Group.FIRST, 0, size, size, NO_GAP))
        # What is computed beyond a prompt makes it longer.
        chain.length = max(chain.length, chain.end + len(slots))
        self._keep(chain, slots)
        if not chain.missing:
            self._chains.await_block(chain, None)
            if chain.anchors:
                self._chains.name(chain, hashes)

    def forget(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        for chain in self._owners(known):
            kept = chain.slots[np.isin(chain.slots, known, invert=True)]
            self._blocks -= len(chain.slots) - len(kept)
            # What stays behind a gap is told of as orphans next.
            self._set(chain, kept)
        self._owner[known] = NOBODY
        self._open_gates(self._occupancy.parent[known])

    def orphan(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        runs = runs_below(self._occupancy.parent, known[self._owner[known] != NOBODY])
        if not runs:
            return
        below = np.concatenate(runs)
        for chain in self._owners(below):
            self._set(chain, chain.slots[np.isin(chain.slots, below, invert=True)])
        for run in runs:
            unreachable = self._chains.open(self._now, len(run), 0, _NO_KIND, None)
            unreachable.lost = True
            self._keep(unreachable, run)

    # -- victims --------------------------------------------------------------------------------

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        newest = self._chains.awaiting(wanted[:HASH_BYTES]) if wanted else None
        if self._requests >= self._rescore_at:
            self._rescore()
        heap = self._heap
        busy: list[tuple[float, int]] = []
        chosen = NO_SLOTS
        while heap and not len(chosen):
            before, number = heappop(heap)
            chain = self._cached.get(number)
            if chain is None or chain.gate is not None:
                continue
            worth = self._worth(chain)
            following = heap[0][0] if heap else worth
            if worth > following and worth > before:
                heappush(heap, (worth, number))
                continue
            if newest is not None and chain is not newest:
                refused, offered = self._refuse(newest, worth)
                limit -= refused
                following = min(following, offered)
                newest = None
            if limit <= 0:
                busy.append((worth, number))
                break
            chosen = self._leading_leaves(chain.slots[: -self._droppable(chain, following, limit) - 1 : -1])
            if len(chosen):
                self._drop(chain, chosen)
            elif self._occupancy.pins[chain.slots[-1]]:
                busy.append((worth, number))
            else:
                chain.gate = int(chain.slots[-1])
                self._gated[chain.gate] = number
        for entry in busy:
            heappush(heap, entry)
        return chosen

    def _refuse(self, newest: Chain, present: float) -> tuple[int, float]:
        """(Blocks at its end that are worth less than what would go, worth of the last that is not)."""
        worth = self._model.worth(newest.kind, self._now - newest.time)
        while newest.planned > newest.end:
            missing = newest.length - newest.planned
            offered = worth * self._tails.share(missing)
            if offered >= present:
                return missing, offered
            refused = self._tails.droppable(missing, present / worth)
            newest.planned -= min(refused, newest.planned - newest.end)
        return newest.length - newest.planned, inf

    def _drop(self, chain: Chain, chosen: SlotArray) -> None:
        self._owner[chosen] = NOBODY
        self._blocks -= len(chosen)
        self._set(chain, chain.slots[: -len(chosen)])
        if len(chain.slots):
            heappush(self._heap, (self._worth(chain), chain.number))
        else:
            self._open_gates(self._occupancy.parent[chosen[-1:]])

    def _droppable(self, chain: Chain, following: float, limit: int) -> int:
        """How many of a chain's last blocks go before another chain is worth less."""
        if chain.whole or chain.lost:
            return limit
        full = self._model.worth(chain.kind, self._now - chain.time)
        return min(limit, self._tails.droppable(chain.missing, following / full))

    def _leading_leaves(self, tail_first: SlotArray) -> SlotArray:
        """The longest run of which each is a leaf once its predecessors are gone."""
        occupancy = self._occupancy
        held = occupancy.children[tail_first]
        held[1:] -= occupancy.parent[tail_first[:-1]] == tail_first[1:]
        held += occupancy.pins[tail_first]
        blocked = held.nonzero()[0]
        return tail_first[: blocked[0]] if len(blocked) else tail_first

    def _worth(self, chain: Chain) -> float:
        """Hits a second that each of its blocks brings, at best, while it is kept."""
        if chain.lost:
            return _UNREACHABLE
        worth = self._model.worth(chain.kind, self._now - chain.time)
        return worth if chain.whole else worth * self._tails.share(chain.missing)

    def _rescore(self) -> None:
        """Ages have moved on: put all resident chains in order again."""
        self._heap = [
            (self._worth(each), number) for number, each in self._cached.items() if each.gate is None
        ]
        heapify(self._heap)
        self._rescore_at = self._requests + max(1, len(self._heap) // _RESCORE_SHARE)

    def _open_gates(self, parents: NDArray[np.int32]) -> None:
        """These slots have fewer children than before."""
        if not self._gated:
            return
        for slot in parents.tolist():
            chain = self._cached.get(self._gated.pop(slot, NOBODY))
            if chain is not None:
                chain.gate = None
                heappush(self._heap, (self._worth(chain), chain.number))

    # -- chains ---------------------------------------------------------------------------------

    def _use(self, touch: Touch) -> None:
        """A request takes over its blocks, and goes on from whoever had them, or begins."""
        length, hit = len(touch.hashes) // HASH_BYTES, len(touch.slots)
        missing = touch.hashes[hit * HASH_BYTES :]
        known, gone = hit, None
        if missing and (deepest := self._chains.deepest(missing)) is not None:
            known, gone = hit + deepest[0] + 1, deepest[1]
        turn, gap = self._take_over(touch.slots, known, gone)
        group = Group.ENDED if touch.hints.ended else Group.LATER if turn else Group.FIRST
        kind = Kind(group, turn_class(turn), size_class(length - known), size_class(length), gap)
        chain = self._open(length, turn, kind)
        self._chains.name(chain, touch.hashes)
        if missing:
            self._chains.await_block(chain, missing[:HASH_BYTES])
        if hit:
            self._keep(chain, touch.slots)

    def _take_over(self, slots: SlotArray, known: int, gone: Chain | None) -> tuple[int, int]:
        """Part blocks from the chains that had them; (turn, gap class) of the request that uses them.

        ``gone`` is the chain that reaches deepest, to block ``known``, if beyond the resident ones.
        """
        origin = None if gone is None else self._part(gone, known, 0)
        owners = self._owner[slots]
        starts = [0, *((owners[1:] != owners[:-1]).nonzero()[0] + 1).tolist()] if len(slots) else []
        stop = len(slots)
        for start in reversed(starts):
            chain = self._chains.by_number.get(int(owners[start]))
            if chain is not None and chain is not gone:
                children = int(self._occupancy.children[slots[stop - 1]])
                used = self._part(chain, chain.first + stop - start, children)
                if gone is None and stop == len(slots):
                    origin = used
            stop = start
        return origin or (0, NO_GAP)

    def _part(self, chain: Chain, end: int, children: int) -> tuple[int, int] | None:
        """Take a chain's blocks up to ``end``; (turn, gap class) of who goes on there, if anybody does."""
        if end <= chain.first:
            return None
        share = (end - chain.first) / (chain.length - chain.first)
        turn = None
        if share > _CONTINUED and children < _HUB:
            turn = chain.turn + 1, gap_class(self._now - chain.time)
            self._tails.count(chain.length - end)
            self._watched.end(chain.row, self._now, continued=True)
            self._leave_over(chain, chain.length - end)
        kept = chain.slots[end - chain.first :].copy()
        chain.first = end
        self._set(chain, kept)
        if end >= chain.length:
            self._close(chain)
        return turn

    def _leave_over(self, chain: Chain, blocks: int) -> None:
        """A chain was continued elsewhere: its last blocks are a branch that was left, used just now."""
        chain.kind = self._model.number(Kind(Group.LEFTOVER, LEFTOVER_TURN, size_class(blocks), 0, NO_GAP))
        chain.time, chain.whole = self._now, True
        chain.row = self._watched.begin(chain.kind, self._now)
        self._chains.renew(chain)

    def _open(self, length: int, turn: int, kind: Kind) -> Chain:
        number = self._model.number(kind)
        return self._chains.open(self._now, length, turn, number, self._watched.begin(number, self._now))

    def _close(self, chain: Chain) -> None:
        """Nothing of it is resident, and it is remembered no longer."""
        self._watched.end(chain.row, self._now, continued=False)
        self._chains.close(chain)

    def _owners(self, slots: SlotArray) -> list[Chain]:
        owners = np.unique(self._owner[slots]).tolist()
        return [self._chains.by_number[number] for number in owners if number != NOBODY]

    def _ending_at(self, parent: int) -> Chain | None:
        """The chain whose last resident block is in this slot."""
        owner = int(self._owner[parent]) if parent >= 0 else NOBODY
        chain = self._cached.get(owner)
        return chain if chain is not None and chain.slots[-1] == parent else None

    def _keep(self, chain: Chain, slots: SlotArray) -> None:
        """A chain has these blocks too, behind those that it had."""
        self._owner[slots] = chain.number
        self._set(chain, np.concatenate((chain.slots, slots)) if len(chain.slots) else slots)
        heappush(self._heap, (self._worth(chain), chain.number))

    def _set(self, chain: Chain, slots: SlotArray) -> None:
        chain.slots = slots
        if chain.gate is not None and not (len(slots) and slots[-1] == chain.gate):
            self._gated.pop(chain.gate, None)
            chain.gate = None
            heappush(self._heap, (self._worth(chain), chain.number))
        if len(slots):
            self._cached[chain.number] = chain
            return
        self._cached.pop(chain.number, None)
        if chain.lost:
            self._close(chain)

    def _drop_ghosts(self) -> None:
        """Remember as many chains as there are blocks to decide over, and some."""
        most = max(_GHOSTS_LEAST, _GHOSTS_A_BLOCK * self._blocks)
        for _ in range(_LOOKS):
            if len(self._chains) <= most:
                return
            chain = next(iter(self._chains.by_number.values()))
            if len(chain.slots):
                self._chains.renew(chain)
            else:
                self._close(chain)

    def _learn(self) -> None:
        self._model.learn(*self._watched.collect(self._now))
        fade = self._requests % _FADE_EVERY == 0
        if fade:
            self._model.fade()
        self._tails.refresh(fade=fade)

    def _cover(self) -> None:
        size = len(self._occupancy.pins)
        if size > len(self._owner):
            grown = np.zeros(size, dtype=np.int64)
            grown[: len(self._owner)] = self._owner
            self._owner = grown
