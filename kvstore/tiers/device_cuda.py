"""Moving blocks on an NVIDIA GPU: our kernels and DMA by way of CuPy, which is an optional dependency."""

from __future__ import annotations

from importlib import resources

import cupy
import numpy as np
import torch
from cupy.cuda import runtime
from cupy.cuda.compiler import CompileException

from kvstore.tiers.device_copy import THREADS, Integers, PagedBlocks, launch_of, layer_table
from kvstore.tiers.device_transfer import Fence, MoverError, Rows

SOURCE = "device_copy.cu"
SLOT_ALIGN_BYTES = 64
"""Offsets of slots in every pool are multiples of this."""


def kernel_source() -> str:
    return resources.files("kvstore.tiers").joinpath(SOURCE).read_text(encoding="utf-8")


class CudaMover:
    """A ``Mover`` for one paged cache. Used by one thread at a time."""

    def __init__(self, paged: PagedBlocks, *, staging_bytes: int) -> None:
        """Takes ``staging_bytes`` of the device, and room for one block at least.

        MoverError where CuPy cannot compile the kernels or has no driver that fits it.
        """
        self._device = paged.device
        self._table = layer_table(paged, SLOT_ALIGN_BYTES)
        try:
            with cupy.cuda.Device(self._device.index):
                module = cupy.RawModule(code=kernel_source(), options=("--std=c++17",))
                self._gather = module.get_function(f"gather_{self._table.word}")
                self._scatter = module.get_function(f"scatter_{self._table.word}")
        except (RuntimeError, OSError, ImportError, CompileException) as error:
            raise MoverError(
                f"CuPy does not work here ({error}); install the one for this driver, or none"
            ) from error
        pitch = -(-paged.payload_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        blocks = max(1, staging_bytes // pitch)
        self._staging = torch.empty(blocks * pitch, dtype=torch.uint8, device=self._device)
        self.staging: Integers = self._staging.data_ptr() + np.arange(blocks, dtype=np.int64) * pitch
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # The staging area may have been another tensor's, which the present stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._layers = self._upload(self._table.entries)

    def gather(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        self._launch(self._gather, layers, block_ids, slots)

    def scatter(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        self._launch(self._scatter, layers, block_ids, slots)

    def copy_rows(self, rows: Rows) -> None:
        # Between host memory that is not pinned and the device this works as well, and waits.
        with cupy.cuda.Device(self._device.index):
            runtime.memcpy2DAsync(
                rows.target,
                rows.target_pitch,
                rows.source,
                rows.source_pitch,
                rows.width,
                rows.height,
                runtime.memcpyDefault,
                self._stream.cuda_stream,
            )

    def follow(self, fence: Fence) -> None:
        if fence is not None:
            self._stream.wait_event(fence)

    def fence(self) -> Fence:
        return self._stream.record_event()

    def wait(self, fence: Fence) -> None:
        fence.synchronize()

    def _launch(
        self, kernel: cupy.RawKernel, layers: tuple[int, int], block_ids: Integers, slots: Integers
    ) -> None:
        first, stop = layers
        ids, places = self._upload(block_ids), self._upload(slots)
        with cupy.cuda.Device(self._device.index), cupy.cuda.ExternalStream(self._stream.cuda_stream):
            for launch, start, _ in launch_of(self._table, first, stop, len(block_ids)):
                arguments = (
                    np.intp(self._layers.data_ptr()),
                    np.int64(first),
                    np.int64(stop - first),
                    np.intp(ids[start:].data_ptr()),
                    np.intp(places[start:].data_ptr()),
                    np.int64(launch.parts),
                    np.int64(launch.part_words),
                )
                kernel((launch.grid,), (THREADS,), arguments)

    def _upload(self, values: Integers) -> torch.Tensor:
        # Made on our stream, so that the memory is not handed out again before the kernels are through.
        with torch.cuda.stream(self._stream):
            return torch.from_numpy(values).to(self._device)
