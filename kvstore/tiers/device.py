"""The device tier: blocks in one torch tensor, on a GPU or in ordinary memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.block import TierName
from kvstore.errors import PoolError
from kvstore.evict.base import Evictor, Occupancy
from kvstore.extents import Extent, extents_in
from kvstore.pool import BlockPool
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import MemoryTier


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

    @property
    def tensor(self) -> torch.Tensor:
        """All of the tier's memory: uint8, shape (bytes,)."""
        return self._memory.tensor

    def close(self) -> None:
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
    def __init__(self, memory: _TensorMemory) -> None:
        self._memory = memory

    def copy_out(self, offset: int, target: Payload) -> None:
        torch.from_numpy(target).copy_(self._memory.tensor[offset : offset + len(target)])

    def copy_in(self, offset: int, source: Payload) -> None:
        # torch takes no view of memory that it may not write to.
        ours = source if source.flags.writeable else source.copy()
        self._memory.tensor[offset : offset + len(source)].copy_(torch.from_numpy(ours))
