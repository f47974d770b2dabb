"""Bringing a lease's blocks up to the fastest memory tier."""

from __future__ import annotations

import numpy as np

from kvstore.block import Shard, SlotArray
from kvstore.events import BlocksStored, BytesMoved
from kvstore.lease import Lease, Segment
from kvstore.store.holding import Holding
from kvstore.store.local import cut
from kvstore.store.parts import Parts


def promote(parts: Parts, holding: Holding, lease: Lease, shard: Shard) -> int:
    """Copy the promised blocks of ``shard`` up; the run is cut where room ends. Blocks up there."""
    top = parts.tiers.memory[0]
    placed: list[Segment] = []
    for segment in lease.segments.get(shard, []):
        if segment.tier is top.name:
            placed.append(segment)
            continue
        ahead = [s.slots for s in placed]
        slots = _copy_up(parts, lease, shard, segment, np.concatenate(ahead) if ahead else None)
        if len(slots):
            placed.append(Segment(top.name, segment.start, slots, segment.source))
            holding.pin(lease, top.name, slots)
        if len(slots) < len(segment.slots):
            break
    blocks = placed[-1].stop if placed else 0
    for other in lease.shards:
        if other != shard:
            holding.replace(lease, other, cut(lease.segments[other], blocks))
    holding.replace(lease, shard, placed)
    lease.blocks = blocks
    return blocks


def _copy_up(
    parts: Parts, lease: Lease, shard: Shard, segment: Segment, ahead: SlotArray | None
) -> SlotArray:
    top, host = parts.tiers.memory[0], parts.tiers.host
    rows = lease.chain.rows(shard, segment.start, segment.stop)
    space = top.pool.space(rows.namespace, shard)
    assert space is not None
    began = parts.clock()
    slots = top.pool.stage(space, len(rows), rows)
    rows = rows.slice(0, len(slots))
    memory, offsets = host.locate(segment.slots[: len(slots)])
    top.write_slots(slots, space.payload_bytes, memory, offsets)
    now = parts.clock()
    before = slots[:0] if ahead is None else ahead
    fresh = top.pool.commit(slots, rows, None, ahead=before, time=now)
    # The local run would have found a block that the fastest tier had already.
    assert fresh.all()
    size = space.payload_bytes
    parts.bus.emit(BytesMoved(now, host.name, top.name, len(slots) * size, now - began))
    parts.bus.emit(BlocksStored(now, top.name, rows.namespace, shard, rows.hashes, size))
    return slots
