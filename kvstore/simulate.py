"""Replay of a trace through the policies that the server runs: what each would have hit.

One tier, no bytes. A hit is a leading run: a block counts only when all blocks before it are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES
from kvstore.errors import ConfigError
from kvstore.evict.arc import ARC
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.evict.lfu import LFU
from kvstore.evict.lru import LRU
from kvstore.evict.oracle import Oracle, next_uses
from kvstore.evict.reuse import Reuse
from kvstore.evict.s3fifo import S3FIFO
from kvstore.index import split_hashes
from kvstore.trace import Request

MakeEvictor = Callable[[Occupancy], Evictor]
_NO_PARENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests, with their blocks named by numbers, so that a replay needs no hash.

    ``blocks`` has one array a request: equal numbers are equal prefixes. ``parents`` is, for each number,
    that of the block before it, -1 for a first one.
    """

    requests: Sequence[Request]
    blocks: Sequence[NDArray[np.int64]]
    parents: NDArray[np.int32]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Workload:
        """Name the blocks of requests, once for all replays of them."""
        numbers: dict[bytes, int] = {}
        blocks = [
            np.array(
                [numbers.setdefault(key, len(numbers)) for key in split_hashes(request.chain.hashes)],
                dtype=np.int64,
            )
            for request in requests
        ]
        parents = np.full(len(numbers), _NO_PARENT, dtype=np.int32)
        for ids in blocks:
            parents[ids[1:]] = ids[:-1]
        return cls(requests, blocks, parents)

    @property
    def distinct_blocks(self) -> int:
        """Blocks that differ: a cache of so many never evicts."""
        return len(self.parents)


Watch = Callable[[Workload], Iterable[int]]
"""Yields the number of every request, in order; where a progress bar looks on."""


def each_request(workload: Workload) -> Iterable[int]:
    """The numbers of the requests, in order, and nobody looks on."""
    return range(len(workload.requests))


POLICIES: dict[str, Callable[[Workload], MakeEvictor]] = {
    "lru": lambda _: LRU,
    "lfu": lambda _: LFU,
    "s3fifo": lambda _: S3FIFO,
    "arc": lambda _: ARC,
    "reuse": lambda _: Reuse,
    "oracle": lambda workload: partial(Oracle, future=next_uses(workload.blocks)),
}
"""Policies by name. The oracle has read the workload; all others see it as it comes."""


class HitCounts(NamedTuple):
    """What a replay asked for and hit, from a cold start.

    Blocks count a partly filled last one as one; tokens are those of the prompts, so the same block
    counts for what it holds. Hits are leading runs. ``…_warm`` counts only the second half of the
    requests, ``requests // 2`` and on, when the cache is no longer empty.
    """

    requests: int
    asked_blocks: int
    hit_blocks: int
    asked_tokens: int
    hit_tokens: int
    asked_tokens_warm: int
    hit_tokens_warm: int

    @property
    def block_rate(self) -> float:
        """Hit share of all blocks asked for."""
        return self.hit_blocks / self.asked_blocks

    @property
    def token_rate(self) -> float:
        """Hit share of all tokens asked for."""
        return self.hit_tokens / self.asked_tokens

    @property
    def token_rate_warm(self) -> float:
        """Hit share of the tokens that the second half of the requests asked for."""
        return self.hit_tokens_warm / self.asked_tokens_warm


