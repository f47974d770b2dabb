"""What is in memory by namespace, and forgetting it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvstore.block import TierName
from kvstore.events import RemovalCause
from kvstore.pool import BlockPool
from kvstore.stamps import history
from kvstore.store.parts import Parts


def clear(parts: Parts, namespace: bytes | None, tiers: Collection[TierName] | None) -> tuple[int, int]:
    """Forget what nobody holds, of one namespace or all: (forgotten, held) blocks."""
    cleared = held = 0
    for tier in parts.tiers.memory:
        for space in tier.pool.spaces():
            if (tiers is None or tier.name in tiers) and namespace in (None, space.namespace):
                slots = np.fromiter(space.ready.values(), dtype=np.int64, count=len(space.ready))
                gone = tier.pool.discard(slots, RemovalCause.CLEARED)
                cleared, held = cleared + gone, held + len(slots) - gone
    parts.report_removed()
    return cleared, held


def resident(parts: Parts, namespace: bytes) -> dict[TierName, tuple[int, int]]:
    """(Blocks, their payload bytes) of a namespace in each memory tier, all ranks together."""
    counts = {}
    for tier in parts.tiers.memory:
        spaces = [space for space in tier.pool.spaces() if space.namespace == namespace]
        blocks = sum(len(space.ready) for space in spaces)
        counts[tier.name] = blocks, sum(len(space.ready) * space.payload_bytes for space in spaces)
    return counts


def unread_bytes(pool: BlockPool) -> int:
    """Payload bytes of the blocks that nobody has read since they were stored."""
    total = 0
    for space in pool.spaces():
        slots = np.fromiter(space.ready.values(), dtype=np.int64, count=len(space.ready))
        total += int(np.count_nonzero(history(pool.extents, slots).reads == 0)) * space.payload_bytes
    return total
