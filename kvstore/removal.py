"""Blocks that leave a pool, and what becomes of those that hang from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.block import SlotArray
from kvstore.events import RemovalCause
from kvstore.extents import ExtentMap
from kvstore.index import Space, await_parent, orphan, unlink
from kvstore.ledger import Ledger
from kvstore.shares import Shares
from kvstore.spaces import Spaces
from kvstore.stamps import History, history
from kvstore.table import SlotState


class Removed(NamedTuple):
    """Blocks that left the pool, for the owner's events; ``whole`` as long as the owner keeps their slots."""

    space: Space
    slots: SlotArray
    hashes: bytes
    cause: RemovalCause
    history: History
    whole: bool


class Removals:
    """Takes READY blocks away. Owner: one pool."""

    def __init__(self, extents: ExtentMap, ledger: Ledger, spaces: Spaces, shares: Shares) -> None:
        self._extents = extents
        self._ledger = ledger
        self._spaces = spaces
        self._shares = shares
        self.removed: list[Removed] = []
        """What left since the owner last looked; the owner empties it."""

    def inner(self, leaving: SlotArray, cause: RemovalCause) -> None:
        """Remove blocks that may have children elsewhere: those become orphans, first to go."""
        for space, part in self._spaces.split(leaving):
            self._shares.evictor(space).forget(part)
        lost = orphan(self._ledger.occupancy, leaving)
        self.leaves(leaving, cause)
        for space, part in self._spaces.split(lost):
            await_parent(space, self._spaces.rows_of(part), part)
            self._shares.evictor(space).orphan(part)

    def expired(self, slots: SlotArray) -> None:
        """Remove blocks from which nothing hangs but each other, without their policy having chosen them."""
        for space, part in self._spaces.split(slots):
            self._shares.evictor(space).forget(part)
        self.leaves(slots, RemovalCause.EXPIRED)

    def leaves(self, slots: SlotArray, cause: RemovalCause, *, keep_bytes: bool = False) -> None:
        """Remove blocks from which nothing hangs but each other, and which their policy has given up.

        Their slots are FREE then, or STAGED with their bytes and rows as they were.
        """
        # First of all, so that a reader who sees the generation again has seen the block whole.
        for extent, _, rows in self._extents.groups(slots):
            extent.table.generation[rows] += np.uint64(1)
        for space, part in self._spaces.split(slots):
            identities = self._spaces.rows_of(part)
            unlink(space, self._ledger.occupancy, identities, part)
            space.lost = True
            self._shares.count(space, -len(part))
            past = history(self._extents, part)
            self.removed.append(Removed(space, part, identities.hashes, cause, past, keep_bytes))
        for extent, _, rows in self._extents.groups(slots):
            extent.table.writer[rows] = 0  # whoever filled them has done so; a restart may free them
        self._ledger.move(slots, SlotState.READY, SlotState.STAGED if keep_bytes else SlotState.FREE)
