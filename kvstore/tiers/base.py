"""The contract of a tier: where bytes live. Tiers do not know each other.

Every method is safe to call whatever state the tier is in: what goes wrong with a block is an
outcome of that block, never an exception, and ends by the deadline. Deadlines are absolute, on
the clock that the tier was made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.block import BlockRows, MissCause, TierName

Payload = NDArray[np.uint8]
"""The bytes of one block in host-visible memory: shape (payload bytes,), contiguous."""


class SaveOutcome(StrEnum):
    """What became of one block that was offered to a tier."""

    STORED = "stored"
    PRESENT = "present"
    FULL = "full"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"


@dataclass(slots=True)
class LoadResult:
    """Outcome of each block of a load, in order.

    ``causes[i]`` is None when destination i holds the block's verified bytes, whose xxh3_64 is
    ``checksums[i]``; otherwise the destination's contents are undefined.
    """

    causes: list[MissCause | None] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Health of a tier, for readiness and logs; ``reason`` says why it is not healthy."""

    healthy: bool
    reason: str = ""


class Tier(Protocol):
    """One place where blocks live."""

    @property
    def name(self) -> TierName: ...

    def match(self, rows: BlockRows, deadline: float) -> int:
        """Length of the leading run of ``rows`` that is resident. Changes nothing.

        A local tier compares all that ``rows`` knows; redis only asks whether the keys exist, so
        there a run is a promise that ``load`` has still to verify.
        """

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        """Copy blocks out, comparing identity (with tokens, where known) and checksum.

        Block i goes to ``destinations[i]``, which must be exactly as long as its payload. The
        caller owns the destinations until the call returns, and again afterwards.
        """

    def save(
        self,
        rows: BlockRows,
        payloads: Sequence[Payload],
        checksums: Sequence[int],
        deadline: float,
    ) -> list[SaveOutcome]:
        """Store copies of blocks, heads before tails; ``checksums`` are xxh3_64 of the payloads.

        The payloads must not change during the call. ``rows`` must carry tokens.
        """

    def discard(self, rows: BlockRows, deadline: float) -> int:
        """Forget these blocks where nobody holds them; the number forgotten."""

    def status(self) -> TierStatus: ...

    def close(self) -> None:
        """Give back files, sockets and memory. Idempotent."""
