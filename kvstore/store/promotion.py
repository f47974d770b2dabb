"""Bringing a lease's blocks up to the fastest memory tier."""

from __future__ import annotations

from itertools import takewhile

from kvstore.block import BlockRows, MissCause, Residency, Shard, SlotArray
from kvstore.events import BytesMoved
from kvstore.lease import Lease, Segment
from kvstore.store.holding import Holding
from kvstore.store.local import cut
from kvstore.store.parts import Parts


def promote(parts: Parts, holding: Holding, lease: Lease, shard: Shard) -> int:
    """Copy the promised blocks of ``shard`` up; the run is cut where room ends. Blocks up there."""
    top = parts.tiers.memory[0]
    placed: list[Segment] = []
    for segment in lease.segments.get(shard, []):
        raised = [segment] if segment.tier is top.name else _raise(parts, lease, segment)
        placed += raised
        if not raised or raised[-1].stop < segment.stop:
            break
    end = placed[-1].stop if placed else lease.first_block
    if end < lease.end:
        ended_by = top.pool.match(lease.chain.rows(shard, end, lease.end)).cause
        lease.cause = ended_by if ended_by is MissCause.COLLISION else MissCause.QUOTA
        for other in lease.shards:
            if other != shard:
                holding.replace(lease, other, cut(lease.segments[other], end))
    holding.replace(lease, shard, placed)
    lease.blocks = end - lease.first_block
    return lease.blocks


def _raise(parts: Parts, lease: Lease, segment: Segment) -> list[Segment]:
    """The segment's places in the fastest tier, pinned for the lease: as much as there is room for.

    Since the lease was taken, others may have brought some of the blocks up.
    """
    pool = parts.tiers.memory[0].pool
    rows = parts.tiers.host.pool.rows_of(segment.slots)
    raised: list[Segment] = []
    position = 0
    while position < len(rows):
        left = rows.slice(position, len(rows))
        slots = pool.match(left).slots
        if not len(slots):
            slots = _copy_up(parts, left, segment.slots[position:])
        if not len(slots):
            break
        pool.pin(slots, lease.deadline)
        name, start = parts.tiers.memory[0].name, segment.start + position
        raised.append(Segment(name, start, slots, segment.source))
        position += len(slots)
    return raised


def _copy_up(parts: Parts, rows: BlockRows, places: SlotArray) -> SlotArray:
    """Copy the leading blocks that the fastest tier lacks from their places in the host tier."""
    top, host = parts.tiers.memory[0], parts.tiers.host
    space = parts.space(top, rows.namespace, rows.shard)
    lacking = list(takewhile(lambda is_: is_ is Residency.MISS, top.pool.residency(rows)))
    began = parts.clock()
    slots = top.pool.stage(space, len(lacking), rows.slice(0, len(lacking)))
    if not len(slots):
        return slots
    rows = rows.slice(0, len(slots))
    memory, offsets = host.locate(places[: len(slots)])
    try:
        top.write_slots(slots, space.payload_bytes, memory, offsets)
    except BaseException:
        top.pool.abort(slots, rows)
        raise
    now = parts.clock()
    fresh = top.pool.commit(slots, rows, None, time=now)
    assert fresh.all(), "a named staged slot is its block's only writer"
    size = space.payload_bytes
    parts.bus.emit(BytesMoved(now, host.name, top.name, len(slots) * size, now - began))
    parts.report_stored(top.name, rows, size)
    return slots
