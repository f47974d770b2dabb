"""Where slots are in the pool file, in the terms of those who map it."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray, Uint64Array
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import Offsets


def file_offsets(host: HostTier, slots: SlotArray) -> Offsets:
    """Byte offset of each slot from the start of the file."""
    return host.pool.extents.offsets(slots) + host.file.data_at


def generations(host: HostTier, slots: SlotArray) -> Uint64Array:
    """Generation of each slot now: a reader compares it before and after its copy."""
    found = np.empty(len(slots), dtype=np.uint64)
    for extent, positions, rows in host.pool.extents.groups(slots):
        found[positions] = extent.table.generation[rows]
    return found
