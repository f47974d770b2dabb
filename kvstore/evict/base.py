"""The contract of an eviction policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.block import SlotArray


class Hints(NamedTuple):
    """What a request says of its own future; bounded in what it can cost others."""

    ended: bool = False
    priority: int = 0
    idle_seconds: float | None = None


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True, eq=False)
class Touch:
    """One request's leading run in this pool, in chain order.

    ``hit_blocks`` of the ``slots`` were resident before the request; the rest it brought. A
    policy sees whole requests, since reuse is decided by prompts and not by single blocks.
    """

    slots: SlotArray
    hit_blocks: int
    time: float
    hints: Hints = NO_HINTS


@dataclass(slots=True, eq=False)
class Occupancy:
    """The pool's own columns, by slot id: shared with the policy, which only reads them.

    ``children`` counts resident blocks whose parent is in the slot, ``parent`` is the slot of
    the parent or -1, ``pins`` counts leases. A slot may go when it has no children and no pins.
    """

    children: NDArray[np.int32]
    parent: NDArray[np.int32]
    pins: NDArray[np.int32]


class Evictor(Protocol):
    """Chooses victims among leaves; holds no bytes, reads no clock."""

    def touch(self, touch: Touch) -> None:
        """A request used these blocks. New slots become known to the policy this way."""

    def forget(self, slots: SlotArray) -> None:
        """These slots were freed for a reason that the policy did not choose."""

    def orphan(self, slots: SlotArray) -> None:
        """The parents of these blocks are gone: they cannot be reached, so they go first."""

    def victims(self, limit: int) -> SlotArray:
        """The next slots to free, at most ``limit``, each a leaf once those before it are gone.

        Empty when every known block is pinned or has a pinned descendant. The caller frees what
        it is given before it asks again.
        """
