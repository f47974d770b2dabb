"""Copies between a paged cache and block-major slots: torch, and the CUDA kernels run on the host.

The kernels' source is compiled for the host by a shim that loops over blocks and threads, and checks each
access; the tables and the launch geometry are those that the GPU would be given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.tiers.device_copy import (
    THREADS,
    Integers,
    LayerTable,
    PagedBlocks,
    gather_with_torch,
    launch_of,
    layer_table,
    scatter_with_torch,
)
from tests.support.kernel_shim import Shim, shim
from tests.support.nvrtc import compile_for

__all__ = ["shim"]

SOURCE = resources.files("kvstore.tiers").joinpath("device_copy.cu")
ALIGN = 64


@dataclass(frozen=True)
class Cache:
    """A paged cache, and the memory that it lies in."""

    paged: PagedBlocks
    memory: torch.Tensor


def cache_of(blocks: int, widths: list[int], *, apart: bool, seed: int, gap: int = 0) -> Cache:
    """Layers of ``widths`` bytes a block: each in memory of its own, or all layers of a block together.

    ``gap`` bytes follow each block of a layer (apart) or each block (together).
    """
    generator = torch.Generator().manual_seed(seed)
    rows, at = [], 0
    total = sum(blocks * (width + gap) for width in widths) if apart else blocks * (sum(widths) + gap)
    memory = torch.randint(0, 256, (total,), generator=generator, dtype=torch.uint8)
    for width in widths:
        stride = width + gap if apart else sum(widths) + gap
        rows.append(memory.as_strided((blocks, width), (stride, 1), at))
        at += blocks * stride if apart else width
    return Cache(PagedBlocks(rows), memory)


def by_plain_loop(paged: PagedBlocks, block_ids: Integers) -> NDArray[np.uint8]:
    slots = np.zeros((len(block_ids), paged.payload_bytes), dtype=np.uint8)
    for place, block in enumerate(block_ids.tolist()):
        for rows, (start, stop) in zip(paged.rows, paged.spans, strict=True):
            slots[place, start:stop] = rows[block].numpy()
    return slots


@st.composite
def copies(draw: st.DrawFn) -> tuple[Cache, Integers]:
    """A cache of any shape, odd head counts and paddings included, and distinct blocks of it in any order."""
    dtype_bytes = draw(st.sampled_from([1, 2, 4]))
    tokens = draw(st.sampled_from([1, 16, 32]))
    heads = st.integers(1, 5)
    same = draw(st.booleans())
    layers = draw(st.integers(1, 4))
    shape = draw(heads)
    widths = [
        tokens * (shape if same else draw(heads)) * draw(st.sampled_from([8, 64])) * dtype_bytes
        for _ in range(layers)
    ]
    blocks = draw(st.integers(1, 6))
    gap = draw(st.sampled_from([0, 2, 64]))
    cache = cache_of(blocks, widths, apart=draw(st.booleans()), seed=draw(st.integers(0, 99)), gap=gap)
    order = draw(st.permutations(range(blocks)))
    return cache, np.array(order[: draw(st.integers(1, blocks))], dtype=np.int64)


@given(copies())
def test_torch_gathers_and_scatters_what_a_plain_loop_does(copy: tuple[Cache, Integers]) -> None:
    cache, block_ids = copy
    expected = by_plain_loop(cache.paged, block_ids)
    slots = torch.zeros(len(block_ids), cache.paged.payload_bytes, dtype=torch.uint8)
    gather_with_torch(cache.paged, block_ids, slots)
    assert (slots.numpy() == expected).all()
    before = cache.memory.clone()
    for rows in cache.paged.rows:
        rows[torch.from_numpy(block_ids)] ^= 0xFF
    scatter_with_torch(cache.paged, block_ids, slots)
    assert torch.equal(cache.memory, before), "another byte changed"


def run(
    shim: Shim,
    name: str,
    table: LayerTable,
    layers: tuple[int, int],
    copy: tuple[Cache, Integers, NDArray[np.uint8]],
) -> int:
    """Launch as the GPU would: accesses out of bounds, or out of line."""
    cache, block_ids, slots = copy
    places = slots.ctypes.data + np.arange(len(slots), dtype=np.int64) * slots.strides[0]
    shim.forget()
    into_slots = name.startswith("gather")
    for array in (table.entries, block_ids, places):
        shim.allow(array.ctypes.data, array.nbytes, writable=False)
    shim.allow(slots.ctypes.data, slots.nbytes, writable=into_slots)
    for rows in cache.paged.rows:
        reach = (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]
        shim.allow(rows.data_ptr(), reach, writable=not into_slots)
    first, stop = layers
    kernel = shim.kernel(f"{name}_{table.word}")
    for launch, start, _ in launch_of(table, first, stop, len(block_ids)):
        kernel(
            (launch.grid,),
            (THREADS,),
            (
                table.entries.ctypes.data,
                first,
                stop - first,
                block_ids[start:].ctypes.data,
                places[start:].ctypes.data,
                launch.parts,
                launch.part_words,
            ),
        )
    return shim.faults()


def aligned_slots(blocks: int, payload: int) -> NDArray[np.uint8]:
    """Slots as pools have them: each at a multiple of 64 bytes, the rest of one untouched."""
    pitch = -(-payload // ALIGN) * ALIGN
    memory = np.zeros(blocks * pitch + ALIGN, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + blocks * pitch].reshape(blocks, pitch)


@given(copy=copies(), groups=st.integers(1, 4))
def test_the_kernels_move_the_bytes_that_torch_moves(
    shim: Shim, copy: tuple[Cache, Integers], groups: int
) -> None:
    """Word for word, in groups of layers, and nothing beside them: each access is checked."""
    cache, block_ids = copy
    payload = cache.paged.payload_bytes
    table = layer_table(cache.paged, ALIGN)
    slots = aligned_slots(len(block_ids), payload)
    for layers in cache.paged.groups(groups):
        assert run(shim, "gather", table, layers, (cache, block_ids, slots)) == 0
    assert (slots[:, :payload] == by_plain_loop(cache.paged, block_ids)).all()
    assert not slots[:, payload:].any(), "bytes behind a payload changed"
    before = cache.memory.clone()
    for rows in cache.paged.rows:
        rows[torch.from_numpy(block_ids)] ^= 0xFF
    for layers in cache.paged.groups(groups):
        assert run(shim, "scatter", table, layers, (cache, block_ids, slots)) == 0
    assert torch.equal(cache.memory, before), "another byte changed"


@pytest.mark.parametrize("word", [16, 8, 4, 2, 1])
def test_the_widest_access_that_fits_is_chosen_and_right(shim: Shim, word: int) -> None:
    """Layers of several parts, so that a last part is shorter than the others."""
    cache = cache_of(3, [word * 2051, word * 4096], apart=True, seed=word)
    table = layer_table(cache.paged, ALIGN)
    expected_word = next(w for w in (16, 8, 4, 2, 1) if not (cache.memory.data_ptr() % w or word % w))
    assert table.word == expected_word
    block_ids = np.array([2, 0], dtype=np.int64)
    slots = aligned_slots(2, cache.paged.payload_bytes)
    assert run(shim, "gather", table, (0, 2), (cache, block_ids, slots)) == 0
    assert (slots[:, : cache.paged.payload_bytes] == by_plain_loop(cache.paged, block_ids)).all()


def test_the_shim_sees_an_access_out_of_bounds(shim: Shim) -> None:
    """A block id past the cache, so that the checks of the other tests mean something."""
    cache = cache_of(2, [64], apart=True, seed=0)
    table = layer_table(cache.paged, ALIGN)
    slots = aligned_slots(1, 64)
    assert run(shim, "gather", table, (0, 1), (cache, np.array([2], dtype=np.int64), slots)) > 0


def test_more_blocks_than_a_grid_has_room_for_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.device_copy._GRID_MAX", 10)
    table = LayerTable(np.array([[0, 0, 0, 1], [0, 0, 0, 5000]], dtype=np.int64), 16)
    launches = launch_of(table, 0, 2, 4)
    assert [(launch.parts, start, count) for launch, start, count in launches] == [
        (3, 0, 1),
        (3, 1, 1),
        (3, 2, 1),
        (3, 3, 1),
    ]
    assert all(launch.grid <= 10 for launch, _, _ in launches)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_for_each_architecture(architecture: str) -> None:
    """NVRTC needs no GPU. The widest move 16 bytes at a time, and begin eight loads before they store."""
    compiled = compile_for(SOURCE.read_text(encoding="utf-8"), architecture)
    assert compiled.status == 0, compiled.log
    kernels = {part[: part.index("(")]: part for part in compiled.ptx.split(".visible .entry ")[1:]}
    for direction in ("gather", "scatter"):
        assert {f"{direction}_{word}" for word in (16, 8, 4, 2, 1)} <= set(kernels)
        accesses = re.findall(r"\b(ld|st)(?:\.global)?\.v4", kernels[f"{direction}_16"])
        assert accesses == ["ld"] * 8 + ["st"] * 8
