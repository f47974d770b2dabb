"""What a pool of another size would hit: small ghosts of it, fed with a sample of the blocks asked for.

Spatial sampling after SHARDS (Waldspurger et al., FAST'15): a block is in the sample when a hash of its
name falls below 1 / rate, and a ghost has 1 / rate of the capacity. Here names are a tree, since a hit is
a leading run, so each chain is reduced to its blocks that are in the sample: the reduced chains are a tree
of their own, in which what is resident is again a run from the head. No prompt is in the sample as a
whole or out of it as a whole. What is counted is misses, and hits are what is left of all that was asked:
a block that everybody asks for is hit whether it is in the sample or not, and would otherwise tip the scale
by all its hits at once (SHARDS corrects its histogram likewise).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, MissCause, SlotArray
from kvstore.events import Event, RequestSettled
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.hints import Hints
from kvstore.index import distinct_head, split_hashes
from kvstore.sideline import PAUSE_SECONDS, Sideline
from kvstore.table import hash_words

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
SAMPLE_BLOCKS_MAX = 1 << 14
"""What the largest ghost may hold; the rate follows from it."""

_NO_PARENT = -1
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)

MakeEvictor = Callable[[Occupancy], Evictor]


class Estimate(NamedTuple):
    """What a pool of ``scale`` times the present size would have missed of what was asked, in tokens.

    ``missed_tokens`` are an estimate, and may for a time be more than ``asked_tokens``; neither falls.
    """

    scale: float
    capacity_bytes: int
    asked_tokens: int
    missed_tokens: int

    @property
    def hit_tokens(self) -> int:
        """What is left of what was asked."""
        return max(0, self.asked_tokens - self.missed_tokens)


class _Asked(NamedTuple):
    """One request as a ghost needs it; ``block_bytes`` is what each block takes of a pool."""

    event: RequestSettled
    block_bytes: int


class WhatIf:
    """A listener that keeps a ghost of the memory tier at each of ``SCALES``, on a thread of its own.

    A ghost keeps all whole blocks of every prompt that was asked for. So it knows nothing of what was
    dropped, and of an answer that was stored with its prompt only once it is part of the next prompt.
    """

    def __init__(
        self,
        make_evictor: MakeEvictor,
        pool_bytes: int,
        block_bytes: Callable[[bytes], int],
        *,
        seed: int = 0,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """``block_bytes`` says what a block of a namespace takes of the pool, all ranks together.

        ``seed`` chooses the sample; ``pause_seconds`` is between two requests (``Sideline``).
        """
        self._make_evictor = make_evictor
        self._pool_bytes = pool_bytes
        self._block_bytes = block_bytes
        self._seed = np.uint64(seed)
        self._sizes: dict[bytes, int] = {}
        self._bits = -1
        self._names = _Names()
        self._ghosts: list[_Ghost] = []
        self._asked = 0
        self._missed = [0] * len(SCALES)
        self._sideline = Sideline("kvstore-whatif", self._serve, pause_seconds=pause_seconds)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestSettled):
            return
        size = self._sizes.get(event.namespace) or self._block_bytes(event.namespace)
        if size:
            self._sizes[event.namespace] = size
            self._sideline.put(_Asked(event, size), event.nbytes)

    @property
    def dropped(self) -> int:
        """Requests that are not in the estimates: too many came at once, or they could not be followed."""
        return self._sideline.skipped

    @property
    def idle(self) -> bool:
        """Whether all requests so far are in the estimates."""
        return self._sideline.idle

    @property
    def rate(self) -> int:
        """One block in so many is in the sample."""
        return 1 << max(0, self._bits)

    @property
    def tracked_blocks(self) -> int:
        """Blocks of the sample that any ghost holds: never more than all of them have room for."""
        return len(self._names)

    def estimates(self) -> list[Estimate]:
        """One for each scale, from any thread."""
        return [
            Estimate(scale, int(self._pool_bytes * scale), self._asked, missed)
            for scale, missed in zip(SCALES, self._missed, strict=True)
        ]

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._sideline.close()

    def _serve(self, asked: _Asked) -> None:
        event = asked.event
        tail = event.miss_tokens.get(MissCause.TAIL, 0)
        blocks = len(event.hashes) // HASH_BYTES - event.first_block
        if blocks > 0:
            self._fit(asked.block_bytes)
            words = hash_words(event.hashes)
            sampled = np.flatnonzero(self._in_sample(words[:, 1]))
            if len(sampled):
                own = int(np.searchsorted(sampled, event.first_block))
                tokens = (event.asked_tokens - tail) // blocks * self.rate
                self._ask_ghosts(event, words[sampled], asked.block_bytes, own, tokens)
        self._asked += event.asked_tokens
        self._missed = [missed + tail for missed in self._missed]

    def _ask_ghosts(
        self, event: RequestSettled, words: NDArray[np.uint64], block_bytes: int, own: int, tokens: int
    ) -> None:
        ids = self._names.of(words, block_bytes)
        for ghost in self._ghosts:
            ghost.cover(len(self._names.sizes))
        hashes = words[: len(ids)].tobytes()
        try:
            for place, ghost in enumerate(self._ghosts):
                hits = ghost.serve(ids, hashes, event.time, event.hints)
                self._missed[place] += (len(ids) - max(own, hits)) * tokens
        finally:
            self._names.recycle(ids)

    def _in_sample(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        if not self._bits:
            return np.ones(len(words), dtype=np.bool_)
        mixed = (words ^ self._seed) * _MIX
        sampled: NDArray[np.bool_] = (mixed >> np.uint64(64 - self._bits)) == 0
        return sampled

    def _fit(self, block_bytes: int) -> None:
        """Begin again with a smaller sample where blocks are so small that ghosts would hold too many."""
        most = int(self._pool_bytes * SCALES[-1]) // block_bytes
        bits = max(0, (most - 1) // SAMPLE_BLOCKS_MAX).bit_length()
        if bits > self._bits:
            self._bits = bits
            self._names = _Names()
            self._ghosts = [
                _Ghost(self._make_evictor, int(self._pool_bytes * scale) >> bits, self._names)
                for scale in SCALES
            ]


class _Names:
    """Numbers for the blocks that any ghost holds, which stand for slots; reused when none does."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._free: list[int] = []
        self.left: list[SlotArray] = []
        """What ghosts have evicted since the last ``recycle``."""
        self.holders = np.zeros(0, dtype=np.int8)
        self.sizes = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, words: NDArray[np.uint64], block_bytes: int) -> SlotArray:
        """A number for each name before one that comes again, new ones where there is none yet."""
        names = distinct_head(split_hashes(words.tobytes()))
        ids = np.array([self._number(name) for name in names], dtype=np.int64)
        if len(self._names) > len(self.sizes):
            grown = max(64, 2 * len(self._names))
            self.sizes = _grown(self.sizes, grown)
            self.holders = _grown(self.holders, grown)
        self.sizes[ids] = block_bytes
        return ids

    def recycle(self, ids: SlotArray) -> None:
        """Forget those of these blocks, and of those that ghosts have evicted, that no ghost holds."""
        seen = np.concatenate((ids, *self.left))
        self.left.clear()
        for number in seen[self.holders[seen] == 0].tolist():
            name = self._names[number]
            if self._numbers.get(name) == number:
                del self._numbers[name]
                self._free.append(number)

    def _number(self, name: bytes) -> int:
        known = self._numbers.get(name)
        if known is None:
            if self._free:
                known = self._free.pop()
                self._names[known] = name
            else:
                known = len(self._names)
                self._names.append(name)
            self._numbers[name] = known
        return known


