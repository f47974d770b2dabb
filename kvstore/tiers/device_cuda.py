"""Moving blocks on an NVIDIA GPU: our kernels and DMA by way of CuPy, which is an optional dependency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources

import cupy
import numpy as np
import torch
from cupy.cuda import runtime
from cupy.cuda.compiler import CompileException

from kvstore.tiers.device_copy import THREADS, Integers, PagedBlocks, launch_of, layer_table
from kvstore.tiers.device_pin import upload
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
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            with self._on_stream():
                module = cupy.RawModule(code=kernel_source(), options=("--std=c++17",))
                self._gather = module.get_function(f"gather_{self._table.word}")
                self._scatter = module.get_function(f"scatter_{self._table.word}")
        except (RuntimeError, OSError, ImportError, TypeError, CompileException) as error:
            raise MoverError(
                f"CuPy does not work here ({error}); install the one for this driver, or none"
            ) from error
        pitch = -(-paged.payload_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        blocks = max(1, staging_bytes // pitch)
        # torch hands memory out, and out again, in the order of the stream on which it was asked for.
        with self._on_stream():
            self._staging = torch.empty(blocks * pitch, dtype=torch.uint8, device=self._device)
            self._layers = upload(self._table.entries, self._device)
        self.staging: Integers = self._staging.data_ptr() + np.arange(blocks, dtype=np.int64) * pitch

    def gather(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        self._launch(self._gather, layers, block_ids, slots)

    def scatter(self, layers: tuple[int, int], block_ids: Integers, slots: Integers) -> None:
        self._launch(self._scatter, layers, block_ids, slots)

    def copy_rows(self, copies: Iterable[Rows]) -> None:
        # Between host memory that is not pinned and the device this works as well, and waits.
        with self._on_stream():
            for rows in copies:
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
        count = len(block_ids)
        with self._on_stream():
            uploaded = upload(np.concatenate([block_ids, slots]), self._device)
            ids, places = uploaded[:count], uploaded[count:]
            for launch, start, _ in launch_of(self._table, first, stop, count):
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

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Our device and our stream, for torch and for CuPy.

        torch's own guard is the outermost: it alone goes back to a thread's device without opening a context
        there, which takes memory of a GPU that the thread may never have used.
        """
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
            cupy.cuda.Device(self._device.index),
            cupy.cuda.Stream.from_external(self._stream),
        ):
            yield
