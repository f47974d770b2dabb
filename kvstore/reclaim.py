"""Which extent to take from one slot size for another: bytes decide, by how long they lay unused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.extents import Extent, ExtentMap, SlotClass
from kvstore.table import SlotState


def coldest_idle_extent(
    extents: ExtentMap, wanted_by: SlotClass, may_go: Callable[[Extent], bool]
) -> Extent | None:
    """The least recently used extent of another class that nobody reads or writes and that may go."""
    idle = [
        extent
        for slot_class in extents.classes()
        if slot_class != wanted_by
        for extent in extents.of_class(slot_class)
        if not extent.busy and not extent.pinned and may_go(extent)
    ]
    return min(idle, key=_last_used, default=None)


def is_colder(extent: Extent, own: list[Extent]) -> bool:
    """Was ``extent`` used less recently than the coldest of a class's own extents?"""
    return not own or _last_used(extent) < min(map(_last_used, own))


def _last_used(extent: Extent) -> float:
    """Mean time of last use over the blocks of an extent; an empty one is coldest of all."""
    if extent.last_used is None:
        ready = extent.table.state == SlotState.READY
        extent.last_used = float(extent.table.used_at[ready].mean()) if ready.any() else -np.inf
    return extent.last_used
