"""What a copy between an engine's paged cache and block-major slots is: addresses, spans, launch geometry.

A paged cache keeps each layer apart, a slot has a block's layers one after the other. The bytes of one
block of one layer are one run on both sides, so a copy is (blocks x layers) runs, which one launch of
``device_copy.cu`` does, or torch a layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.tiers.device_pin import upload

Integers = NDArray[np.int64]

THREADS = 256
PART_WORDS = 8 * THREADS
"""Words that one group of threads copies: 32 KiB at 16 bytes a word, eight loads a thread."""

_WORDS = (16, 8, 4, 2, 1)
_GRID_MAX = 2**31 - 1


class PagedBlocks:
    """An engine's blocks: one tensor a layer, (blocks, bytes of a block in that layer) uint8.

    The rows may lie apart, as where all layers of a block are neighbours, but each is one run.
    """

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        assert rows, "a cache has layers"
        assert all(each.dtype is torch.uint8 and each.stride(1) == 1 for each in rows), "not rows of bytes"
        self.rows = tuple(rows)
        self.count = min(each.shape[0] for each in rows)
        self.device = rows[0].device
        ends = np.cumsum([each.shape[1] for each in rows]).tolist()
        self.spans: tuple[tuple[int, int], ...] = tuple(pairwise([0, *ends]))

    @property
    def layers(self) -> int:
        return len(self.rows)

    @property
    def payload_bytes(self) -> int:
        """Of a block, all layers together."""
        return self.spans[-1][1]

    def groups(self, count: int) -> list[tuple[int, int]]:
        """The layers cut into ``count`` runs of about as many, as (first, stop); none is empty."""
        count = max(1, min(count, self.layers))
        edges = [self.layers * at // count for at in range(count + 1)]
        return list(pairwise(edges))


class LayerTable(NamedTuple):
    """The layers as the kernels see them.

    ``entries`` is (layers, 4) int64: address of block 0, bytes from block to block, offset in a
    slot, words. ``word`` is the widest access, in bytes, that all of them and all slots allow.
    """

    entries: Integers
    word: int


def layer_table(paged: PagedBlocks, slot_align: int) -> LayerTable:
    """The table of a cache; ``slot_align`` divides the address of every slot that is copied to or from."""
    entries = np.array(
        [
            (rows.data_ptr(), rows.stride(0), start, stop - start)
            for rows, (start, stop) in zip(paged.rows, paged.spans, strict=True)
        ],
        dtype=np.int64,
    )
    word = next(size for size in _WORDS if slot_align % size == 0 and not (entries % size).any())
    entries[:, 3] //= word
    return LayerTable(entries, word)


class Launch(NamedTuple):
    """One launch: so many groups of ``THREADS`` threads, and how an item is cut."""

    grid: int
    parts: int
    part_words: int


def launch_of(table: LayerTable, first: int, stop: int, blocks: int) -> list[tuple[Launch, int, int]]:
    """The launches that move layers [first, stop) of so many blocks: (launch, first block, blocks).

    One, unless a grid cannot be that large.
    """
    layers = stop - first
    parts = max(1, -(-int(table.entries[first:stop, 3].max()) // PART_WORDS))
    most = max(1, _GRID_MAX // (layers * parts))
    return [
        (Launch(min(most, blocks - at) * layers * parts, parts, PART_WORDS), at, min(most, blocks - at))
        for at in range(0, blocks, most)
    ]


def gather_with_torch(paged: PagedBlocks, block_ids: Integers, slots: torch.Tensor) -> None:
    """Copy blocks into ``slots``, (blocks, payload bytes) uint8 on the cache's device."""
    ids = upload(block_ids, paged.device)
    for rows, (start, stop) in zip(paged.rows, paged.spans, strict=True):
        slots[:, start:stop] = rows.index_select(0, ids)


def scatter_with_torch(paged: PagedBlocks, block_ids: Integers, slots: torch.Tensor) -> None:
    """Copy ``slots``, as for ``gather_with_torch``, into blocks; ids that repeat have no defined winner."""
    ids = upload(block_ids, paged.device)
    for rows, (start, stop) in zip(paged.rows, paged.spans, strict=True):
        rows.index_copy_(0, ids, slots[:, start:stop])
