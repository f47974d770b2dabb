"""The groups into which an engine divides a model's layers: each has a table of blocks of its own.

A plain model is one group. In a hybrid one some groups see only a window: where a table has no block,
since no token to come sees it, stands ``NULL_BLOCK``. A block of the store is the blocks of all groups
for the same tokens, and ids of blocks are listed that way: ``width`` for each block of the store, in
the order of the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

NULL_BLOCK = 0
"""vLLM's own number for it; no request ever has that block."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """Names of layers by group, blocks of ``block_size`` tokens each.

    ``window`` is the shortest one in tokens, None where all groups keep all tokens.
    """

    block_size: int
    layers: tuple[tuple[str, ...], ...]
    window: int | None = None

    @property
    def width(self) -> int:
        return len(self.layers)

    @property
    def hybrid(self) -> bool:
        """Whether blocks are not just those of one table that keeps all tokens."""
        return self.width > 1 or self.window is not None

    @property
    def unsaved_blocks(self) -> int | None:
        """Full blocks at the end of a prefix that no window has let go of; None where there is no window.

        When one more is full, the first of them is gone.
        """
        return None if self.window is None else max(1, (self.window - 1) // self.block_size)

    def listed(self, tables: Sequence[list[int]]) -> list[int]:
        """The groups' tables, which count the same tokens, as one list."""
        return tables[0] if self.width == 1 else list(chain.from_iterable(zip(*tables, strict=False)))


def first_whole(block_ids: Sequence[int], width: int, first_block: int) -> int:
    """The first block, from ``first_block`` on, after the last one that some group has no more."""
    tail = block_ids[first_block * width :]
    if NULL_BLOCK not in tail:
        return first_block
    last = max(place for place, block in enumerate(tail) if block == NULL_BLOCK)
    return first_block + last // width + 1
