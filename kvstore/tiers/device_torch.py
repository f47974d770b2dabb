"""Moving blocks with torch alone: on the CPU, and on GPUs where CuPy is not installed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kvstore.tiers.device_copy import Integers, PagedBlocks, gather_with_torch, scatter_with_torch
from kvstore.tiers.device_transfer import Fence, Rows


class TorchMover:
    """A ``Mover`` for one paged cache: a copy a layer, and one a run of slots. For one thread at a time."""

    def __init__(self, paged: PagedBlocks, *, staging_bytes: int) -> None:
        """Takes ``staging_bytes`` on the cache's device, and room for one block at least."""
        self._paged = paged
        self._device = paged.device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        blocks = max(1, staging_bytes // paged.payload_bytes)
        # torch hands memory out, and out again, in the order of the stream on which it was asked for.
        with self._on_stream():
            self._slots = torch.empty(blocks, paged.payload_bytes, dtype=torch.uint8, device=self._device)
        self._base = self._slots.data_ptr()
        self.staging: Integers = self._base + np.arange(blocks, dtype=np.int64) * paged.payload_bytes

    def gather(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        part, staged = self._part(layers, slots)
        with self._on_stream():
            gather_with_torch(part, block_ids, staged)

    def scatter(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        part, staged = self._part(layers, slots)
        with self._on_stream():
            scatter_with_torch(part, block_ids, staged)

    def copy_rows(self, copies: Iterable[Rows]) -> None:
        with self._on_stream():
            for rows in copies:
                target = self._view(rows.target, rows.target_pitch, rows)
                source = self._view(rows.source, rows.source_pitch, rows)
                # Of rows that lie apart torch makes one run first, in ordinary memory, which no DMA reaches.
                is_one_run = target.is_contiguous() and source.is_contiguous()
                for to, of in [(target, source)] if is_one_run else zip(target, source, strict=True):
                    to.copy_(of, non_blocking=True)

    def follow(self, fence: Fence) -> None:
        if self._stream is not None and fence is not None:
            self._stream.wait_event(fence)

    def fence(self) -> Fence:
        return None if self._stream is None else self._stream.record_event()

    def wait(self, fence: Fence) -> None:
        if fence is not None:
            fence.synchronize()

    def _part(self, layers: tuple[int, int], slots: Integers) -> tuple[PagedBlocks, torch.Tensor]:
        """Some layers as a cache of their own, and their bytes in the first slots of the staging area."""
        first, stop = layers
        start, end = self._paged.spans[first][0], self._paged.spans[stop - 1][1]
        return PagedBlocks(self._paged.rows[first:stop]), self._slots[: len(slots), start:end]

    def _view(self, address: int, pitch: int, rows: Rows) -> torch.Tensor:
        """(height, width) bytes at an address, of the staging area or of host memory."""
        shape, strides = (rows.height, rows.width), (pitch, 1)
        at = address - self._base
        if 0 <= at < self._slots.numel():
            return self._slots.as_strided(shape, strides, at)
        extent = (rows.height - 1) * pitch + rows.width
        memory = (ctypes.c_uint8 * extent).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).as_strided(shape, strides)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Our stream and its device: the guard of the device goes back without opening a context there."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
