"""Finding a prompt's leading run: one look-up and one column compare a run of neighbouring slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, BlockRows, SlotArray
from kvstore.evict.base import Occupancy
from kvstore.extents import ExtentMap
from kvstore.index import Space, split_hashes
from kvstore.table import hash_words, same_rows

_SHORT_RUN = 8
_WINDOW = 64
_GROWTH = 8


def leading_run(space: Space, extents: ExtentMap, occupancy: Occupancy, rows: BlockRows) -> SlotArray:
    """Slots of the longest leading run that is resident, by hash alone.

    A write gets neighbouring slots, so most prompts are a few runs. Where they are not, the
    blocks are looked up one by one, which costs what a dictionary costs.
    """
    words = hash_words(rows.hashes)
    parts: list[SlotArray] = [np.zeros(0, dtype=np.int64)]
    position = 0
    while position < len(rows):
        slot = space.ready.get(rows.hashes[position * HASH_BYTES : (position + 1) * HASH_BYTES])
        if slot is None:
            break
        run = _run_from(slot, words[position:], extents, occupancy)
        parts.append(np.arange(slot, slot + run, dtype=np.int64))
        position += run
        if run < _SHORT_RUN and position < len(rows):
            singly = _look_up(space, rows.hashes, position, min(len(rows), position + _WINDOW))
            parts.append(singly)
            position += len(singly)
    return np.concatenate(parts)


def agreement(extents: ExtentMap, slots: SlotArray, rows: BlockRows) -> int:
    """How many leading slots hold what ``rows`` says of identity; payloads are not read."""
    for extent, positions, table_rows in extents.groups(slots):
        part = rows.slice(positions.start, positions.stop)
        agreed = extent.table.agreement(table_rows, part)
        if agreed < len(part):
            return int(positions.start) + agreed
    return len(slots)


def _run_from(slot: int, words: NDArray[np.uint64], extents: ExtentMap, occupancy: Occupancy) -> int:
    """How many slots from ``slot`` on hold the chain that ``words`` names.

    The parent links are the owner's own memory: a freed slot keeps its old hash, not its link.
    """
    extent = extents.containing(slot)
    row = slot - extent.base
    longest = min(len(words), extent.rows - row)
    run, reach = 1, _WINDOW
    while run < longest:
        stop = min(longest, run + reach)
        linked = occupancy.parent[slot + run : slot + stop]
        chained = same_rows(linked, np.arange(slot + run - 1, slot + stop - 1, dtype=np.int32))
        same = same_rows(extent.table.hash[row + run : row + stop], words[run:stop])
        run += min(chained, same)
        if run < stop:
            break
        reach *= _GROWTH
    return run


def _look_up(space: Space, hashes: bytes, start: int, stop: int) -> SlotArray:
    found = list(map(space.ready.get, split_hashes(hashes, start, stop)))
    if None in found:
        found = found[: found.index(None)]
    return np.array(found, dtype=np.int64)
