"""The copy engine on a real GPU: kernels against torch, DMA from and to a pinned pool, nothing leaked."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.tiers.device_copy import Integers, PagedBlocks, gather_with_torch
from kvstore.tiers.device_mover import mover_for
from kvstore.tiers.device_pin import pinned_pool
from kvstore.tiers.device_torch import TorchMover
from kvstore.tiers.device_transfer import Mover, Transfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

DEVICE = torch.device("cuda", 0)
BLOCKS, LAYERS = 64, 6
WIDTHS = {"even": [32768] * LAYERS, "uneven": [32768, 480, 4096, 36, 18, 36864], "odd": [1001, 7, 64]}
MOVERS = {"kernels": mover_for, "torch": TorchMover}
SPARE_BLOCKS = 4


def cache(widths: list[int], *, together: bool, seed: int) -> PagedBlocks:
    """Layers in memories of their own, or all layers of a block next to each other."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    total = BLOCKS * sum(widths)
    memory = torch.randint(0, 256, (total,), generator=generator, dtype=torch.uint8, device="cuda")
    rows, at = [], 0
    for width in widths:
        stride = sum(widths) if together else width
        rows.append(memory.as_strided((BLOCKS, width), (stride, 1), at))
        at += width if together else BLOCKS * width
    return PagedBlocks(rows)


@pytest.fixture
def pool() -> Iterator[NDArray[np.uint8]]:
    """Shared memory as the host tier has it, pinned."""
    size = 64 * 2**20
    memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    with pinned_pool(memory, DEVICE) as is_pinned:
        assert is_pinned
        yield memory


def places(pool: NDArray[np.uint8], count: int, payload: int) -> Integers:
    """Slots in no order, each at a multiple of 64 bytes."""
    pitch = -(-payload // 64) * 64
    order = np.random.default_rng(7).permutation(len(pool) // pitch)[:count]
    return pool.ctypes.data + order.astype(np.int64) * pitch


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("together", [False, True], ids=["layers apart", "layers together"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_saved_and_loaded_bytes_are_those_of_torch(
    pool: NDArray[np.uint8], widths: list[int], *, together: bool, mover: str
) -> None:
    """Through a staging area smaller than what is moved, in groups of layers on the way up."""
    ours, theirs = cache(widths, together=together, seed=1), cache(widths, together=together, seed=2)
    payload, count = ours.payload_bytes, BLOCKS - SPARE_BLOCKS
    block_ids = np.random.default_rng(3).permutation(BLOCKS)[:count].astype(np.int64)
    slots = places(pool, count, payload)
    make = MOVERS[mover]
    down: Mover = make(ours, staging_bytes=payload * 7)
    expected_mover = "CudaMover" if mover == "kernels" else "TorchMover"
    assert type(down).__name__ == expected_mover, "CuPy is missing or broken: install the extra gpu"
    save = Transfers(ours, down)
    save.wait(save.save(block_ids, slots, after=torch.cuda.current_stream().record_event()))
    expected = torch.empty(count, payload, dtype=torch.uint8, device="cuda")
    gather_with_torch(ours, block_ids, expected)
    at = slots - pool.ctypes.data
    got = np.stack([pool[start : start + payload] for start in at.tolist()])
    assert (got == expected.cpu().numpy()).all()
    up = Transfers(theirs, make(theirs, staging_bytes=payload * 7))
    fences = up.load(slots, block_ids, groups=3)
    assert [layer for layer, _ in fences][-1] == len(widths)
    up.wait(fences[-1][1])
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        ids = torch.from_numpy(block_ids).cuda()
        assert torch.equal(mine[ids], other[ids])


def test_a_load_waits_for_the_engines_fence(pool: NDArray[np.uint8]) -> None:
    """A block that a kernel still writes is saved as that kernel leaves it."""
    paged = cache([2**20], together=False, seed=1)
    slots = places(pool, 1, paged.payload_bytes)
    transfers = Transfers(paged, mover_for(paged, staging_bytes=2**20))
    torch.cuda.synchronize()
    untyped: Any = torch.cuda
    untyped._sleep(200_000_000)  # noqa: SLF001 - the one kernel whose length can be chosen
    paged.rows[0][5].fill_(123)
    fence = torch.cuda.current_stream().record_event()
    transfers.wait(transfers.save(np.array([5]), slots, after=fence))
    start = int(slots[0] - pool.ctypes.data)
    assert (pool[start : start + 2**20] == 123).all()


@pytest.mark.parametrize("mover", MOVERS)
def test_asking_waits_for_nothing(pool: NDArray[np.uint8], mover: str) -> None:
    """Neither for the engine's kernels, which a transfer follows, nor for the transfer itself."""
    paged = cache(WIDTHS["even"], together=False, seed=1)
    slots, ids = places(pool, 12, paged.payload_bytes), np.arange(12, dtype=np.int64)
    transfers = Transfers(paged, MOVERS[mover](paged, staging_bytes=paged.payload_bytes * 4))
    untyped: Any = torch.cuda
    # The first time pinned memory for the tables has to be made, which may wait.
    for _ in range(2):
        untyped._sleep(400_000_000)  # noqa: SLF001 - the one kernel whose length can be chosen
        busy = torch.cuda.current_stream().record_event()
        saved = transfers.save(ids, slots, after=busy)
        loaded = transfers.load(slots, ids, groups=3, after=saved)[-1][1]
        was_busy = not busy.query()
        transfers.wait(loaded)
        assert busy.query(), "a transfer was over before what it follows"
    assert was_busy


def test_memory_that_cannot_be_pinned_harms_no_kernel(pool: NDArray[np.uint8]) -> None:
    """The driver pins nothing twice; its refusal is not the error of whatever runs next."""
    with pinned_pool(pool, DEVICE) as is_pinned:
        assert not is_pinned
        assert int(torch.ones(4, device=DEVICE).sum()) == 4


def test_nothing_is_left_on_the_device(pool: NDArray[np.uint8]) -> None:
    """Transfers of every size, many times: what is allocated afterwards is what was before."""
    paged = cache(WIDTHS["even"], together=False, seed=1)
    transfers = Transfers(paged, mover_for(paged, staging_bytes=paged.payload_bytes * 8))
    slots = places(pool, BLOCKS, paged.payload_bytes)
    sizes = []
    for turn in range(60):
        count = 1 + turn % BLOCKS
        ids = np.arange(count, dtype=np.int64)
        transfers.wait(transfers.save(ids, slots[:count]))
        transfers.wait(transfers.load(slots[:count], ids, groups=2)[-1][1])
        sizes.append(torch.cuda.memory_allocated())
    assert max(sizes[10:]) <= sizes[9] + 2**20
