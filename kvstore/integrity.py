"""The conservation law of a pool, checkable at any moment (docs/architecture.md)."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray
from kvstore.index import NO_PARENT, Space, precedes, split_hashes
from kvstore.pool import BlockPool
from kvstore.table import SlotState


def check_pool(pool: BlockPool, pinned: SlotArray | None = None) -> None:
    """AssertionError when a pool's books do not balance. Costs time proportional to the pool.

    ``pinned`` lists each pin that somebody answers for (one entry a pin); omit it where pins are
    not known.
    """
    _check_bytes(pool)
    _check_index(pool)
    _check_links(pool)
    pins, state = pool.occupancy.pins, pool.extents.state
    assert (pins >= 0).all(), "a pin was given back twice"
    assert (state[np.flatnonzero(pins)] == SlotState.READY).all(), "a slot is leased but not ready"
    if pinned is not None:
        counted = np.bincount(pinned, minlength=len(pins))[: len(pins)]
        assert (counted == pins).all(), "pins that nobody answers for, or the reverse"


def _check_bytes(pool: BlockPool) -> None:
    usage = pool.usage()
    counted = dict.fromkeys(SlotState, 0)
    leased = 0
    for extent in pool.extents.extents():
        span = slice(extent.base, extent.base + extent.rows)
        state = pool.extents.state[span]
        assert (extent.table.state == state).all(), "a table does not publish its slots' states"
        odd = extent.table.generation % np.uint64(2) == 1
        assert (odd == (state != SlotState.READY)).all(), "generation is even where not readable"
        busy = (state == SlotState.STAGED) | (state == SlotState.QUARANTINED)
        assert extent.free == int(np.count_nonzero(state == SlotState.FREE))
        assert extent.busy == int(np.count_nonzero(busy))
        assert extent.pinned == int(np.count_nonzero(pool.occupancy.pins[span]))
        for each in SlotState:
            counted[each] += int(np.count_nonzero(state == each)) * extent.slot_class.slot_bytes
        leased += int(np.count_nonzero(pool.occupancy.pins[span])) * extent.slot_class.slot_bytes
    assert usage.staged == counted[SlotState.STAGED]
    assert usage.ready == counted[SlotState.READY]
    assert usage.quarantined == counted[SlotState.QUARANTINED]
    assert usage.leased == leased
    groups = {pool.group_of(space) for space in pool.spaces()}
    assert sum(map(pool.group_bytes, groups)) == usage.ready, "ready bytes of no group, or of two"
    unassigned = pool.extents.unassigned_bytes
    rest = sum(
        pool.extents.extent_bytes - extent.rows * extent.slot_class.slot_bytes
        for extent in pool.extents.extents()
    )
    assert usage.free == unassigned + rest + counted[SlotState.FREE], "bytes were lost"
    total = usage.free + usage.staged + usage.ready + usage.quarantined
    assert total == usage.reserved == pool.extents.reserved * pool.extents.extent_bytes


def _check_index(pool: BlockPool) -> None:
    listed: list[int] = []
    for space in pool.spaces():
        staged = np.fromiter(space.staged.values(), dtype=np.int64, count=len(space.staged))
        assert (pool.extents.state[staged] == SlotState.STAGED).all(), "a name is kept for nobody"
        slots = np.fromiter(space.ready.values(), dtype=np.int64, count=len(space.ready))
        if len(slots):
            assert split_hashes(pool.rows_of(slots).hashes) == list(space.ready), "index and slot disagree"
            listed.extend(slots.tolist())
    ready = np.flatnonzero(pool.extents.state == SlotState.READY)
    assert sorted(listed) == ready.tolist(), "index and ready slots are no bijection"


def _check_links(pool: BlockPool) -> None:
    occupancy = pool.occupancy
    ready = np.flatnonzero(pool.extents.state == SlotState.READY)
    parents = occupancy.parent[ready]
    counted = np.bincount(parents[parents != NO_PARENT], minlength=len(occupancy.children))
    assert (counted == occupancy.children).all(), "children are miscounted"
    for space in pool.spaces():
        _check_family(pool, space)


def _check_family(pool: BlockPool, space: Space) -> None:
    slots = np.fromiter(space.ready.values(), dtype=np.int64, count=len(space.ready))
    waiting = {(parent, slot) for parent, orphans in space.awaiting.items() for slot in orphans}
    rows = pool.rows_of(slots) if len(slots) else None
    for block, slot in enumerate(slots.tolist()):
        assert rows is not None
        parent, is_first = rows.parent_at(block), rows.indexes[block] == 0
        linked = NO_PARENT if is_first else space.ready.get(parent, NO_PARENT)
        if linked != NO_PARENT and not precedes(pool.extents, linked, slot):
            linked = NO_PARENT  # a name that somebody made up
        assert pool.occupancy.parent[slot] == linked, "a block hangs from another than its parent"
        if linked == NO_PARENT and not is_first:
            assert (parent, slot) in waiting, "an orphan would not be found by its parent"
            waiting.remove((parent, slot))
    assert not waiting, "blocks await a parent that is here, or are not here themselves"
