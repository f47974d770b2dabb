"""Steps at which a test may stop a process to see what a crash there leaves behind.

Whoever puts the process together hands in what to do at a step; in production that is nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Step(StrEnum):
    """Moments between two changes that must not be torn apart by a crash."""

    ACQUIRE_ADMITTED = "acquire.admitted"
    """The request was read, nothing is pinned."""
    ACQUIRE_PINNED = "acquire.pinned"
    """The lease exists, the client does not know of it."""
    RELEASE_ADMITTED = "release.admitted"
    """The client is done, the lease still exists."""
    WRITE_STAGED = "write.staged"
    """Slots are taken, the writer does not know of them."""
    WRITE_COMMITTING = "write.committing"
    """The slots are full, nothing is visible."""
    WRITE_COMMITTED = "write.committed"
    """Everything is visible, the writer does not know of it."""
    PROMOTION_PROBED = "promotion.probed"
    """Redis said what it has, no slot is taken."""
    PROMOTION_STAGED = "promotion.staged"
    """Slots wait for bytes from redis."""
    PROMOTION_LOADED = "promotion.loaded"
    """The bytes are there, nothing is visible."""
    PROMOTION_COMMITTED = "promotion.committed"
    """Blocks are visible, those who wait do not know of it."""
    ADOPTION_LOCKED = "adoption.locked"
    """The file of the server before is this server's, and unchanged."""
    ADOPTION_SCANNED = "adoption.scanned"
    """What is not taken over has been freed."""
    ADOPTION_DONE = "adoption.done"
    """All is taken over, nobody is served."""


Failpoint = Callable[[Step], None]


def no_failpoint(step: Step) -> None:
    """Go on."""
