"""Which mover serves a paged cache on this machine."""

from __future__ import annotations

from kvstore.tiers.device_copy import PagedBlocks
from kvstore.tiers.device_torch import TorchMover
from kvstore.tiers.device_transfer import Mover

try:
    from kvstore.tiers.device_cuda import CudaMover
except ImportError:  # CuPy is optional: torch moves the same bytes with a call for each layer
    CudaMover = None  # type: ignore[assignment, misc]


def mover_for(paged: PagedBlocks, *, staging_bytes: int) -> Mover:
    """Our kernels where the cache is on a GPU and CuPy is installed, else torch."""
    if paged.device.type == "cuda" and CudaMover is not None:
        return CudaMover(paged, staging_bytes=staging_bytes)
    return TorchMover(paged, staging_bytes=staging_bytes)
