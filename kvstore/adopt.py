"""Taking over the blocks that a server which is gone left in shared memory.

Rows are checked at once and by column, payloads by their first reader. What a crash left half done
shows in the rows themselves: a READY row with an odd generation was being published or removed, a
STAGED one was being written. Neither was visible, and neither becomes so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import Shard, SlotArray, Uint64Array
from kvstore.errors import NamespaceError
from kvstore.extents import Extent, Found, SlotClass
from kvstore.failpoints import Failpoint, Step, no_failpoint
from kvstore.index import Space
from kvstore.pool import BlockPool
from kvstore.spec import NamespaceSpec, slot_bytes_for
from kvstore.table import SlotState, Table, unpack_shard

Names = list[tuple[bytes, NamespaceSpec | None]]
"""(Digest, spec) of each namespace by the number in its rows, less one."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was taken over, and what the new owner has to see to.

    ``leased`` slots are promised until a time to readers who may still be there: pin them until then.
    ``quarantined`` are, by client number, slots that a writer may yet write to: give them back when it
    has acknowledged or is gone. ``damaged`` blocks did not check out and are free. ``reason`` says
    what was taken over, or why nothing was.
    """

    blocks: int = 0
    leased: list[tuple[SlotArray, float]] = field(default_factory=list)
    quarantined: dict[int, SlotArray] = field(default_factory=dict)
    damaged: int = 0
    reason: str = ""


class _Verdict(NamedTuple):
    """Rows of one table that stay, by the (namespace, shard) words that they have in common."""

    ready: list[tuple[tuple[int, int], NDArray[np.int64]]]
    quarantined: NDArray[np.int64]
    damaged: int


def adopt(
    pool: BlockPool, extents: list[Found], names: Names, now: float, failpoint: Failpoint = no_failpoint
) -> Adopted:
    """Fill an empty pool with what is in ``extents``. Costs time proportional to the rows.

    Each table is brought into a state in which all that is not taken over is FREE, with an odd
    generation. A crash in between leaves a table that can be adopted again.
    """
    quarantined: dict[int, list[SlotArray]] = {}
    found: dict[tuple[int, int], list[SlotArray]] = {}
    damaged = 0
    for each in extents:
        verdict = _judge(each.table, each.slot_class, names)
        _free_others(each.table, verdict)
        _set_times(each.table, now)
        extent = pool.take_over(each)
        for key, rows in verdict.ready:
            found.setdefault(key, []).append(rows + extent.base)
        _quarantine(pool, extent, verdict.quarantined, quarantined)
        damaged += verdict.damaged
    failpoint(Step.ADOPTION_SCANNED)
    blocks = []
    for key, parts in found.items():
        space = _space_of(pool, key, names)
        slots, doubles = _once(pool, np.concatenate(parts))
        _free_slots(pool, doubles)
        damaged += len(doubles)
        blocks.append((space, slots))
    pool.restore(blocks)
    for extent in pool.extents.extents():
        if extent.free == extent.rows:
            pool.extents.retire(extent)
    kept = sum(len(slots) for _, slots in blocks)
    return Adopted(
        blocks=kept,
        leased=_leased(pool, blocks, now),
        quarantined={writer: np.concatenate(parts) for writer, parts in quarantined.items()},
        damaged=damaged,
        reason=f"took over {kept} blocks; {damaged} did not check out",
    )


def _judge(table: Table, slot_class: SlotClass, names: Names) -> _Verdict:
    """What of a table is whole. Changes nothing."""
    state, odd = table.state, (table.generation & np.uint64(1)).astype(np.bool_)
    pending = (state == SlotState.STAGED) | (state == SlotState.QUARANTINED)
    # Number 0 is the server that is gone, and with it its threads.
    quarantined = np.flatnonzero(pending & (table.writer != 0))
    claimed = np.flatnonzero((state == SlotState.READY) & ~odd)
    whole = claimed[table.identity_of(claimed) == table.identity[claimed]]
    # Rows of one namespace and shard, to be looked at together.
    keys, which = np.unique(
        np.stack((table.namespace[whole].astype(np.uint64), table.shard[whole])), axis=1, return_inverse=True
    )
    ready = []
    for number, (namespace, shard) in enumerate(keys.T.tolist()):
        if _fits(names, namespace, unpack_shard(shard), slot_class):
            ready.append(((namespace, shard), whole[which.reshape(-1) == number]))
    kept = sum(len(rows) for _, rows in ready)
    return _Verdict(ready, quarantined, len(claimed) - kept)


def _fits(names: Names, number: int, shard: Shard, slot_class: SlotClass) -> bool:
    """Whether the file describes a namespace whose blocks on ``shard`` have such slots."""
    spec = names[number - 1][1] if 0 < number <= len(names) else None
    if spec is None:
        return False
    try:
        payload_bytes = spec.payload_bytes_on(shard)
    except NamespaceError:
        return False
    return slot_class == SlotClass(slot_bytes_for(payload_bytes), spec.block_size)


def _free_others(table: Table, verdict: _Verdict) -> None:
    """Make every row FREE that is not taken over; generations first, so that readers notice."""
    kept = np.zeros(table.rows, dtype=np.bool_)
    for _, rows in verdict.ready:
        kept[rows] = True
        table.checked[rows] = 0
    table.generation[~kept] |= np.uint64(1)
    kept[verdict.quarantined] = True
    table.state[~kept] = SlotState.FREE


def _set_times(table: Table, now: float) -> None:
    """Nothing was used after now, whatever the clock of the other server said."""
    for times in (table.used_at, table.stored_at):
        times[~(times <= now)] = now


def _quarantine(
    pool: BlockPool, extent: Extent, rows: NDArray[np.int64], by_writer: dict[int, list[SlotArray]]
) -> None:
    pool.restore_quarantined(rows + extent.base)
    writers = extent.table.writer[rows]
    for writer in np.unique(writers).tolist():
        by_writer.setdefault(writer, []).append(rows[writers == writer] + extent.base)


def _space_of(pool: BlockPool, key: tuple[int, int], names: Names) -> Space:
    digest, spec = names[key[0] - 1]
    shard = unpack_shard(key[1])
    assert spec is not None
    return pool.open_space(digest, shard, spec.payload_bytes_on(shard), spec.block_size)


def _once(pool: BlockPool, slots: SlotArray) -> tuple[SlotArray, SlotArray]:
    """Slots of blocks that are there once, and those of blocks that another slot has too."""
    words: Uint64Array = np.concatenate(
        [extent.table.hash[rows] for extent, _, rows in pool.extents.groups(slots)]
    )
    _, first = np.unique(words.view("V16"), return_index=True)
    double = np.ones(len(slots), dtype=np.bool_)
    double[first] = False
    return slots[~double], slots[double]


def _free_slots(pool: BlockPool, slots: SlotArray) -> None:
    for extent, _, rows in pool.extents.groups(slots):
        extent.table.generation[rows] |= np.uint64(1)
        extent.table.state[rows] = SlotState.FREE


def _leased(
    pool: BlockPool, blocks: list[tuple[Space, SlotArray]], now: float
) -> list[tuple[SlotArray, float]]:
    """Slots that are promised beyond now, by the time until which they are."""
    slots = np.concatenate([np.zeros(0, dtype=np.int64), *(part for _, part in blocks)])
    until = np.zeros(len(slots))
    for extent, positions, rows in pool.extents.groups(slots):
        until[positions] = extent.table.lease_until[rows]
    promised = np.flatnonzero(until > now)
    times, which = np.unique(until[promised], return_inverse=True)
    return [(slots[promised[which == number]], time) for number, time in enumerate(times.tolist())]
