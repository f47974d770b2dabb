"""The device tier: blocks in one torch tensor, on a GPU or in ordinary memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.block import TierName
from kvstore.errors import PoolError
from kvstore.evict.base import Evictor, Occupancy
from kvstore.extents import Extent, extents_in
from kvstore.pool import BlockPool
from kvstore.tiers.base import Payload
from kvstore.tiers.device_pin import pinned_pool
from kvstore.tiers.memory import MemoryTier

_PAGE_BYTES = 2**21


def free_share(device: torch.device, share: float) -> int:
    """``share`` of the bytes that are free on a CUDA device now, in whole pages."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * share) // _PAGE_BYTES * _PAGE_BYTES


class DeviceTier(MemoryTier):
    """Blocks where the model runs. Kernels read them in place, through ``tensor`` and offsets."""

    def __init__(
        self,
        device: torch.device,
        *,
        pool_bytes: int,
        extent_bytes: int,
        make_evictor: Callable[[Occupancy], Evictor],
        clock: Callable[[], float],
    ) -> None:
        self._memory = _TensorMemory(device, pool_bytes, extent_bytes)
        pool = BlockPool(self._memory, make_evictor)
        super().__init__(TierName.DEVICE, pool, _TensorCopies(self._memory), clock)
        self._pins = ExitStack()

    @property
    def tensor(self) -> torch.Tensor:
        """All of the tier's memory: uint8, shape (bytes,)."""
        return self._memory.tensor

    def pin(self, host_memory: Payload) -> None:
        """Have a GPU's own DMA reach this memory until ``close``; of no effect where there is no GPU."""
        if self.tensor.device.type == "cuda":
            self._pins.enter_context(pinned_pool(host_memory, self.tensor.device))

    def close(self) -> None:
        self._pins.close()
        self._memory.tensor = torch.empty(0, dtype=torch.uint8)


class _TensorMemory:
    """``extents.Memory`` over one tensor; tables are in ordinary memory beside it."""

    inline_tables = False

    def __init__(self, device: torch.device, pool_bytes: int, extent_bytes: int) -> None:
        self.extent_bytes = extent_bytes
        self.extents = extents_in(pool_bytes, extent_bytes)
        self._tables: dict[int, NDArray[np.uint8]] = {}
        self._names: dict[bytes, int] = {}
        try:
            self.tensor = torch.empty(self.extents * extent_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise PoolError(
                f"device_bytes is {pool_bytes}, which {device} cannot allocate; lower device_bytes"
            ) from error

    def reserve(self, extent: int) -> bool:
        # Touching the pages now keeps page faults out of the first prompt.
        self.tensor[extent * self.extent_bytes : (extent + 1) * self.extent_bytes].zero_()
        return True

    def table_buffer(self, extent: int, size: int) -> NDArray[np.uint8]:
        buffer = self._tables.get(extent)
        if buffer is None or len(buffer) < size:
            buffer = self._tables[extent] = np.zeros(size, dtype=np.uint8)
        return buffer

    def assigned(self, extent: Extent) -> None:
        """Nobody else reads this memory."""

    def namespace_id(self, namespace: bytes) -> int:
        return self._names.setdefault(namespace, len(self._names) + 1)


class _TensorCopies:
    """On a GPU: DMA on a stream of its own, which waits for what the model's stream has been given.

    A slot that is read may still be computed, and one that is written may still be read by a kernel.
    """

    def __init__(self, memory: _TensorMemory) -> None:
        self._memory = memory
        self._stream: torch.cuda.Stream | None = None
        self._begun = False
        self._held: list[Payload] = []
        if memory.tensor.device.type == "cuda":
            self._stream = torch.cuda.Stream(memory.tensor.device)  # type: ignore[no-untyped-call]

    def copy_out(self, offset: int, target: Payload) -> None:
        self._copy(torch.from_numpy(target), self._memory.tensor[offset : offset + len(target)])

    def copy_in(self, offset: int, source: Payload) -> None:
        ours = source
        if not source.flags.writeable:
            # torch takes no view of memory that it may not write to. A copy lives until the transfer is over.
            ours = source.copy()
            self._held.append(ours)
        self._copy(self._memory.tensor[offset : offset + len(source)], torch.from_numpy(ours))

    def finish(self) -> None:
        if self._stream is not None and self._begun:
            self._begun = False
            self._stream.record_event().synchronize()
        self._held.clear()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        if not self._begun:
            self._begun = True
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            # Without waiting where the host's side is pinned (``pin``).
            target.copy_(source, non_blocking=True)
