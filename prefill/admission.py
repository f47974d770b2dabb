"""A request on its way in: its cached prefix is leased, and room is gathered for all of it."""

from __future__ import annotations

import numpy as np

from kvstore.block import WHOLE, SlotArray, TierName
from kvstore.lease import Lease
from kvstore.store import TieredStore
from prefill.plan import blocks_for
from prefill.request import Request
from prefill.sequence import Sequence


class Admission:
    """Device slots for a request's tokens, taken as they become free.

    What it has it keeps, so that a request is looked up and counted once, however long it waits,
    and gets its turn. It ends with ``start`` or ``close``.
    """

    def __init__(
        self, store: TieredStore, request: Request, lease: Lease, length: int, redis_until: float
    ) -> None:
        """``length`` is how many tokens' KV is to be held; redis is waited for till ``redis_until``."""
        self.request = request
        self.lease = lease
        self.redis_until = redis_until
        self._store = store
        self._blocks = blocks_for(length, lease.chain.root.block_size)
        self._slots: SlotArray = np.zeros(0, dtype=np.int64)

    def gather(self) -> bool:
        """Take what room there is; is it enough, also for the blocks that have to come up?"""
        leased = self.lease.segments.get(WHOLE, ())
        in_place = sum(len(part.slots) for part in leased if part.tier is TierName.DEVICE)
        missing = self._blocks - in_place - len(self._slots)
        if missing > 0:
            self._reserve(missing)
        return len(self._slots) >= self._blocks - in_place

    def start(self, now: float) -> Sequence:
        """Bring the leased blocks up into a part of the room; the rest of it is to compute in."""
        own = self._blocks - self.lease.blocks
        self._store.unreserve(self._slots[own:])
        self._slots = self._slots[:own]
        self._store.promote(self.lease)
        self._reserve(self._blocks - self.lease.blocks - own)
        assert len(self._slots) == self._blocks - self.lease.blocks, "gathered room was lost"
        return Sequence(self._store, self.request, self.lease, self._slots, now)

    def close(self) -> None:
        """Give everything back."""
        self._store.unreserve(self._slots)
        self._store.release(self.lease, used_blocks=0)

    def _reserve(self, blocks: int) -> None:
        more = self._store.reserve(self.lease.chain.namespace, blocks)
        self._slots = np.concatenate((self._slots, more))
