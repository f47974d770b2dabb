"""Host memory that a GPU's own DMA can reach: a pool, pinned where it is, and small tables on their way."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_PORTABLE = 1
"""Flag of cudaHostRegister: pinned for every context."""

_log = logging.getLogger(__name__)


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values on a device, as of what its current stream is given next; the host waits for nothing.

    Where the device is the CPU, the result may share their memory.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    # A copy from ordinary memory would wait for all that the stream does before. What torch pins, it gives
    # to nobody else until the stream is past the copy.
    return tensor.pin_memory().to(device, non_blocking=True)


def pinned_pool(memory: NDArray[np.uint8], device: torch.device) -> AbstractContextManager[bool]:
    """Have the driver pin mapped memory while the context lasts; whether it does.

    Where it refuses, copies work all the same and take longer: that is logged. Pinning reserves what is
    not there yet, so of a file the whole must fit its file system. ``device`` is a GPU that this process
    uses: a thread that has used none would open a context on the first one, which takes memory there.
    """
    return _pinned(memory.ctypes.data, memory.nbytes, device)


@contextlib.contextmanager
def _pinned(address: int, size: int, device: torch.device) -> Iterator[bool]:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        status = runtime.cudaHostRegister(address, size, _PORTABLE)
    if int(status) != 0:
        _log.warning(
            "%d bytes of the pool cannot be pinned for the GPU (%s), so copies take longer; raise the limit "
            "of locked memory (ulimit -l)",
            size,
            runtime.cudaGetErrorString(status),
        )
        _forget_the_error(device)
        yield False
        return
    try:
        yield True
    finally:
        with torch.cuda.device(device):
            status = runtime.cudaHostUnregister(address)
        if int(status) != 0:
            _log.warning("the pool's memory stays pinned (%s)", runtime.cudaGetErrorString(status))
            _forget_the_error(device)


def _forget_the_error(device: torch.device) -> None:
    """The runtime keeps a thread's last error until somebody asks, and torch asks after each kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
