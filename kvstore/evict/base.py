"""The contract of an eviction policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvstore.block import SlotArray
from kvstore.hints import NO_HINTS, Hints


class Touch(NamedTuple):
    """One request, once, when it is known how much of it this pool has.

    ``hashes`` are all whole blocks that it asked for (packed), ``slots`` where the leading ones are
    in this pool, each the parent of the next, the first one's not resident; ``hit_blocks`` of these
    were resident before, the rest were fetched for it. A policy sees whole requests, complete misses
    too, since reuse is decided by prompts and not by single blocks. The first ``brought_blocks`` of the
    hits were used where the caller has its own copy of them, so nobody read them here.
    """

    hashes: bytes
    slots: SlotArray
    hit_blocks: int
    time: float
    hints: Hints = NO_HINTS
    brought_blocks: int = 0


@dataclass(slots=True, eq=False)
class Occupancy:
    """The pool's own columns, by slot id: shared with the policy, which only reads them.

    ``children`` counts resident blocks whose parent is in the slot, ``parent`` is the slot of
    the parent or -1, ``pins`` counts leases. A slot may go when it has no children and no pins.
    """

    children: NDArray[np.int32]
    parent: NDArray[np.int32]
    pins: NDArray[np.int32]


@runtime_checkable
class TakesHints(Protocol):
    """A policy that listens to hints which come later than their request."""

    def hint(self, touch: Touch) -> None:
        """A request that was made says something else of its future by now, or a write says it of its prompt.

        ``slots`` are where the leading blocks of the prompt are in this pool now. Nothing is used by
        this: it is neither a request nor a hit. The hints replace those of the request.
        """


class Evictor(Protocol):
    """Chooses victims among leaves; holds no bytes, reads no clock.

    What it chooses depends on what it was told, in that order, and not on the numbers of slots.
    """

    def touch(self, touch: Touch) -> None:
        """A request was made."""

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        """New blocks, each the parent of the next, behind the one in slot ``parent`` (-1: not resident).

        ``hashes`` (packed) name them. They belong to the request that asked for them, where the policy
        keeps that, else to the one that used the parent last.
        """

    def forget(self, slots: SlotArray) -> None:
        """These slots were freed for a reason that the policy did not choose."""

    def orphan(self, slots: SlotArray) -> None:
        """The parents of these blocks are gone: they cannot be reached, so they go first."""

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        """The next slots to free, at most ``limit``, each a leaf once those before it are gone.

        Empty when every known block is pinned or has a pinned descendant. With ``wanted``, the hashes
        of the blocks that room is made for, a policy may also stop early, to say that the rest of them is
        worth less than what would go. The caller frees what it is given before it asks again.
        """
