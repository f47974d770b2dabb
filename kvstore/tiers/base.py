"""The contract of a tier: where bytes live. Tiers do not know each other.

Every method is safe to call whatever state the tier is in: what goes wrong with a block is an
outcome of that block, never an exception, and ends by the deadline. Deadlines are absolute, on
the clock that the tier was made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.block import BlockRows, MissCause, TierName

Payload = NDArray[np.uint8]
"""The bytes of one block in host-visible memory: shape (payload bytes,), contiguous."""


class SaveOutcome(StrEnum):
    """What became of one block that was offered to a tier.

    FULL, TIMEOUT and UNAVAILABLE are about the tier's state now: the same block may be stored later.
    REFUSED is about the block: this tier will never take it, and nothing is wrong with the tier.
    """

    STORED = "stored"
    PRESENT = "present"
    """This block, or one under its name that is being written, was there already."""
    FULL = "full"
    """No room, and nothing that may be evicted for it."""
    TIMEOUT = "timeout"
    """Not known to be stored when the deadline came."""
    UNAVAILABLE = "unavailable"
    """The tier is not reached, is given up for now, or answers with an error of its own."""
    REFUSED = "refused"
    """Too large for the format or the pool, without tokens, or another block has its hash."""


class TierMatch(NamedTuple):
    """The leading run that a tier has, and why it ends there.

    ``cause`` is None exactly when all rows are there. TIMEOUT and UNAVAILABLE mean that the run may
    go on, only that the tier could not tell; any other cause, that it knows the next block not to
    be there: COLD, or what else a tier that compares knows.
    """

    blocks: int
    cause: MissCause | None


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
    """Health of a tier, for readiness and logs.

    ``reason`` says why it is not healthy; of a healthy tier, what it keeps refusing, if anything.
    """

    healthy: bool
    reason: str = ""


class Tier(Protocol):
    """One place where blocks live."""

    @property
    def name(self) -> TierName: ...

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        """The leading run of ``rows`` that is resident, as far as is known by then. Changes nothing.

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
