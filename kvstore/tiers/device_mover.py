"""Which mover serves a paged cache on this machine."""

from __future__ import annotations

import logging

from kvstore.tiers.device_copy import PagedBlocks
from kvstore.tiers.device_torch import TorchMover
from kvstore.tiers.device_transfer import Mover, MoverError

try:
    from kvstore.tiers.device_cuda import CudaMover
except ImportError:  # CuPy is optional: torch moves the same bytes with a call for each layer
    CudaMover = None  # type: ignore[assignment, misc]

_log = logging.getLogger(__name__)


def mover_for(paged: PagedBlocks, *, staging_bytes: int) -> Mover:
    """Our kernels where the cache is on a GPU and CuPy works there, else torch."""
    if paged.device.type == "cuda" and CudaMover is not None:
        try:
            return CudaMover(paged, staging_bytes=staging_bytes)
        except MoverError as error:
            _log.warning("torch copies the GPU's blocks, with a call for each layer: %s", error)
    return TorchMover(paged, staging_bytes=staging_bytes)
