"""Making room ahead of need, so that what leaves the host tier can be copied to redis before it goes."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.block import SlotArray
from kvstore.extents import SlotClass
from kvstore.index import Space
from kvstore.pool import BlockPool

_LOW = 3 / 64
_HIGH = 4 / 64


def vacate_ahead(
    pool: BlockPool, room_bytes: int, leaving: Mapping[SlotClass, int]
) -> list[tuple[Space, SlotArray]]:
    """Blocks that give up their slots now, since few are free: they stay STAGED until they are copied.

    Of a slot size of which less than 3/64 is free, until 4/64 are, as far as ``room_bytes`` of copies
    may wait. ``leaving`` counts the slots that wait already. Nothing is done as long as the pool may
    grow into memory that no slot size has been given.
    """
    extents = pool.extents
    if extents.may_grow:
        return []
    vacated: list[tuple[Space, SlotArray]] = []
    for slot_class in extents.classes():
        count = min(
            _missing(pool, slot_class, leaving.get(slot_class, 0)), room_bytes // slot_class.slot_bytes
        )
        if count > 0:
            taken = pool.vacate(slot_class, count)
            room_bytes -= sum(len(slots) for _, slots in taken) * slot_class.slot_bytes
            vacated += taken
    return vacated


def _missing(pool: BlockPool, slot_class: SlotClass, leaving: int) -> int:
    """Slots to free now, so that with those that are leaving enough are free."""
    mine = pool.extents.of_class(slot_class)
    total = sum(extent.rows for extent in mine)
    coming = leaving + sum(extent.free for extent in mine)
    if coming >= max(1, int(total * _LOW)):
        return 0
    return max(1, int(total * _HIGH)) - coming
