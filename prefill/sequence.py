"""One request's tokens and the blocks that hold their KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstore.block import WHOLE, SlotArray
from kvstore.lease import Lease
from kvstore.store import TieredStore
from prefill.paged import BlockTable
from prefill.plan import Plan
from prefill.request import Request, Result


class Sequence:
    """Blocks of a running request: leased ones in front, computed ones published as they fill.

    ``own`` are slots that only this sequence has: not full yet, or a copy of a block that somebody
    else published first. They go back to the store at ``close``.
    """

    def __init__(
        self, store: TieredStore, request: Request, lease: Lease, slots: SlotArray, started: float
    ) -> None:
        """The lease's blocks are on the device; ``slots`` are reserved there for all further tokens."""
        self.request = request
        self.lease = lease
        self.chain = lease.chain
        self.tokens: list[int] = request.tokens.tolist()
        self.computed = lease.tokens
        """Tokens whose KV is in the blocks."""
        self.output: list[int] = []
        self._started = started
        self._first_token_at = started
        self._store = store
        self._slots = slots
        self._own = set(slots.tolist())
        self._first_own = self._published = lease.blocks
        leased = [part.slots for part in lease.segments.get(WHOLE, ())]
        self.table = BlockTable(store.offsets(np.concatenate((*leased, slots))).tolist())
        hits = lease.hit_blocks(lease.blocks)
        cached = {tier: blocks * self.block_size for tier, blocks in hits.items()}
        self.plan = Plan(len(request.tokens), self.computed, cached)

    @property
    def block_size(self) -> int:
        return self.chain.root.block_size

    def pending_tokens(self) -> NDArray[np.uint32]:
        """Tokens known and not computed yet."""
        return np.array(self.tokens[self.computed :], dtype=np.uint32)

    def advance(self, token: int, now: float) -> None:
        """All known tokens are computed and ``token`` follows: publish the blocks that are full."""
        self.computed = len(self.tokens)
        if not self.output:
            self._first_token_at = now
        self._publish()
        self._append(token)

    def take_over(self, output: list[int], now: float) -> None:
        """Go on where another engine stopped, which chose ``output``.

        Where the lease has all whole blocks of the prompt, its unfinished tail block is in place too.
        """
        if self.lease.blocks == len(self.chain):
            self.computed = len(self.tokens)
            self.plan = replace(self.plan, start=self.computed)
        for token in output:
            self._append(token)
        self._first_token_at = now

    def result(self) -> Result:
        return Result(
            self.request.request_id,
            self.output,
            self.plan.prompt_tokens,
            self.plan.cached,
            self.plan.suffix,
            self._started - self.request.arrived,
            self._first_token_at - self._started,
        )

    def close(self) -> None:
        """Give everything back; what was published stays in the cache. Idempotent."""
        if self._own:
            self._store.unreserve(np.array(sorted(self._own), dtype=np.int64))
            self._own.clear()
        # What redis delivered when nobody waited for it any more was computed here: it is no hit.
        self._store.release(self.lease, used_blocks=self._first_own)

    def _append(self, token: int) -> None:
        self.output.append(token)
        self.tokens.append(token)

    def _publish(self) -> None:
        full = self.computed // self.block_size
        if not self.request.reuse or full == self._published:
            return
        if full > len(self.chain):
            more = self.tokens[len(self.chain) * self.block_size : full * self.block_size]
            self.chain = self.chain.grown(more, self.request.extras)
        rows = self.chain.rows(WHOLE, self._published, full)
        slots = self._slots[self._published - self._first_own : full - self._first_own]
        kept = self._store.publish(self.lease, rows, slots)
        self._own.difference_update(slots.tolist())
        self._own.update(kept.tolist())
        self._published = full
