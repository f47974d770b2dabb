"""Keys and values in blocks: where a sequence's tokens lie in the device memory, and how to get at them.

A block's payload is one run of bytes in the order of ``spec.LAYOUT``, at any offset that is a
multiple of 64. Blocks of a sequence need not be near each other: one token's keys (or values) of
one layer are a *row*, and rows are copied by index. For the 283 MB of 6,144 tokens of a 135M model this
took 10.5 ms on two cores, and one strided copy of neighbouring blocks 10.4 ms: so there is one path
for neighbours and for scattered blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.tiers.device_pin import upload
from prefill.errors import UnsupportedModelError
from prefill.spec import ModelSpec

SLOT_ALIGN_BYTES = 64
"""Block offsets in the device memory are multiples of this."""

_SCRATCH_TOKENS_MIN = 1024


class BlockTable:
    """Byte offsets of one sequence's blocks in the device memory, in the order of its tokens."""

    __slots__ = ("_offsets",)

    def __init__(self, offsets: Iterable[int] = ()) -> None:
        self._offsets = np.empty(0, dtype=np.int64)
        self.extend(offsets)

    def extend(self, offsets: Iterable[int]) -> None:
        """Append blocks for further tokens."""
        self._offsets = np.concatenate([self._offsets, np.fromiter(offsets, dtype=np.int64)])

    @property
    def offsets(self) -> NDArray[np.int64]:
        return self._offsets

    def __len__(self) -> int:
        return len(self._offsets)


class KVMemory:
    """Typed access to the blocks of one model in a flat memory of bytes.

    ``memory`` is a one-dimensional uint8 tensor on the model's device, shared with its owner and
    never copied. What ``gather`` returns lies in scratch that the next ``gather`` overwrites.
    """

    def __init__(self, memory: torch.Tensor, spec: ModelSpec, block_size: int) -> None:
        assert (memory.dtype, memory.dim(), memory.stride()) == (torch.uint8, 1, (1,)), memory.shape
        assert block_size > 0
        self.spec = spec
        self.block_size = block_size
        self.block_bytes = spec.block_bytes(block_size)
        self.device = memory.device
        self._memory = memory
        # Rows start at multiples of this unit, whatever the head sizes, so one strided view per
        # layer and plane reaches every row by number. Neighbouring rows of the view overlap.
        self._unit_bytes = gcd(SLOT_ALIGN_BYTES, spec.row_bytes)
        self._planes = [(self._plane(2 * layer), self._plane(2 * layer + 1)) for layer in range(spec.layers)]
        self._scratch = self._new_scratch(0)

    def _plane(self, plane: int) -> torch.Tensor:
        itemsize = self.spec.dtype.itemsize
        usable = self._memory.numel() - self._memory.numel() % itemsize
        items = self._memory[:usable].view(self.spec.dtype)
        row = self.spec.row_bytes // itemsize
        unit = self._unit_bytes // itemsize
        start = plane * self.block_size * row
        rows = max(0, (items.numel() - start - row) // unit + 1)
        return items.as_strided((rows, row), (unit, 1), items.storage_offset() + start)

    def _new_scratch(self, tokens: int) -> torch.Tensor:
        shape = (2, tokens, self.spec.row_bytes // self.spec.dtype.itemsize)
        return torch.empty(shape, dtype=self.spec.dtype, device=self.device)

    def block(self, offset: int) -> torch.Tensor:
        """The payload of the block at ``offset``: a view of ``block_bytes`` bytes."""
        return self._memory[offset : offset + self.block_bytes]

    @property
    def page_count(self) -> int:
        """Pages that ``pages`` can name."""
        return max(0, (self._memory.numel() - self.block_bytes) // SLOT_ALIGN_BYTES + 1)

    def rows(self, table: BlockTable, tokens: int) -> NDArray[np.int64]:
        """Row numbers of a sequence's first ``tokens`` positions, the same for all layers."""
        within = np.arange(self.block_size, dtype=np.int64) * self.spec.row_bytes
        rows = (self._offsets(table, tokens)[:, None] + within) // self._unit_bytes
        return rows.reshape(-1)[:tokens]

    def page_numbers(self, table: BlockTable, tokens: int) -> NDArray[np.int64]:
        """The pages of ``pages`` that hold a sequence's first ``tokens`` positions, in their order."""
        return self._offsets(table, tokens) // SLOT_ALIGN_BYTES

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer where they are: (pages, block_size, kv_heads, head_size).

        A page is a block; pages are numbered by ``SLOT_ALIGN_BYTES``, so neighbouring ones overlap.
        """
        spec = self.spec
        itemsize = spec.dtype.itemsize
        shape = (self.page_count, self.block_size, spec.kv_heads, spec.head_size)
        strides = (SLOT_ALIGN_BYTES // itemsize, spec.row_bytes // itemsize, spec.head_size, 1)
        keys, values = (
            plane.as_strided(shape, strides, plane.storage_offset()) for plane in self._planes[layer]
        )
        return keys, values

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """A copy on the device, for what is submitted next; nobody waits for it."""
        return upload(values, self.device)

    def _offsets(self, table: BlockTable, tokens: int) -> NDArray[np.int64]:
        blocks = -(-tokens // self.block_size)
        assert 0 < blocks <= len(table), (tokens, len(table), self.block_size)
        offsets = table.offsets[:blocks]
        assert 0 <= offsets.min() <= offsets.max() <= self._memory.numel() - self.block_bytes, offsets
        assert not (offsets % SLOT_ALIGN_BYTES).any(), offsets
        return offsets

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the keys and values of one layer, each (1, kv_heads, tokens, head_size), into ``rows``.

        Raises UnsupportedModelError when a layer's keys are not shaped as the spec says.
        """
        expected = (1, self.spec.kv_heads, len(rows), self.spec.head_size)
        if key.shape != expected or value.shape != expected or key.dtype != self.spec.dtype:
            raise UnsupportedModelError(
                f"model {self.spec.name!r} makes {key.dtype} keys {tuple(key.shape)} and values "
                f"{tuple(value.shape)} in layer {layer}, expected {self.spec.dtype} {expected}; "
                "choose a model whose layers all have the same key and value heads"
            )
        for plane, states in zip(self._planes[layer], (key, value), strict=True):
            plane.index_copy_(0, rows, states[0].transpose(0, 1).reshape(len(rows), -1))

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in ``rows``, each (1, kv_heads, tokens, head_size), until the next gather.

        Token-major in memory: attention is as fast on it as on head-major copies.
        """
        tokens = len(rows)
        if tokens > self._scratch.shape[1]:
            self._scratch = self._new_scratch(max(_SCRATCH_TOKENS_MIN, tokens + tokens // 2))
        views = []
        for plane, scratch in zip(self._planes[layer], self._scratch, strict=True):
            torch.index_select(plane, 0, rows, out=scratch[:tokens])
            shaped = scratch[:tokens].view(1, tokens, self.spec.kv_heads, self.spec.head_size)
            views.append(shaped.transpose(1, 2))
        return views[0], views[1]
