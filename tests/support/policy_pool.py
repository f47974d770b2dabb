"""Requests served by the pool that tiers use, over memory that holds tables and no bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.block import WHOLE
from kvstore.evict.base import Touch
from kvstore.evict.expiry import Expiry
from kvstore.extents import Extent
from kvstore.pool import BlockPool
from kvstore.simulate import MakeEvictor
from kvstore.spec import SLOT_ALIGNMENT
from kvstore.stamps import TableAges
from kvstore.trace import Request


class TableMemory:
    """A memory whose slots stand for blocks; ``blocks`` of the smallest size fill an extent."""

    def __init__(self, blocks: int, extents: int = 1) -> None:
        self.extents = extents
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


class PoolInstance:
    """A pool of ``blocks`` blocks that is asked for requests and keeps what it lacked of them.

    With a time to live it is swept before each.
    """

    def __init__(self, make_evictor: MakeEvictor, blocks: int, idle_ttl_seconds: float | None = None) -> None:
        self.pool = pool = BlockPool(TableMemory(blocks), make_evictor)
        self._expiry: Expiry | None = None
        if idle_ttl_seconds is not None:
            self._expiry = Expiry(idle_ttl_seconds, pool.occupancy, TableAges(pool.extents))

    def serve(self, request: Request) -> int:
        """Hit blocks of a request."""
        pool, chain, now = self.pool, request.chain, request.time
        while self._expiry and self._expiry.behind(now):
            pool.expire(self._expiry.due(now))
        space = pool.open_space(chain.namespace, WHOLE, SLOT_ALIGNMENT, chain.root.block_size)
        rows = chain.rows(WHOLE)
        run = pool.match(rows).slots
        hits = len(run)
        pool.touch(space, Touch(chain.hashes, run, hits, now, request.hints))
        if hits < len(rows):
            missing = rows.slice(hits, len(rows))
            # No lease is needed: stage keeps the block that these hang from, and so all before it.
            slots = pool.stage(space, len(missing), missing, selective=True)
            if len(slots):
                pool.commit(slots, missing.slice(0, len(slots)), None, time=now)
        pool.removed.clear()
        return hits

    def resident(self) -> set[bytes]:
        """Hashes of the blocks that are here now."""
        return {key for space in self.pool.spaces() for key in space.ready}
