"""Blocks of an engine's KV tensors as bytes, for the layouts in which a block of a layer is one run.

A payload is the block's bytes layer after layer, as they are in memory: nothing is rearranged, since
kernels pack what is inside a block as they like. So layout and packing are part of the namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.connectors.vllm.groups import NULL_BLOCK, CacheGroups
from kvstore.tiers.device_copy import PagedBlocks
from kvstore.tiers.device_mover import mover_for
from kvstore.tiers.device_transfer import Transfers

Payload: TypeAlias = NDArray[np.uint8]

_STAGING_BYTES = 64 * 2**20
"""What loads take of a GPU's memory, and saves once more."""
_GOLDEN_BLOCK = 1


def byte_rows(name: str, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """A layer's tensor as (``blocks``, bytes of one block) uint8, sharing memory.

    Dimension 0 counts the engine's blocks, or the kernel's where those are parts of them. Raises
    UnsupportedError where a block of one layer is not one run of bytes.
    """
    count = tensor.shape[0]
    if tensor.dim() < 2 or count % blocks:
        raise UnsupportedError(
            f"the KV cache of layer {name} has shape {tuple(tensor.shape)} for {blocks} blocks, expected a "
            "multiple of them first; this attention backend cannot be served, choose another with "
            "--attention-backend"
        )
    strides = tensor.stride()
    inner = sorted(range(1, tensor.dim()), key=lambda axis: (-strides[axis], axis))
    ordered = tensor.permute(0, *inner)
    dense = 1
    for axis in reversed(range(1, ordered.dim())):
        if ordered.shape[axis] > 1 and ordered.stride(axis) != dense:
            raise _scattered(name, tensor)
        dense *= ordered.shape[axis]
    if count > 1 and tensor.stride(0) < dense:
        raise _scattered(name, tensor)
    rows = torch.as_strided(ordered, (count, dense), (tensor.stride(0), 1), tensor.storage_offset())
    rows = rows.view(torch.uint8)
    parts = count // blocks
    if parts == 1:
        return rows
    if tensor.stride(0) != dense:
        raise _scattered(name, tensor)
    return rows.reshape(blocks, parts * rows.shape[1])


def _scattered(name: str, tensor: torch.Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"a block of the KV cache of layer {name} is not one run of bytes: shape {tuple(tensor.shape)}, "
        f"strides {tensor.stride()}; start the engine with VLLM_KV_CACHE_LAYOUT=LBHNC, LBNHC or BLHNC"
    )


class EngineBlocks:
    """The KV cache of one rank, or of a group of its layers, block by block."""

    width = 1
    """Ids for each payload."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], blocks: int, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        """``tensors`` by layer name, in the order of the payload; ``staging_bytes`` are a GPU's, each way.

        UnsupportedError as ``byte_rows``, and where a GPU has no room for copies.
        """
        self.count = blocks
        self._rows = [byte_rows(name, tensor, blocks) for name, tensor in tensors.items()]
        self._device = self._rows[0].device
        ends = np.cumsum([rows.shape[1] for rows in self._rows]).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self._layers: list[Payload] = [rows.numpy() for rows in self._rows] if self.in_host_memory else []
        self._ways: _DeviceWays | None = None
        if not self.in_host_memory:
            try:
                self._ways = _DeviceWays(PagedBlocks(self._rows), staging_bytes)
            except torch.OutOfMemoryError as error:
                raise UnsupportedError(
                    f"the GPU has no {2 * staging_bytes >> 20} MiB left to copy blocks through; lower "
                    "--gpu-memory-utilization"
                ) from error

    @property
    def in_host_memory(self) -> bool:
        return self._device.type == "cpu"

    @property
    def payload_bytes(self) -> int:
        return int(self._spans[-1][1])

    def loaded_bytes(self, block_ids: Sequence[int]) -> int:
        """What ``scatter`` copies into these blocks."""
        return len(block_ids) * self.payload_bytes

    def fence(self) -> Any:  # noqa: ANN401 - a CUDA event, or None
        """After what has been submitted to the device by now; for ``gather``."""
        if self.in_host_memory:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, block_ids: Sequence[int], payloads: Sequence[Payload], fence: Any = None) -> None:  # noqa: ANN401
        """Copy blocks out, one payload each, as they are after ``fence``."""
        if self.in_host_memory:
            for block, payload in zip(block_ids, payloads, strict=True):
                for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                    payload[start:stop] = layer[block]
            return
        assert self._ways is not None
        self._ways.save(block_ids, payloads, fence)

    def scatter(self, payloads: Sequence[Payload], block_ids: Sequence[int], fence: Any = None) -> None:  # noqa: ANN401
        """Copy payloads in, after ``fence``, before which kernels may read the blocks; over on return."""
        if self.in_host_memory:
            for block, payload in zip(block_ids, payloads, strict=True):
                for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                    layer[block] = payload[start:stop]
            return
        assert self._ways is not None
        self._ways.load(payloads, block_ids, fence)


class GroupedBlocks:
    """The KV cache of one rank in which each group of layers has blocks of its own.

    A payload is a block of each group, one after the other, and there are ``width`` ids for it.
    """

    def __init__(self, groups: Mapping[int, EngineBlocks], width: int) -> None:
        """``groups`` by place, in the order of the payload; those that have no layers here are left out."""
        ends = np.cumsum([group.payload_bytes for group in groups.values()]).tolist()
        self._groups = [
            (place, group, slice(start, stop))
            for (place, group), start, stop in zip(groups.items(), [0, *ends[:-1]], ends, strict=True)
        ]
        self.width = width

    @property
    def payload_bytes(self) -> int:
        return sum(group.payload_bytes for _, group, _ in self._groups)

    def loaded_bytes(self, block_ids: Sequence[int]) -> int:
        """What ``scatter`` copies into these blocks, which is nothing of what no window sees."""
        return sum(
            group.loaded_bytes([block for block in block_ids[place :: self.width] if block != NULL_BLOCK])
            for place, group, _ in self._groups
        )

    def fence(self) -> Any:  # noqa: ANN401 - as ``EngineBlocks.fence``
        """After what has been submitted to the device by now."""
        return self._groups[0][1].fence()

    def gather(self, block_ids: Sequence[int], payloads: Sequence[Payload], fence: Any = None) -> None:  # noqa: ANN401
        """Copy blocks out, ``width`` for each payload, as they are after ``fence``."""
        for place, group, span in self._groups:
            group.gather(block_ids[place :: self.width], [payload[span] for payload in payloads], fence)

    def scatter(self, payloads: Sequence[Payload], block_ids: Sequence[int], fence: Any = None) -> None:  # noqa: ANN401
        """Copy payloads in, after ``fence``, but for what no window sees; over on return."""
        for place, group, span in self._groups:
            wanted = [
                (payload[span], block)
                for payload, block in zip(payloads, block_ids[place :: self.width], strict=True)
                if block != NULL_BLOCK
            ]
            group.scatter([payload for payload, _ in wanted], [block for _, block in wanted], fence)


class _DeviceWays:
    """One way up and one down between a GPU and the payloads, each for one thread at a time."""

    def __init__(self, paged: PagedBlocks, staging_bytes: int) -> None:
        self._up = Transfers(paged, mover_for(paged, staging_bytes=staging_bytes))
        self._down = Transfers(paged, mover_for(paged, staging_bytes=staging_bytes))
        self._loading, self._saving = Lock(), Lock()

    def save(self, block_ids: Sequence[int], payloads: Sequence[Payload], fence: Any) -> None:  # noqa: ANN401
        with self._saving:
            ids = np.array(block_ids, dtype=np.int64)
            self._down.wait(self._down.save(ids, _addresses(payloads), after=fence))

    def load(self, payloads: Sequence[Payload], block_ids: Sequence[int], fence: Any) -> None:  # noqa: ANN401
        if not payloads:
            return
        with self._loading:
            ids = np.array(block_ids, dtype=np.int64)
            _, end = self._up.load(_addresses(payloads), ids, after=fence)[-1]
            self._up.wait(end)


def _addresses(payloads: Sequence[Payload]) -> NDArray[np.int64]:
    return np.array([payload.ctypes.data for payload in payloads], dtype=np.int64)


def map_blocks(
    tensors: Mapping[str, torch.Tensor], groups: CacheGroups, blocks: int
) -> EngineBlocks | GroupedBlocks:
    """The engine's blocks, each layer of which was proved to be copied faithfully.

    UnsupportedError as for ``EngineBlocks`` and ``golden_round_trip``.
    """
    if not groups.hybrid:
        plain = EngineBlocks(tensors, blocks)
        golden_round_trip(tensors, plain, _GOLDEN_BLOCK)
        return plain
    mapped = {}
    for place, names in enumerate(groups.layers):
        if names:
            layers = {name: tensors[name] for name in names}
            mapped[place] = EngineBlocks(layers, blocks, _STAGING_BYTES // groups.width)
            golden_round_trip(layers, mapped[place], _GOLDEN_BLOCK)
    return GroupedBlocks(mapped, groups.width)


def golden_round_trip(tensors: Mapping[str, torch.Tensor], blocks: EngineBlocks, block: int) -> None:
    """Write a pattern through the tensors, take the block's bytes, and put them back.

    UnsupportedError where the tensors do not show the pattern again, or another block changed. The
    cache must not be in use; it is left as it was found.
    """
    kept = {name: tensor.clone() for name, tensor in _around(tensors, blocks.count, block).items()}
    try:
        for seed, tensor in enumerate(_around(tensors, blocks.count, block).values()):
            tensor.copy_(_pattern(tensor, seed))
        expected = {name: tensor.clone() for name, tensor in _around(tensors, blocks.count, block).items()}
        payload = np.empty(blocks.payload_bytes, dtype=np.uint8)
        blocks.gather([block], [payload], blocks.fence())
        blocks.scatter([np.zeros_like(payload)], [block])
        blocks.scatter([payload], [block])
        for name, tensor in _around(tensors, blocks.count, block).items():
            if not torch.equal(tensor, expected[name]):
                raise UnsupportedError(
                    f"a block of layer {name} does not survive a round trip: shape {tuple(tensor.shape)}, "
                    f"strides {tensor.stride()}; report the attention backend and its layout"
                )
    finally:
        for name, tensor in _around(tensors, blocks.count, block).items():
            tensor.copy_(kept[name])


def _around(tensors: Mapping[str, torch.Tensor], count: int, block: int) -> dict[str, torch.Tensor]:
    """A block and its neighbours in each of the tensors, which hold ``count`` blocks."""
    around = {}
    for name, tensor in tensors.items():
        parts = tensor.shape[0] // count
        around[name] = tensor[max(0, block - 1) * parts : (block + 2) * parts]
    return around


def _pattern(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    values = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.int64)
    return ((values * 31 + seed * 17) % 61).reshape(tensor.shape).to(tensor.dtype)
