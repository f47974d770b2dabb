"""Loads and saves of a paged cache through a bounded staging area, with torch's mover on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers import device_mover
from kvstore.tiers.device_copy import Integers, PagedBlocks
from kvstore.tiers.device_torch import TorchMover
from kvstore.tiers.device_transfer import MoverError, Transfers, rows_between

WIDTHS = [96, 32, 160]
PAYLOAD = sum(WIDTHS)
PITCH = 320


def paged_blocks(blocks: int, seed: int) -> PagedBlocks:
    generator = torch.Generator().manual_seed(seed)
    return PagedBlocks(
        [torch.randint(0, 256, (blocks, width), generator=generator, dtype=torch.uint8) for width in WIDTHS]
    )


def payload(paged: PagedBlocks, block: int) -> bytes:
    return b"".join(rows[block].numpy().tobytes() for rows in paged.rows)


@given(
    order=st.permutations(range(9)),
    places=st.permutations(range(12)),
    staged=st.integers(0, 4),
    groups=st.integers(1, 4),
)
def test_what_is_saved_in_one_cache_is_loaded_in_another(
    order: list[int], places: list[int], staged: int, groups: int
) -> None:
    """Whatever the order of blocks and slots, the room for staging and the groups of layers."""
    ours, theirs = paged_blocks(9, 1), paged_blocks(9, 2)
    untouched = payload(theirs, order[7])
    host = np.zeros(12 * PITCH, dtype=np.uint8)
    slots: Integers = host.ctypes.data + np.array(places[:7], dtype=np.int64) * PITCH
    blocks = np.array(order[:7], dtype=np.int64)
    down = Transfers(ours, TorchMover(ours, staging_bytes=staged * PAYLOAD))
    down.wait(down.save(blocks, slots))
    for place, block in zip(places, order[:7], strict=False):
        assert host[place * PITCH : place * PITCH + PAYLOAD].tobytes() == payload(ours, block)
        assert not host[place * PITCH + PAYLOAD : (place + 1) * PITCH].any()
    up = Transfers(theirs, TorchMover(theirs, staging_bytes=staged * PAYLOAD))
    ends, before = [], [rows.clone() for rows in theirs.rows]
    for layer, fence in up.load_in_turn(slots, blocks, groups=groups):
        up.wait(fence)
        ends.append(layer)
        assert all(map(torch.equal, theirs.rows[layer:], before[layer:])), "a group came before its turn"
    assert ends == sorted(set(ends)), "each group has a layer of its own"
    assert ends[-1] == len(WIDTHS)
    assert all(payload(theirs, block) == payload(ours, block) for block in order[:7])
    assert payload(theirs, order[7]) == untouched


@given(
    starts=st.lists(st.integers(0, 40), min_size=0, max_size=12, unique=True),
    others=st.permutations(range(12)),
    width=st.integers(1, 8),
)
def test_rows_are_every_piece_once(starts: list[int], others: list[int], width: int) -> None:
    """What the runs spell out is the list of copies that was asked, in its order; no pitch is too short."""
    targets = np.array(starts, dtype=np.int64) * 8
    sources = np.array(others[: len(starts)], dtype=np.int64) * 8
    runs = list(rows_between(targets, sources, width))
    spelled = [
        (run.target + at * run.target_pitch, run.source + at * run.source_pitch)
        for run in runs
        for at in range(run.height)
    ]
    assert spelled == list(zip(targets.tolist(), sources.tolist(), strict=True))
    assert all(min(run.target_pitch, run.source_pitch) >= run.width == width for run in runs)


@pytest.mark.parametrize(
    ("targets", "sources", "heights"),
    [
        ([0, 8, 16, 24], [0, 10, 20, 30], [4]),
        ([0, 8, 16, 40], [0, 8, 16, 24], [3, 1]),
        ([0, 8, 16], [16, 8, 0], [1, 1, 1]),
        ([0], [0], [1]),
        ([0, 2**31 - 1], [0, 8], [2]),
        ([0, 2**31, 2**31 + 8, 2**33], [0, 8, 16, 24], [1, 2, 1]),
        ([0, 8], [0, 2**31], [1, 1]),
    ],
)
def test_evenly_spaced_copies_are_one(targets: list[int], sources: list[int], heights: list[int]) -> None:
    """Unless they are further apart than CUDA's copies of rows may be, as in a pool of many GiB."""
    runs = rows_between(np.array(targets), np.array(sources), 8)
    assert [run.height for run in runs] == heights


class Broken:
    """CuPy where it was installed for another driver."""

    def __init__(self, paged: PagedBlocks, *, staging_bytes: int) -> None:
        raise MoverError("CuPy does not work here (no NVRTC)")


def test_torch_takes_over_from_kernels_that_do_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line that says why; a cache in ordinary memory never asks for kernels."""
    paged = paged_blocks(2, 1)
    monkeypatch.setattr(device_mover, "CudaMover", Broken)
    assert isinstance(device_mover.mover_for(paged, staging_bytes=0), TorchMover)
    assert caplog.messages == []
    # Here is no GPU to build torch's mover on.
    torchs = TorchMover(paged, staging_bytes=0)
    monkeypatch.setattr(device_mover, "TorchMover", lambda paged, staging_bytes: torchs)
    paged.device = torch.device("cuda")
    assert device_mover.mover_for(paged, staging_bytes=0) is torchs
    [line] = caplog.messages
    assert "CuPy does not work here (no NVRTC)" in line
