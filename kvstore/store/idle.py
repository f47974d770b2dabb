"""Blocks of the memory tiers that nobody has used for their time to live."""

from __future__ import annotations

from kvstore.evict.expiry import Expiry
from kvstore.pool import BlockPool
from kvstore.stamps import TableAges
from kvstore.store.parts import Parts


class IdleBlocks:
    """Frees them, a bounded part of each tier at a time. Without a time to live there are none.

    They are not copied to redis on their way: their time is over. What redis has of them stays for as
    long as redis keeps it.
    """

    def __init__(self, parts: Parts) -> None:
        self._clock = parts.clock
        self._swept: list[tuple[BlockPool, Expiry]] = []
        ttl = parts.options.idle_ttl_seconds
        if ttl is not None:
            for tier in parts.tiers.memory:
                pool = tier.pool
                self._swept.append((pool, Expiry(ttl, pool.occupancy, TableAges(pool.extents))))

    def expire(self) -> None:
        """Free the next of those that are due."""
        for pool, expiry in self._swept:
            now = self._clock()
            if expiry.behind(now):
                pool.expire(expiry.due(now))
