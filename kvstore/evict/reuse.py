"""Least likely to be used again soon: the chain goes first that is worth least per second it is kept.

Prompts come back as conversations do: where a chain ended, another one goes on, or none ever will. How
likely that is by the chain's age and kind is learned online (``hazard``), from the chains that were
evicted too, of which a short record stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from kvstore.block import HASH_BYTES, SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.hazard import (
    LEFTOVER_TURN,
    NO_GAP,
    Group,
    HazardModel,
    Kind,
    TailCounts,
    bucket,
    size_class,
    turn_class,
)
from kvstore.evict.watch import Watched

_NOBODY = 0
_NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)
_NO_PARENT = -1

_CONTINUED = 0.5
"""A request goes on from a chain when it uses more than this share of what the chain was the last to use."""
_HUB = 4
"""From a block with so many children prompts fork: who comes by there goes on from nobody."""
_ANCHORS = 3
"""Last blocks by which a chain is known again when it is gone; the last one is rarely full."""
_LEARN_EVERY = 64
_FADE_EVERY = 4000
_RESCORE_SHARE = 16
_GHOSTS_A_BLOCK = 2
_GHOSTS_LEAST = 64
_LOOKS = 8
_LAST = -1.0
"""Worth of what cannot be reached or was said to be over."""


@dataclass(slots=True, eq=False)
class _Chain:
    """Blocks [first, length) of a prompt: what its request was the last to use.

    ``slots`` are those that are resident, from ``first`` on. ``row`` is where it is watched, None when it is
    not. ``gate`` is the slot of its last block while that has children of other chains.
    """

    number: int
    time: float
    first: int
    length: int
    turn: int
    kind: int
    row: int | None
    slots: SlotArray = field(default_factory=lambda: _NO_SLOTS)
    anchors: list[bytes] = field(default_factory=list)
    awaits: bytes | None = None
    planned: int = 0
    leftover: bool = False
    lost: bool = False
    gate: int = _NO_PARENT

    @property
    def end(self) -> int:
        return self.first + len(self.slots)


class Reuse:
    """Victims by Gittins index of their chain; tails first. Constants are the same for every workload."""

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._owner = np.zeros(0, dtype=np.int64)
        self._chains: dict[int, _Chain] = {}
        self._cached: dict[int, _Chain] = {}
        self._anchors: dict[bytes, int] = {}
        self._awaited: dict[bytes, int] = {}
        self._gated: dict[int, int] = {}
        self._heap: list[tuple[float, int]] = []
        self._model = HazardModel()
        self._tails = TailCounts()
        self._watched = Watched()
        self._next = 1
        self._requests = 0
        self._rescore_at = 0
        self._blocks = 0
        self._now = 0.0

    # -- requests -------------------------------------------------------------------------------

    def touch(self, touch: Touch) -> None:
        self._cover()
        self._now = now = touch.time
        self._requests += 1
        length, hit = len(touch.hashes) // HASH_BYTES, len(touch.slots)
        if length:
            known, deepest = self._known(touch.hashes, length, hit)
            turn, gap = self._take_over(touch.slots, known, deepest)
            group = Group.ENDED if touch.hints.ended else Group.LATER if turn else Group.FIRST
            kind = Kind(group, turn_class(turn), size_class(length - known), size_class(length), gap)
            chain = self._open(now, length, turn, kind)
            self._name(chain, touch.hashes)
            chain.planned = length
            if hit < length:
                self._await(chain, touch.hashes[hit * HASH_BYTES : (hit + 1) * HASH_BYTES])
            if hit:
                self._keep(chain, touch.slots)
        if self._requests % _LEARN_EVERY == 0:
            self._learn()
        self._drop_ghosts()

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        self._cover()
        self._now = max(self._now, time)
        self._blocks += len(slots)
        chain = self._chain_of(hashes[:HASH_BYTES], parent)
        if chain is None:
            chain = self._open(time, len(slots), 0, Kind(Group.FIRST, 0, size_class(len(slots)), size_class(len(slots)), NO_GAP))
        self._keep(chain, slots)
        if chain.end >= chain.length:
            chain.length = chain.end
            self._await(chain, None)
            if chain.anchors:
                self._name(chain, hashes)

    def forget(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        owners = self._owner[known]
        for number in np.unique(owners[owners != _NOBODY]).tolist():
            chain = self._chains[number]
            stays = np.isin(chain.slots, known, invert=True)
            kept = chain.slots[stays]
            self._blocks -= len(chain.slots) - len(kept)
            # What stays below a gap is told of as orphans next.
            self._set(chain, kept)
        self._owner[known] = _NOBODY
        self._open_gates(self._occupancy.parent[known])

    def orphan(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        owners = self._owner[known]
        for number in np.unique(owners[owners != _NOBODY]).tolist():
            chain = self._chains[number]
            cut = int(np.isin(chain.slots, known).argmax())
            below = chain.slots[cut:]
            self._set(chain, chain.slots[:cut])
            unreachable = _Chain(self._next, self._now, 0, len(below), 0, 0, None, lost=True)
            self._next += 1
            self._chains[unreachable.number] = unreachable
            self._keep(unreachable, below)

    # -- victims --------------------------------------------------------------------------------

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        newest = self._chains.get(self._awaited.get(wanted[:HASH_BYTES], _NOBODY))
        if self._requests >= self._rescore_at:
            self._rescore()
        heap, busy = self._heap, []
        chosen = _NO_SLOTS
        while heap and not len(chosen):
            score, number = heappop(heap)
            chain = self._cached.get(number)
            if chain is None or chain.gate != _NO_PARENT:
                continue
            present = self._score(chain)
            following = heap[0][0] if heap else present
            if present > following and present > score:
                heappush(heap, (present, number))
                continue
            if newest is not None and chain is not newest:
                refused, offered = self._refuse(newest, present)
                limit -= refused
                following = min(following, offered)
                newest = None
                if limit <= 0:
                    busy.append((present, number))
                    break
            chosen = self._leaves(chain, self._droppable(chain, present, following, limit))
            if len(chosen):
                self._drop(chain, chosen)
            elif self._occupancy.pins[chain.slots[-1]]:
                busy.append((present, number))
            else:
                chain.gate = int(chain.slots[-1])
                self._gated[chain.gate] = number
        for entry in busy:
            heappush(heap, entry)
        return chosen

    def _refuse(self, newest: _Chain, present: float) -> tuple[int, float]:
        """(Blocks at its end that are worth less than what would go, worth of the next one)."""
        worth = self._model.worth(newest.kind, self._now - newest.time)
        while newest.planned > newest.end:
            missing = newest.length - newest.planned
            offered = worth * self._tails.share(missing)
            if offered >= present:
                return missing, offered
            refused = self._tails.droppable(missing, present / worth)
            newest.planned -= min(refused, newest.planned - newest.end)
        return newest.length - newest.planned, inf

    def _drop(self, chain: _Chain, chosen: SlotArray) -> None:
        self._owner[chosen] = _NOBODY
        self._blocks -= len(chosen)
        self._set(chain, chain.slots[: len(chain.slots) - len(chosen)])
        if len(chain.slots):
            heappush(self._heap, (self._score(chain), chain.number))
        elif self._gated:
            self._open_gates(self._occupancy.parent[chosen[-1:]])

    def _droppable(self, chain: _Chain, present: float, following: float, limit: int) -> int:
        """How many of a chain's last blocks go before another chain is worth less."""
        if chain.leftover or chain.lost or present <= 0:
            return limit
        missing = chain.length - chain.end
        whole = present / self._tails.share(missing)
        return min(limit, self._tails.droppable(missing, following / whole))

    def _leaves(self, chain: _Chain, limit: int) -> SlotArray:
        """The longest run from the tail on, of which each is a leaf once those before it are gone."""
        tail_first = chain.slots[: -limit - 1 : -1]
        occupancy = self._occupancy
        children = occupancy.children[tail_first]
        children[1:] -= occupancy.parent[tail_first[:-1]] == tail_first[1:]
        blocked = ((children > 0) | (occupancy.pins[tail_first] > 0)).nonzero()[0]
        return tail_first[: blocked[0]] if len(blocked) else tail_first

    def _score(self, chain: _Chain) -> float:
        """Hits a second that each of its blocks is worth."""
        if chain.lost:
            return _LAST
        worth = self._model.worth(chain.kind, self._now - chain.time)
        return worth if chain.leftover else worth * self._tails.share(chain.length - chain.end)

    def _rescore(self) -> None:
        """Ages have moved on: put all resident chains in order again."""
        self._heap = [
            (self._score(chain), number) for number, chain in self._cached.items() if chain.gate == _NO_PARENT
        ]
        heapify(self._heap)
        self._rescore_at = self._requests + max(1, len(self._heap) // _RESCORE_SHARE)

    def _open_gates(self, parents: SlotArray) -> None:
        """The children of these slots are fewer."""
        for slot in parents.tolist():
            number = self._gated.pop(slot, _NOBODY)
            chain = self._cached.get(number)
            if chain is not None and chain.gate == slot:
                chain.gate = _NO_PARENT
                heappush(self._heap, (self._score(chain), number))

    # -- chains ---------------------------------------------------------------------------------

    def _known(self, hashes: bytes, length: int, hit: int) -> tuple[int, _Chain | None]:
        """How deep the prompt was seen before, and by whom where that is deeper than it is resident."""
        if hit == length:
            return hit, None
        missing: list[bytes] = np.frombuffer(hashes, dtype=f"V{HASH_BYTES}")[hit:].tolist()
        if self._anchors.keys().isdisjoint(missing):
            return hit, None
        for place in range(len(missing) - 1, -1, -1):
            number = self._anchors.get(missing[place])
            if number is not None:
                return hit + place + 1, self._chains[number]
        raise AssertionError("one of them is an anchor")

    def _take_over(self, slots: SlotArray, known: int, deepest: _Chain | None) -> tuple[int, int]:
        """Part the blocks of a prompt from who had them; (turn, gap bucket) of the request that uses them."""
        origin = None
        if deepest is not None:
            origin = self._used(deepest, known, 0)
        owners = self._owner[slots]
        starts = [0, *((owners[1:] != owners[:-1]).nonzero()[0] + 1).tolist()] if len(slots) else []
        stop = len(slots)
        for start in reversed(starts):
            chain = self._chains.get(int(owners[start]))
            if chain is not None and chain is not deepest:
                children = int(self._occupancy.children[slots[stop - 1]])
                used = self._used(chain, chain.first + stop - start, children)
                if deepest is None and stop == len(slots):
                    origin = used
            stop = start
        return origin or (0, NO_GAP)

    def _used(self, chain: _Chain, end: int, children: int) -> tuple[int, int] | None:
        """A request used the blocks of a chain up to ``end``; (turn, gap bucket) where it goes on from it."""
        if end <= chain.first or chain.length<=chain.first:
            return None
        share = (end - chain.first) / (chain.length - chain.first)
        going_on = share > _CONTINUED and children < _HUB
        age = self._now - chain.time
        result = (chain.turn + 1, bucket(age)) if going_on else None
        if going_on:
            self._tails.count(chain.length - end)
            self._watched.end(chain.row, self._now, continued=True)
            chain.row = None
            self._chains.pop(chain.number)
            self._chains[chain.number] = chain
            chain.time, chain.leftover = self._now, True
            chain.kind = self._model.number(
                Kind(Group.LEFTOVER, LEFTOVER_TURN, size_class(chain.length - end), 0, NO_GAP)
            )
        taken = end - chain.first
        chain.first = end
        self._set(chain, chain.slots[taken:].copy())
        if end >= chain.length and chain.number in self._chains:
            self._close(chain)
        elif going_on and chain.number in self._chains:
            chain.row = self._watched.begin(chain.kind, self._now)
        return result

    def _open(self, now: float, length: int, turn: int, kind: Kind) -> _Chain:
        number = self._model.number(kind)
        chain = _Chain(self._next, now, 0, length, turn, number, self._watched.begin(number, now))
        self._chains[chain.number] = chain
        self._next += 1
        return chain

    def _close(self, chain: _Chain) -> None:
        """Nothing of it is resident, or ever will be."""
        self._watched.end(chain.row, self._now, continued=False)
        self._await(chain, None)
        for anchor in chain.anchors:
            if self._anchors.get(anchor) == chain.number:
                del self._anchors[anchor]
        del self._chains[chain.number]

    def _name(self, chain: _Chain, hashes: bytes) -> None:
        for anchor in chain.anchors:
            if self._anchors.get(anchor) == chain.number:
                del self._anchors[anchor]
        tail = hashes[-_ANCHORS * HASH_BYTES :]
        chain.anchors = [tail[at : at + HASH_BYTES] for at in range(0, len(tail), HASH_BYTES)]
        for anchor in chain.anchors:
            self._anchors[anchor] = chain.number

    def _await(self, chain: _Chain, following: bytes | None) -> None:
        """The block that a chain gets next, by which it is found when that is added."""
        if chain.awaits is not None and self._awaited.get(chain.awaits) == chain.number:
            del self._awaited[chain.awaits]
        chain.awaits = following
        if following is not None:
            self._awaited[following] = chain.number

    def _chain_of(self, first: bytes, parent: int) -> _Chain | None:
        """Whose blocks are added: who asked for the first of them, else who ends at the parent."""
        number = self._awaited.get(first, _NOBODY)
        if number == _NOBODY and 0 <= parent < len(self._owner):
            number = int(self._owner[parent])
            if number != _NOBODY and self._chains[number].slots[-1] != parent:
                number = _NOBODY
        return self._chains.get(number)

    def _keep(self, chain: _Chain, slots: SlotArray) -> None:
        self._owner[slots] = chain.number
        self._set(chain, np.concatenate((chain.slots, slots)) if len(chain.slots) else slots)
        heappush(self._heap, (self._score(chain), chain.number))

    def _set(self, chain: _Chain, slots: SlotArray) -> None:
        if chain.gate != _NO_PARENT and not (len(slots) and slots[-1] == chain.gate):
            self._gated.pop(chain.gate, None)
            chain.gate = _NO_PARENT
            if len(slots):
                heappush(self._heap, (self._score(chain), chain.number))
        chain.slots = slots
        if len(slots):
            self._cached[chain.number] = chain
        else:
            self._cached.pop(chain.number, None)
            if chain.lost:
                del self._chains[chain.number]

    def _drop_ghosts(self) -> None:
        """Keep the records of as many chains as there are blocks to decide over, and some."""
        most = max(_GHOSTS_LEAST, _GHOSTS_A_BLOCK * self._blocks)
        for _ in range(_LOOKS):
            if len(self._chains) <= most:
                return
            number = next(iter(self._chains))
            chain = self._chains[number]
            if len(chain.slots):
                self._chains[number] = self._chains.pop(number)
            else:
                self._close(chain)

    def _learn(self) -> None:
        self._model.learn(*self._watched.collect(self._now))
        fade = self._requests % _FADE_EVERY < _LEARN_EVERY
        if fade:
            self._model.fade()
        self._tails.refresh(fade=fade)

    def _cover(self) -> None:
        size = len(self._occupancy.pins)
        if size > len(self._owner):
            grown = np.zeros(size, dtype=np.int64)
            grown[: len(self._owner)] = self._owner
            self._owner = grown
