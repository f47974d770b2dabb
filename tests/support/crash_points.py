"""Where a client may be between two calls when it is stopped or killed."""

from __future__ import annotations

from enum import StrEnum


class Point(StrEnum):
    """Moments of a read and of a write, in order."""

    READ_ACQUIRED = "read.acquired"
    """The lease is held, nothing is copied."""
    READ_COPYING = "read.copying"
    """Half of the blocks are copied."""
    READ_COPIED = "read.copied"
    """All is copied, and not yet known to be right; the lease is held."""
    WRITE_BEGUN = "write.begun"
    """The slots are the writer's, and empty."""
    WRITE_FILLING = "write.filling"
    """Half of the slots are full, one of them half."""
    WRITE_FILLED = "write.filled"
    """All slots are full, nothing is committed."""

    @property
    def writes(self) -> bool:
        return self.startswith("write")
