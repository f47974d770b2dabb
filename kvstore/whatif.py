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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, MissCause, SlotArray
from kvstore.events import Event, RequestSettled
from kvstore.ghost import Ghost, MakeEvictor, Names, TakenOver
from kvstore.index import NO_PARENT, Space
from kvstore.pool import BlockPool
from kvstore.sideline import PAUSE_SECONDS, Sideline
from kvstore.stamps import history
from kvstore.table import hash_words

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
SAMPLE_BLOCKS_MAX = 1 << 14
"""What the largest ghost may hold; the rate follows from it."""

_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


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
        idle_ttl_seconds: float | None = None,
        seed: int = 0,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """``block_bytes`` says what a block of a namespace takes of the pool, all ranks together.

        ``idle_ttl_seconds`` is the time to live of the pool's blocks. ``seed`` chooses the sample;
        ``pause_seconds`` is between two requests (``Sideline``).
        """
        self._make_evictor = make_evictor
        self._pool_bytes = pool_bytes
        self._block_bytes = block_bytes
        self._idle_ttl_seconds = idle_ttl_seconds
        self._seed = np.uint64(seed)
        self._bits = -1
        self._names = Names()
        self._ghosts: list[Ghost] = []
        self._asked = 0
        self._missed = [0] * len(SCALES)
        self._sideline = Sideline("kvstore-whatif", self._serve, pause_seconds=pause_seconds)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestSettled):
            return
        if size := self._block_bytes(event.namespace):
            self._sideline.put(_Asked(event, size), event.nbytes)

    def take_over(self, pool: BlockPool) -> None:
        """Begin with the blocks that a pool has already, before the first event.

        A ghost keeps of them what it has room for. The larger ones begin with no more than the pool
        itself, where an earlier pool of their size would have left more.
        """
        # One rank speaks for all.
        spaces = {space.namespace: space for space in reversed(pool.spaces()) if space.ready}
        sizes = {namespace: self._block_bytes(namespace) for namespace in spaces}
        for size in sizes.values():
            self._fit(size)
        taken = TakenOver()
        for namespace, space in spaces.items():
            sample = _sample_of(pool, space, self._in_sample)
            taken.add(self._names.of(sample.names, sizes[namespace]), sample.parents, sample.used_at)
        for ghost in self._ghosts:
            ghost.cover(len(self._names.sizes))
            ghost.take_over(taken)
        self._names.recycle(taken.ids)

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
        with self._numbered(words, block_bytes) as ids:
            hashes = words[: len(ids)].tobytes()
            for place, ghost in enumerate(self._ghosts):
                hits = ghost.serve(ids, hashes, event.time, event.hints)
                self._missed[place] += (len(ids) - max(own, hits)) * tokens

    @contextmanager
    def _numbered(self, words: NDArray[np.uint64], block_bytes: int) -> Iterator[SlotArray]:
        """Numbers for the blocks of a prompt, which every ghost knows what to do with."""
        ids = self._names.of(words, block_bytes)
        for ghost in self._ghosts:
            ghost.cover(len(self._names.sizes))
        try:
            yield ids
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
            self._names = Names()
            self._ghosts = [
                Ghost(
                    self._make_evictor,
                    int(self._pool_bytes * scale) >> bits,
                    self._names,
                    self._idle_ttl_seconds,
                )
                for scale in SCALES
            ]


class _Sample(NamedTuple):
    """Blocks by name; ``parents`` are places among them, -1 where none of the blocks before one is here."""

    names: NDArray[np.uint64]
    parents: NDArray[np.int64]
    used_at: NDArray[np.float64]


def _sample_of(
    pool: BlockPool, space: Space, in_sample: Callable[[NDArray[np.uint64]], NDArray[np.bool_]]
) -> _Sample:
    """The READY blocks of a space that are in the sample, each behind the last one before it that is."""
    slots = np.fromiter(space.ready.values(), dtype=np.int64, count=len(space.ready))
    names, used_at = hash_words(b"".join(space.ready)), history(pool.extents, slots).used_at
    parents = pool.occupancy.parent[slots]
    places = np.full(max(slots.max(), parents.max()) + 2, NO_PARENT)
    places[slots] = np.arange(len(slots))
    above = places[parents]  # -1 reads the last entry, which is nobody's
    sampled = in_sample(names[:, 1])
    nearest = np.where(sampled, np.arange(len(slots)), above)
    while (passed := (nearest != NO_PARENT) & ~sampled[nearest]).any():
        nearest = np.where(passed, nearest[nearest], nearest)
    chosen = np.flatnonzero(sampled)
    before = np.where(above[chosen] == NO_PARENT, NO_PARENT, nearest[above[chosen]])
    found = np.searchsorted(chosen, before)
    return _Sample(names[chosen], np.where(before == NO_PARENT, NO_PARENT, found), used_at[chosen])