class Instance:
    """One cache of ``blocks`` blocks, asked for one request of a workload after another.

    It does to a policy what a pool does, step by step (``kvstore/pool.py``), for blocks of one size
    that are written at once and let the policy refuse them. A block's number stands for its slot.
    """

    def __init__(self, make_evictor: MakeEvictor, workload: Workload, blocks: int) -> None:
        if blocks < 1:
            raise ConfigError(f"capacity is {blocks} blocks, expected at least 1; raise it")
        size = workload.distinct_blocks
        self._workload = workload
        self._occupancy = Occupancy(
            children=np.zeros(size, dtype=np.int32),
            parent=np.full(size, _NO_PARENT, dtype=np.int32),
            pins=np.zeros(size, dtype=np.int32),
        )
        self._resident = np.zeros(size, dtype=np.bool_)
        self._free = blocks
        self._evictor = make_evictor(self._occupancy)

    @property
    def resident(self) -> NDArray[np.int64]:
        """The blocks that are here now, in the order of their numbers."""
        return np.flatnonzero(self._resident)

    def serve(self, number: int) -> int:
        """Hit blocks of a request, whose blocks are kept from then on.

        Of a prompt longer than the cache, the head is kept.
        """
        request, ids = self._workload.requests[number], self._workload.blocks[number]
        # Only leaves go, so what is resident of a prompt is a leading run.
        hits = int(np.count_nonzero(self._resident[ids]))
        hashes = request.chain.hashes
        self._evictor.touch(Touch(hashes, ids[:hits], hits, request.time, request.hints))
        if hits < len(ids):
            parent = int(ids[hits - 1]) if hits else _NO_PARENT
            self._bring(ids[hits:], hashes[hits * HASH_BYTES :], parent, request.time)
        return hits

    def _bring(self, missing: NDArray[np.int64], hashes: bytes, parent: int, time: float) -> None:
        occupancy = self._occupancy
        if self._free < len(missing):
            self._make_room(len(missing), hashes, parent)
        fresh = missing[: self._free]
        if not len(fresh):
            return
        self._free -= len(fresh)
        self._resident[fresh] = True
        occupancy.parent[fresh[1:]] = fresh[:-1]
        occupancy.children[fresh[:-1]] = 1
        if parent != _NO_PARENT:
            occupancy.parent[fresh[0]] = parent
            occupancy.children[parent] += 1
        self._evictor.add(fresh, hashes[: len(fresh) * HASH_BYTES], parent, time)

    def _make_room(self, count: int, hashes: bytes, parent: int) -> None:
        """Free slots until there are ``count``, or the policy gives no more."""
        occupancy = self._occupancy
        if parent != _NO_PARENT:
            occupancy.pins[parent] += 1
        while self._free < count and len(victims := self._evictor.victims(count - self._free, hashes)):
            self._resident[victims] = False
            # A parent may lose several children at once.
            parents = occupancy.parent[victims]
            np.subtract.at(occupancy.children, parents[parents != _NO_PARENT], 1)
            occupancy.parent[victims] = _NO_PARENT
            self._free += len(victims)
        if parent != _NO_PARENT:
            occupancy.pins[parent] -= 1


def replay(
    workload: Workload, make_evictor: MakeEvictor, blocks: int | None, watch: Watch = each_request
) -> HitCounts:
    """Ask one cold cache of ``blocks`` blocks (None: unlimited) for every request, in order."""
    most = workload.distinct_blocks
    instance = Instance(make_evictor, workload, most if blocks is None else min(blocks, most))
    return count_hits(workload.requests, [instance.serve(number) for number in watch(workload)])


def count_hits(requests: Sequence[Request], hit_blocks: Sequence[int]) -> HitCounts:
    """Add up a replay's hit blocks, one number a request."""
    asked = [request.tokens for request in requests]
    hit = [request.tokens_in(blocks) for request, blocks in zip(requests, hit_blocks, strict=True)]
    half = len(requests) // 2
    return HitCounts(
        requests=len(requests),
        asked_blocks=sum(len(request.chain) for request in requests),
        hit_blocks=sum(hit_blocks),
        asked_tokens=sum(asked),
        hit_tokens=sum(hit),
        asked_tokens_warm=sum(asked[half:]),
        hit_tokens_warm=sum(hit[half:]),
    )


def least_capacity(
    workload: Workload, make_evictor: MakeEvictor, share: float, watch: Watch = each_request
) -> tuple[int, HitCounts]:
    """The least capacity at which a policy hits ``share`` of the blocks that an unlimited one does.

    By bisection, to within 1 % of the answer; hit rates all but never fall where there is more room.
    """
    ceiling = replay(workload, make_evictor, None, watch)
    low, high, best = 0, workload.distinct_blocks, ceiling
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        counts = replay(workload, make_evictor, middle, watch)
        if counts.hit_blocks >= share * ceiling.hit_blocks:
            high, best = middle, counts
        else:
            low = middle
    return high, best
