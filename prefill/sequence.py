"""The blocks that hold one sequence's KV on the device."""

from __future__ import annotations

import numpy as np

from kvstore.block import WHOLE, SlotArray, Uint32Array
from kvstore.lease import Lease
from kvstore.store import TieredStore
from prefill.paged import BlockTable
from prefill.request import Request


class Sequence:
    """Blocks of a running request: leased ones in front, computed ones published as they fill.

    ``own`` are slots that only this sequence has: not full yet, or a copy of a block that somebody
    else published first. They go back to the store at ``close``.
    """

    def __init__(self, store: TieredStore, request: Request, lease: Lease, slots: SlotArray) -> None:
        """The lease's blocks are on the device; ``slots`` are reserved there for the tokens behind them."""
        self.lease = lease
        self.chain = lease.chain
        self.computed = lease.tokens
        """Tokens whose KV is in the blocks."""
        self.published = lease.blocks
        """Blocks that everybody can read, from the first one on."""
        self._request = request
        self._store = store
        self._slots = slots
        self._own = set(slots.tolist())
        self._first_own = lease.blocks
        leased = [part.slots for part in lease.segments.get(WHOLE, ())]
        self.table = BlockTable(store.offsets(np.concatenate((*leased, slots))).tolist())

    @property
    def block_size(self) -> int:
        return self.chain.root.block_size

    @property
    def capacity(self) -> int:
        """Tokens that there are blocks for."""
        return len(self.table) * self.block_size

    def grow(self) -> bool:
        """Take a block for further tokens; False when there is none."""
        slots = self._store.reserve(self.chain.namespace, 1)
        self._slots = np.concatenate((self._slots, slots))
        self._own.update(slots.tolist())
        self.table.extend(self._store.offsets(slots).tolist())
        return len(slots) > 0

    def advance(self, count: int, tokens: Uint32Array) -> None:
        """``count`` more of the sequence's ``tokens`` are computed: publish the blocks that are full now."""
        self.computed += count
        full = self.computed // self.block_size
        if not self._request.reuse or full == self.published:
            return
        if full > len(self.chain):
            more = tokens[len(self.chain) * self.block_size : full * self.block_size]
            self.chain = self.chain.grown(more, self._request.extras)
        rows = self.chain.rows(WHOLE, self.published, full)
        slots = self._slots[self.published - self._first_own : full - self._first_own]
        kept = self._store.publish(self.lease, rows, slots)
        self._own.difference_update(slots.tolist())
        self._own.update(kept.tolist())
        self.published = full

    def close(self) -> None:
        """Give everything back; what was published stays in the cache. Idempotent."""
        if self._own:
            self._store.unreserve(np.array(sorted(self._own), dtype=np.int64))
            self._own.clear()
        # What redis delivered when nobody waited for it any more was computed here: it is no hit.
        self._store.release(self.lease, used_blocks=self._first_own)
