"""Replay of a trace through the classes that the server runs: what a policy would have hit.

One tier, no bytes. A hit is a leading run: a block counts only when all blocks before it are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.block import WHOLE
from kvstore.errors import ConfigError
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.evict.lru import LRU
from kvstore.extents import Extent
from kvstore.index import split_hashes
from kvstore.pool import BlockPool
from kvstore.spec import SLOT_ALIGNMENT
from kvstore.trace import Request

MakeEvictor = Callable[[Occupancy], Evictor]
Watch = Callable[[Sequence[Request]], Iterable[Request]]
"""Yields every request, in order; where a progress bar looks on."""

POLICIES: dict[str, MakeEvictor] = {"lru": LRU}


@dataclass(frozen=True, slots=True)
class HitCounts:
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


class TableMemory:
    """A memory of one extent whose slots stand for blocks: there are tables, and no bytes behind them."""

    def __init__(self, blocks: int) -> None:
        self.extents = 1
        self.extent_bytes = blocks * SLOT_ALIGNMENT
        self.inline_tables = False

    def reserve(self, extent: int) -> bool:
        del extent
        return True

    def table_buffer(self, extent: int, size: int) -> NDArray[np.uint8]:
        del extent
        return np.zeros(size, dtype=np.uint8)

    def assigned(self, extent: Extent) -> None:
        del extent

    def namespace_id(self, namespace: bytes) -> int:
        del namespace
        return 0


class Instance:
    """One cache of ``blocks`` blocks, asked one request after another."""

    def __init__(self, make_evictor: MakeEvictor, blocks: int) -> None:
        if blocks < 1:
            raise ConfigError(f"capacity is {blocks} blocks, expected at least 1; raise it")
        self._pool = BlockPool(TableMemory(blocks), make_evictor)

    def serve(self, request: Request) -> int:
        """Hit blocks of a request, all of whose blocks are kept from then on.

        Of a prompt longer than the cache, the head is kept.
        """
        pool, chain, now = self._pool, request.chain, request.time
        space = pool.open_space(chain.namespace, WHOLE, SLOT_ALIGNMENT, chain.root.block_size)
        rows = chain.rows(WHOLE)
        run = pool.match(rows).slots
        hits = len(run)
        pool.touch(space, Touch(chain.hashes, run, hits, now))
        if hits == len(rows):
            return hits
        missing = rows.slice(hits, len(rows))
        # No lease is needed: stage keeps the block that these hang from, and so all before it.
        slots = pool.stage(space, len(missing), missing)
        if len(slots):
            pool.commit(slots, missing.slice(0, len(slots)), None, time=now)
        pool.removed.clear()
        return hits


def replay(
    requests: Sequence[Request], make_evictor: MakeEvictor, blocks: int | None, watch: Watch = iter
) -> HitCounts:
    """Ask one cold cache of ``blocks`` blocks (None: unlimited) for every request, in order."""
    most = distinct_blocks(requests)
    instance = Instance(make_evictor, most if blocks is None else min(blocks, most))
    return count_hits(requests, [instance.serve(request) for request in watch(requests)])


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


def distinct_blocks(requests: Iterable[Request]) -> int:
    """Blocks that differ: a cache of so many never evicts."""
    return len({key for request in requests for key in split_hashes(request.chain.hashes)})
