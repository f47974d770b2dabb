"""Which extent to take from one slot size for another: bytes decide, by how long they lay unused."""

from __future__ import annotations

import numpy as np

from kvstore.evict.base import Occupancy
from kvstore.extents import Extent, ExtentMap, SlotClass
from kvstore.table import SlotState


def coldest_idle_extent(extents: ExtentMap, occupancy: Occupancy, wanted_by: SlotClass) -> Extent | None:
    """The least recently used extent of another class that nobody reads or writes."""
    idle = [
        extent
        for slot_class in extents.classes()
        if slot_class != wanted_by
        for extent in extents.of_class(slot_class)
        if _is_idle(extents, occupancy, extent)
    ]
    return min(idle, key=_last_used, default=None)


def is_colder(extent: Extent, own: list[Extent]) -> bool:
    """Was ``extent`` used less recently than the coldest of a class's own extents?"""
    return not own or _last_used(extent) < min(map(_last_used, own))


def _is_idle(extents: ExtentMap, occupancy: Occupancy, extent: Extent) -> bool:
    span = slice(extent.base, extent.base + extent.rows)
    state = extents.state[span]
    busy = (state == SlotState.STAGED) | (state == SlotState.QUARANTINED)
    return not busy.any() and not occupancy.pins[span].any()


def _last_used(extent: Extent) -> float:
    """Mean time of last use over the blocks of an extent; an empty one is coldest of all."""
    ready = extent.table.state == SlotState.READY
    return float(extent.table.used_at[ready].mean()) if ready.any() else -np.inf