class _Ghost:
    """A pool of one size without bytes: it does to a policy what a pool does (``kvstore/pool.py``)."""

    def __init__(self, make_evictor: MakeEvictor, capacity_bytes: int, names: _Names) -> None:
        self._names = names
        self._free = capacity_bytes
        self._resident = np.zeros(0, dtype=np.bool_)
        none = np.zeros(0, dtype=np.int32)
        self._occupancy = Occupancy(children=none, parent=none.copy(), pins=none.copy())
        self._evictor = make_evictor(self._occupancy)

    def cover(self, size: int) -> None:
        """Know numbers below ``size``."""
        known, occupancy = len(self._resident), self._occupancy
        if size > known:
            self._resident = _grown(self._resident, size)
            occupancy.children = _grown(occupancy.children, size)
            occupancy.pins = _grown(occupancy.pins, size)
            occupancy.parent = _grown(occupancy.parent, size)
            occupancy.parent[known:] = _NO_PARENT

    def serve(self, ids: SlotArray, hashes: bytes, time: float, hints: Hints) -> int:
        """Leading blocks of a request that are here; all of it is from then on, as far as it fits."""
        resident = self._resident[ids]
        # Names that a client makes up may lead to a block that hangs from another one: it is no hit, and
        # nothing is kept behind it.
        above = np.concatenate(([_NO_PARENT], ids[:-1]))
        hits = _leading(resident & (self._occupancy.parent[ids] == above))
        self._evictor.touch(Touch(hashes, ids[:hits], hits, time, hints))
        if absent := _leading(~resident[hits:]):
            parent = int(ids[hits - 1]) if hits else _NO_PARENT
            self._bring(ids[hits : hits + absent], hashes[hits * HASH_BYTES :], parent, time)
        return hits

    def _bring(self, missing: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        occupancy, size = self._occupancy, int(self._names.sizes[missing[0]])
        if self._free < len(missing) * size:
            self._make_room(len(missing) * size, size, hashes, parent)
        fresh = missing[: max(0, self._free // size)]
        if not len(fresh):
            return
        self._free -= len(fresh) * size
        self._resident[fresh] = True
        self._names.holders[fresh] += 1
        occupancy.parent[fresh[0]] = parent
        occupancy.parent[fresh[1:]] = fresh[:-1]
        occupancy.children[fresh[:-1]] = 1
        if parent != _NO_PARENT:
            occupancy.children[parent] += 1
        self._evictor.add(fresh, hashes[: len(fresh) * HASH_BYTES], parent, time)

    def _make_room(self, wanted: int, size: int, hashes: bytes, parent: int) -> None:
        """Free ``wanted`` bytes, or as many as the policy gives for these blocks."""
        occupancy, names = self._occupancy, self._names
        if parent != _NO_PARENT:
            occupancy.pins[parent] += 1
        while self._free < wanted:
            victims = self._evictor.victims(-(-(wanted - self._free) // size), hashes)
            if not len(victims):
                break
            self._resident[victims] = False
            names.holders[victims] -= 1
            # A parent may lose several children at once.
            parents = occupancy.parent[victims]
            np.subtract.at(occupancy.children, parents[parents != _NO_PARENT], 1)
            occupancy.parent[victims] = _NO_PARENT
            self._free += int(names.sizes[victims].sum())
            names.left.append(victims)
        if parent != _NO_PARENT:
            occupancy.pins[parent] -= 1


def _leading(flags: NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(flags.argmin())


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _grown(column: NDArray[_Scalar], size: int) -> NDArray[_Scalar]:
    longer = np.zeros(size, dtype=column.dtype)
    longer[: len(column)] = column
    return longer
