"""The mover for NVIDIA GPUs with its kernels on this machine: addresses, uploads and order are its own.

What it takes of CuPy and of torch's streams is a stand-in here that does at once what it is asked; the real
ones are for the tests marked gpu.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.tiers.device_copy import Integers, PagedBlocks
from kvstore.tiers.device_transfer import Mover, MoverError, Transfers
from tests.support.kernel_shim import Shim, shim

__all__ = ["shim"]

WIDTHS = [96, 32, 160, 4128]
PAYLOAD, PITCH = sum(WIDTHS), 4480
NAME = "kvstore.tiers.device_cuda"
EVERYTHING = 2**62


class HostStream:
    """What was asked of it has happened."""

    cuda_stream = 7

    def __init__(self, device: torch.device) -> None:
        self.followed: list[object] = []

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def wait_event(self, event: object) -> None:
        self.followed.append(event)


def copy_rows(  # noqa: PLR0913 - the signature is CUDA's
    target: int, to_pitch: int, source: int, from_pitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    """cudaMemcpy2DAsync, whose pitches may not be shorter than a row."""
    assert width <= min(to_pitch, from_pitch)
    assert (kind, stream) == (4, HostStream.cuda_stream)
    for row in range(height):
        ctypes.memmove(target + row * to_pitch, source + row * from_pitch, width)


@pytest.fixture
def make_mover(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The class, over the shim. Any memory may be touched, at multiples of each access."""
    shim.forget()
    shim.allow(0, EVERYTHING, writable=True)

    def nothing(_given: object) -> AbstractContextManager[None]:
        return nullcontext()

    module = SimpleNamespace(get_function=shim.kernel)
    cuda = SimpleNamespace(
        Device=nothing,
        Stream=SimpleNamespace(from_external=nothing),
        runtime=SimpleNamespace(memcpy2DAsync=copy_rows, memcpyDefault=4),
    )
    cupy = SimpleNamespace(RawModule=lambda code, options: module, cuda=cuda)
    compiler = SimpleNamespace(CompileException=SyntaxError)
    for name, made in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.compiler", compiler)):
        monkeypatch.setitem(sys.modules, name, made)
    for name, stand_in in (("Stream", HostStream), ("device", nothing), ("stream", nothing)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME).CudaMover
    sys.modules.pop(NAME)
    assert shim.faults() == 0


def paged_blocks(blocks: int, seed: int) -> PagedBlocks:
    generator = torch.Generator().manual_seed(seed)
    return PagedBlocks(
        [torch.randint(0, 256, (blocks, width), generator=generator, dtype=torch.uint8) for width in WIDTHS]
    )


def payload(paged: PagedBlocks, block: int) -> bytes:
    return b"".join(rows[block].numpy().tobytes() for rows in paged.rows)


@pytest.mark.parametrize("staged", [0, 3, 20])
def test_what_is_saved_in_one_cache_is_loaded_in_another(
    make_mover: Callable[..., Mover], monkeypatch: pytest.MonkeyPatch, staged: int
) -> None:
    """In groups of layers, with a staging area for one block, for some, or for more; in several launches."""
    monkeypatch.setattr("kvstore.tiers.device_copy._GRID_MAX", 9)
    ours, theirs = paged_blocks(9, 1), paged_blocks(9, 2)
    untouched = payload(theirs, 4)
    host = np.zeros(12 * PITCH, dtype=np.uint8)
    places, blocks = np.array([11, 2, 3, 4, 0, 7, 9]), np.array([8, 0, 2, 1, 7, 5, 3], dtype=np.int64)
    slots: Integers = host.ctypes.data + places * PITCH
    down = Transfers(ours, make_mover(ours, staging_bytes=staged * PITCH))
    down.wait(down.save(blocks, slots))
    for place, block in zip(places, blocks, strict=True):
        assert host[place * PITCH : place * PITCH + PAYLOAD].tobytes() == payload(ours, block)
        assert not host[place * PITCH + PAYLOAD : (place + 1) * PITCH].any()
    up = Transfers(theirs, make_mover(theirs, staging_bytes=staged * PITCH))
    for _, fence in up.load(slots, blocks, groups=3):
        up.wait(fence)
    assert all(payload(theirs, block) == payload(ours, block) for block in blocks)
    assert payload(theirs, 4) == untouched


def test_a_cupy_that_does_not_work_is_told_apart(
    make_mover: Callable[..., Mover], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver(code: str, options: tuple[str, ...]) -> object:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(sys.modules["cupy"], "RawModule", no_driver)
    with pytest.raises(MoverError, match="cudaErrorInsufficientDriver"):
        make_mover(paged_blocks(1, 1), staging_bytes=0)
