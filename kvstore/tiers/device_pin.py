"""Host memory that a GPU's own DMA can reach."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_PORTABLE, _READ_ONLY = 1, 8
"""Flags of cudaHostRegister: pinned for every context; the pages may not be written to."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def pinned(address: int, size: int, *, writable: bool) -> Iterator[bool]:
    """Have the driver pin host memory while the context lasts; whether it does.

    Where it refuses, copies work all the same and take longer: that is logged. Pinning reserves what is
    not there yet, so of a file the whole must fit its file system.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
    status = runtime.cudaHostRegister(address, size, flags)
    if int(status) != 0:
        _log.warning(
            "%d bytes of the pool cannot be pinned for the GPU (%s), so copies take longer; raise the limit "
            "of locked memory (ulimit -l)",
            size,
            runtime.cudaGetErrorString(status),
        )
        yield False
        return
    try:
        yield True
    finally:
        runtime.cudaHostUnregister(address)


def pinned_pool(memory: NDArray[np.uint8]) -> AbstractContextManager[bool]:
    """``pinned`` for the whole of a mapped pool."""
    return pinned(memory.ctypes.data, memory.nbytes, writable=True)
