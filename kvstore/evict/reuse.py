"""Least likely to be used again soon: the chain goes first that is worth least per second it is kept.

Prompts come back as conversations do: where a chain ended, another one goes on, or none ever will. How
likely that is by the chain's age and kind is learned online (``prospects``), from the chains that were
evicted too, of which a short record stays.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, SlotArray
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.chains import ALL_OF_IT, NO_SLOTS, Chain, Chains, keys_of
from kvstore.evict.columns import NOBODY
from kvstore.evict.hazard import (
    LEFTOVER_TURN,
    NO_GAP,
    Group,
    Kind,
    gap_class,
    size_class,
    turn_class,
)
from kvstore.evict.order import leading_leaves, owned_runs, runs_below
from kvstore.evict.prospects import Prospects, group_of
from kvstore.hints import NO_HINTS, Hints

_CONTINUED = 0.5
"""A request goes on from a chain when it uses more than this share of what the chain was the last to use."""
_HUB = 4
"""From a block with so many children prompts fork: who comes by there goes on from nobody."""
_RESCORE_SHARE = 8
_GHOSTS_A_BLOCK = 2
_GHOSTS_LEAST = 64
_HEAP_SLACK = 1024
_UNSCORED_MOST = 64
_LOOKS = 8
_HARDLY = 1.01
"""What is worth so many times the least at most goes as if it were that: nothing is known so exactly."""


class _Line(NamedTuple):
    """What a request goes on from: how often that was gone on from, and since when. ``turn`` 0: nothing."""

    turn: int
    born: float


class _Least(NamedTuple):
    """The chain that is worth least: what it was worth when last looked at, what it is, what the next is."""

    chain: Chain
    before: float
    worth: float
    following: float


class Reuse:
    """Victims by the Gittins index of their chain, its tail first; the same constants for every workload.

    A request takes over the blocks that it uses, so a chain keeps what nobody has used since. Hints that
    a session ended or pauses are believed as far as they have proved true; a priority is a factor, and
    counts for nothing where too much has one.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._owner = np.zeros(0, dtype=np.int64)
        self._chains = Chains()
        self._cached: dict[int, Chain] = {}
        self._gated: dict[int, int] = {}
        self._heap: list[tuple[float, int]] = []
        self._unscored: list[Chain] = []
        self._prospects = Prospects()
        self._requests = 0
        self._rescore_at = 0

    # -- requests -------------------------------------------------------------------------------

    def touch(self, touch: Touch) -> None:
        self._pass(touch.time)
        self._requests += 1
        if touch.hashes:
            self._use(touch)
        self._prospects.request()
        self._drop_ghosts()

    def hint(self, touch: Touch) -> None:
        self._pass(touch.time)
        chain = self._chains.ending(touch.hashes) if touch.hashes else None
        if chain is not None and not (chain.whole or chain.lost):
            self._prospects.tell(chain, touch.hints)
            self._queue(chain)

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        self._cover()
        self._pass(time)
        chain = self._chains.awaiting(hashes[:HASH_BYTES])
        if chain is None or (len(chain.slots) and chain.slots[-1] != parent):
            # The blocks of a chain hang from each other: what it waits for may come without what is before.
            chain = self._ending_at(parent)
        if chain is None:
            # Where clients only write, nothing else comes by to forget those that are gone.
            self._drop_ghosts()
            chain = self._open(len(slots), 0, _Line(0, time), NO_HINTS)
            self._chains.name(chain, keys_of(hashes), 0)
        if (beyond := len(slots) - chain.missing) > 0:
            # What is computed beyond a prompt makes it longer.
            chain.grow(beyond)
        self._keep(chain, slots)
        if not chain.missing:
            self._chains.await_block(chain, None)
            if beyond > 0:
                self._chains.rename(chain, hashes)

    def forget(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        # What stays behind a gap is told of as orphans next.
        self._part_from_owners(known)
        self._open_gates(self._occupancy.parent[known])

    def orphan(self, slots: SlotArray) -> None:
        known = slots[slots < len(self._owner)]
        runs = runs_below(self._occupancy.parent, known[self._owner[known] != NOBODY])
        if not runs:
            return
        self._part_from_owners(np.concatenate(runs))
        for run in runs:
            now = self._prospects.now
            unreachable = Chain(self._chains.next, now, len(run), 0, now, NO_SLOTS, lost=True)
            self._enter(unreachable)
            self._keep(unreachable, run)

    # -- victims --------------------------------------------------------------------------------

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        newest = self._chains.awaiting(wanted[:HASH_BYTES]) if wanted else None
        self._order()
        kept: list[tuple[float, int]] = []
        parts: list[SlotArray] = []
        while limit > 0 and (least := self._least()) is not None:
            chain, before, worth, following = least
            room = limit
            if newest is not None and chain is not newest:
                refused, offered = self._prospects.refuse(newest, worth)
                room -= refused
                following = min(following, offered)
            chosen = NO_SLOTS
            if room > 0:
                most = min(room, self._prospects.droppable(chain, worth, following))
                chosen = leading_leaves(self._occupancy, chain.slots[: -most - 1 : -1])
            if len(chosen):
                self._drop(chain, chosen)
                parts.append(chosen)
                limit -= len(chosen)
            elif room <= 0 or parts or self._occupancy.pins[chain.slots[-1]]:
                kept.append((before, chain.number))
                if room <= 0 or parts:  # what was chosen may be all that hangs from it
                    break
            else:
                chain.gate = int(chain.slots[-1])
                self._gated[chain.gate] = chain.number
                self._prospects.offer(chain)
        for entry in kept:  # as they were: to ask in vain changes nothing
            heappush(self._heap, entry)
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_SLOTS

    def _least(self) -> _Least | None:
        """Take the chain out of the queue that is worth least, or hardly more than that."""
        heap = self._heap
        while heap:
            before, number = heappop(heap)
            chain = self._cached.get(number)
            if chain is None or chain.gate is not None:
                continue
            worth = self._prospects.worth(chain)
            following = heap[0][0] if heap else worth
            if worth <= max(before, following * _HARDLY):
                return _Least(chain, before, worth, max(worth, following))
            heappush(heap, (worth, number))
        return None

    def _drop(self, chain: Chain, chosen: SlotArray) -> None:
        self._owner[chosen] = NOBODY
        self._set(chain, chain.slots[: -len(chosen)])
        if len(chain.slots):
            self._push(chain)
        elif self._gated:
            self._open_gates(self._occupancy.parent[chosen[-1:]])

    def _queue(self, chain: Chain) -> None:
        """A chain may be of another worth now; that is looked at once something has to go."""
        if self._requests < self._rescore_at:
            self._unscored.append(chain)
            if len(self._unscored) > len(self._cached) + _UNSCORED_MOST:
                self._unscored.clear()
                self._rescore_at = self._requests

    def _push(self, chain: Chain) -> None:
        heappush(self._heap, (self._prospects.worth(chain), chain.number))

    def _order(self) -> None:
        """Put chains in order: all once ages have moved on, else those whose worth has changed."""
        if self._requests >= self._rescore_at or len(self._heap) > 2 * len(self._cached) + _HEAP_SLACK:
            self._heap = self._prospects.ranked()
            self._rescore_at = self._requests + max(1, len(self._heap) // _RESCORE_SHARE)
        else:
            for chain in self._unscored:
                if chain.gate is None and len(chain.slots):
                    self._push(chain)
        self._unscored.clear()

    def _open_gates(self, parents: NDArray[np.int32]) -> None:
        """These slots have fewer children than before."""
        if not self._gated:
            return
        for slot in parents.tolist():
            chain = self._cached.get(self._gated.pop(slot, NOBODY))
            if chain is not None:
                chain.gate = None
                self._prospects.offer(chain)
                self._push(chain)

    # -- chains ---------------------------------------------------------------------------------

    def _use(self, touch: Touch) -> None:
        """A request takes over its blocks, and goes on from whoever had them, or begins."""
        length, hit = len(touch.hashes) // HASH_BYTES, len(touch.slots)
        known, gone = hit, None
        keys = keys_of(touch.hashes)
        if hit < length and (deepest := self._chains.deepest(keys[hit:] if hit else keys)) is not None:
            known, gone = hit + deepest[0] + 1, deepest[1]
        line = self._take_over(touch.slots, known, gone)
        chain = self._open(length, known, line, touch.hints)
        self._chains.name(chain, keys, known)
        if hit < length:
            first = hit * HASH_BYTES
            self._chains.await_block(chain, touch.hashes[first : first + HASH_BYTES])
        if hit:
            self._set(chain, touch.slots)
            self._queue(chain)

    def _take_over(self, slots: SlotArray, known: int, gone: Chain | None) -> _Line:
        """Part blocks from the chains that had them; what the request that uses them goes on from.

        They belong to the chain that is opened next. ``gone`` is the chain that reaches deepest, to block
        ``known``, if beyond the resident ones.
        """
        line = None
        if len(slots):
            runs = owned_runs(self._owner, slots)
            self._owner[slots] = self._chains.next
            for owner, start, stop in runs:
                chain, line = self._chains.by_number[owner], None
                if chain is not gone:
                    kept = self._own(chain) if stop - start < len(chain.slots) else NO_SLOTS
                    line = self._part(chain, chain.first + stop - start, kept, slots[stop - 1])
        if gone is not None:
            line = self._part(gone, known, self._own(gone))
        return _Line(0, self._prospects.now) if line is None else line

    def _part(self, chain: Chain, end: int, kept: SlotArray, last: np.int64 | None = None) -> _Line | None:
        """Take a chain's blocks up to ``end``, but for those that are ``kept``; what is gone on from there.

        A name that a client made up may be of a chain that does not reach that far: nothing goes on there.
        """
        line = None
        if chain.first < end <= chain.length:
            share = (end - chain.first) / (chain.length - chain.first)
            # What was brought behind a chain whose end was gone need not be of its prompt: it stays.
            chain.length = max(chain.length, end + len(kept))
            hub = last is not None and self._occupancy.children[last] >= _HUB
            if share > _CONTINUED and not hub and not chain.lost:
                line = _Line(chain.turn + 1, chain.born)
                self._prospects.continued(chain, chain.length - end)
                if end < chain.length:
                    self._leave_over(chain, chain.length - end)
            chain.first = end
        self._set(chain, kept)
        if chain.first == chain.length and not chain.lost:
            self._close(chain)
        return line

    def _part_from_owners(self, slots: SlotArray) -> None:
        """These are nobody's from now on."""
        owners = self._owners(slots)
        self._owner[slots] = NOBODY
        for chain in owners:
            self._set(chain, self._own(chain))

    def _own(self, chain: Chain) -> SlotArray:
        """Those of a chain's blocks that nobody took from it."""
        return chain.slots[self._owner[chain.slots] == chain.number] if len(chain.slots) else NO_SLOTS

    def _leave_over(self, chain: Chain, blocks: int) -> None:
        """A chain was continued elsewhere: its last blocks are a branch that was left, used just now."""
        chain.time, chain.whole = self._prospects.now, True
        self._prospects.begin(chain, Kind(Group.LEFTOVER, LEFTOVER_TURN, size_class(blocks), 0, NO_GAP))
        self._chains.renew(chain)

    def _open(self, length: int, known: int, line: _Line, hints: Hints) -> Chain:
        """A chain of a prompt whose first ``known`` blocks somebody had asked for before."""
        now, turn = self._prospects.now, line.turn
        fresh = length - known if known else ALL_OF_IT
        chain = Chain(self._chains.next, now, length, turn, line.born, NO_SLOTS, fresh, 0, length)
        self._enter(chain)
        # The time between uses, all of them so far: what is popular is told from what came back at once.
        gap = gap_class((now - line.born) / turn) if turn else NO_GAP
        group = group_of(hints, turn)
        kind = Kind(group, turn_class(turn), size_class(length - known), size_class(length), gap)
        self._prospects.begin(chain, kind)
        if hints.priority or hints.idle_seconds:
            self._prospects.tell(chain, hints)
        return chain

    def _enter(self, chain: Chain) -> None:
        self._chains.enter(chain)
        self._prospects.enter(chain)

    def _close(self, chain: Chain) -> None:
        """Nothing of it is resident, and it is remembered no longer."""
        self._prospects.ended(chain)
        self._chains.close(chain)

    def _owners(self, slots: SlotArray) -> list[Chain]:
        chains = map(self._chains.by_number.get, np.unique(self._owner[slots]).tolist())
        return [chain for chain in chains if chain is not None]

    def _ending_at(self, parent: int) -> Chain | None:
        """The chain whose last resident block is in this slot."""
        owner = int(self._owner[parent]) if parent >= 0 else NOBODY
        chain = self._cached.get(owner)
        return chain if chain is not None and chain.slots[-1] == parent else None

    def _keep(self, chain: Chain, slots: SlotArray) -> None:
        """A chain has these blocks too, behind those that it had."""
        self._owner[slots] = chain.number
        self._set(chain, np.concatenate((chain.slots, slots)) if len(chain.slots) else slots)
        self._queue(chain)

    def _set(self, chain: Chain, slots: SlotArray) -> None:
        more = len(slots) - len(chain.slots)
        chain.slots = slots
        if chain.gate is not None and not (len(slots) and slots[-1] == chain.gate):
            self._gated.pop(chain.gate, None)
            chain.gate = None
            self._queue(chain)
        self._prospects.resized(chain, more)
        if len(slots):
            self._cached[chain.number] = chain
            return
        self._cached.pop(chain.number, None)
        if chain.lost:
            self._close(chain)

    def _drop_ghosts(self) -> None:
        """Remember as many chains as there are blocks to decide over, and some."""
        chains = self._chains.by_number
        most = max(_GHOSTS_LEAST, _GHOSTS_A_BLOCK * self._prospects.blocks)
        looks = _LOOKS
        while len(chains) > most and looks:
            looks -= 1
            chain = next(iter(chains.values()))
            if len(chain.slots):
                self._chains.renew(chain)
            else:
                self._close(chain)

    def _pass(self, time: float) -> None:
        if time > self._prospects.now:
            self._prospects.now = time

    def _cover(self) -> None:
        size = len(self._occupancy.pins)
        if size > len(self._owner):
            grown = np.zeros(size, dtype=np.int64)
            grown[: len(self._owner)] = self._owner
            self._owner = grown
