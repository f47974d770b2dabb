"""Payloads that nobody has read since a restart: compared with their checksums once, by the first reader."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.block import MissCause, SlotArray, TierName
from kvstore.events import RemovalCause
from kvstore.index import Space
from kvstore.lease import Lease
from kvstore.store.local import LocalRun, cut, slots_in
from kvstore.store.parts import Parts
from kvstore.tiers.memory import payload_checksum


def first_reads(parts: Parts, space: Space, run: LocalRun) -> LocalRun:
    """The run as far as its payloads are what their writers summed. What is not is removed."""
    for segment in run.segments:
        if segment.tier is TierName.HOST:
            good = _verify(parts, space, segment.slots)
            if good < len(segment.slots):
                first = run.segments[0].start
                stop = segment.start + good
                return LocalRun(cut(run.segments, stop), stop - first, MissCause.CORRUPT)
    return run


def learn_from_reader(parts: Parts, lease: Lease, used: int, compared: int) -> None:
    """A reader used the first ``used`` blocks and compared ``compared``; where it stopped is looked at here.

    Called when the lease holds nothing any more.
    """
    stop, seen = lease.first_block + used, lease.first_block + min(used, compared)
    for shard, segments in lease.segments.items():
        space = parts.space(parts.tiers.host, lease.chain.namespace, shard)
        _mark(parts, slots_in(cut(segments, seen), TierName.HOST))
        if used < lease.blocks:
            place = len(slots_in(cut(segments, stop), TierName.HOST))
            _verify(parts, space, slots_in(segments, TierName.HOST)[place : place + 1])


def _verify(parts: Parts, space: Space, slots: SlotArray) -> int:
    """How many leading slots hold what their checksums say; the first that does not is removed."""
    host = parts.tiers.host
    unread = np.flatnonzero(_unread(parts, slots))
    for position in unread.tolist():
        slot = slots[position : position + 1]
        view = host.views(slot, space.payload_bytes)[0]
        if payload_checksum(view) != host.checksums(slot)[0]:
            host.pool.discard(slot, RemovalCause.CORRUPT)
            parts.report_removed()
            return int(position)
        _mark(parts, slot)
    return len(slots)


def _unread(parts: Parts, slots: SlotArray) -> NDArray[np.bool_]:
    unread = np.zeros(len(slots), dtype=np.bool_)
    for extent, positions, rows in parts.tiers.host.pool.extents.groups(slots):
        unread[positions] = extent.table.checked[rows] == 0
    return unread


def _mark(parts: Parts, slots: SlotArray) -> None:
    for extent, _, rows in parts.tiers.host.pool.extents.groups(slots):
        extent.table.checked[rows] = 1
