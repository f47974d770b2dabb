"""A request on its way in: its cached prefix is leased, and there has to be room for the rest of it."""

from __future__ import annotations

import numpy as np

from kvstore.block import WHOLE, TierName
from kvstore.lease import Lease
from kvstore.spec import slot_bytes_for
from kvstore.store import TieredStore
from prefill.plan import blocks_for
from prefill.sequence import Sequence
from prefill.track import Track


class Admission:
    """A lease on what is cached of a request's tokens. It ends with ``start``, ``close`` or ``put_back``.

    The request is looked up and counted once, however long it waits for room.
    """

    def __init__(self, store: TieredStore, track: Track, lease: Lease, redis_until: float) -> None:
        """Redis is waited for till ``redis_until``."""
        self.track = track
        self.lease = lease
        self.redis_until = redis_until
        self._store = store
        self._blocks = blocks_for(len(track.tokens), lease.chain.root.block_size)

    def fits(self, spare: int, block_bytes: int) -> bool:
        """Whether all known tokens have room on the device, with ``spare`` blocks left over."""
        pool = self._store.memory[0].pool
        usage = pool.usage()
        # Only counted: nothing is evicted before it is sure to be of use.
        available = pool.limit_bytes - usage.staged - usage.quarantined - usage.leased
        available //= slot_bytes_for(block_bytes)
        return self._missing() + spare <= available

    def start(self) -> Sequence | None:
        """Bring the leased blocks up, with room for the other tokens; None where it is not enough after all.

        Room for all of it is taken first, so that what is brought up finds its place in it.
        """
        namespace, own = self.lease.chain.namespace, self._blocks - self.lease.blocks
        slots = self._store.reserve(namespace, self._missing())
        if len(slots) < self._missing():
            self._store.unreserve(slots)
            return None
        self._store.unreserve(slots[own:])
        slots = slots[:own]
        try:
            self._store.promote(self.lease)
        except BaseException:
            self._store.unreserve(slots)
            raise
        # The run may have become shorter on its way up: what it lost is to be computed.
        lost = self._blocks - self.lease.blocks - own
        slots = np.concatenate((slots, self._store.reserve(namespace, lost)))
        if len(slots) < own + lost:
            self._store.unreserve(slots)
            return None
        return Sequence(self._store, self.track.request, self.lease, slots)

    def close(self) -> None:
        """Give the lease back; the request is counted as one that used nothing of it."""
        self._store.release(self.lease, used_blocks=0)

    def put_back(self) -> None:
        """Give the lease back of a request that will ask again: it is counted then."""
        self.lease.counted = False
        self.close()

    def _missing(self) -> int:
        leased = self.lease.segments.get(WHOLE, ())
        in_place = sum(len(part.slots) for part in leased if part.tier is TierName.DEVICE)
        return self._blocks - in_place
