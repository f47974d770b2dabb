"""A small pool that is filled by naming prompts, one letter a block."""

from __future__ import annotations

import numpy as np

from kvstore.block import WHOLE, BlockRows, Residency, SlotArray
from kvstore.events import RemovalCause
from kvstore.index import Space
from kvstore.pool import BlockPool
from kvstore.spec import NamespaceSpec
from kvstore.table import SlotState
from kvstore.tiers.device import DeviceTier
from tests.support.stores import FakeClock, make_chain, make_device, make_spec

SPEC = make_spec(payload_bytes=1024)
OTHER = make_spec("other", payload_bytes=4096, block_size=8)


class Bench:
    """A pool of 1 KiB and 4 KiB slots in 16 KiB extents, over tensor memory."""

    def __init__(self, extents: int = 2, extent_bytes: int = 16 << 10) -> None:
        self.clock = FakeClock()
        self.tier: DeviceTier = make_device(self.clock, extents=extents, extent_bytes=extent_bytes)
        self.pool: BlockPool = self.tier.pool
        self.space = self.open(SPEC)
        self.other = self.open(OTHER)

    def open(self, spec: NamespaceSpec) -> Space:
        return self.pool.open_space(spec.root.digest, WHOLE, spec.payload_bytes_on(), spec.block_size)

    def rows(self, letters: str, spec: NamespaceSpec = SPEC) -> BlockRows:
        return make_chain(spec, letters).rows(WHOLE)

    def put(self, letters: str, spec: NamespaceSpec = SPEC) -> SlotArray:
        """Make the blocks that are not there yet READY; the slots of the whole prompt."""
        self.clock.advance(1)
        rows = self.rows(letters, spec)
        lacking = np.flatnonzero([is_ is Residency.MISS for is_ in self.pool.residency(rows)])
        space = self.pool.space(rows.namespace, WHOLE)
        assert space is not None
        slots = self.pool.stage(space, len(lacking), rows.pick(lacking))
        assert len(slots) == len(lacking), "no room"
        assert self.pool.commit(slots, rows.pick(lacking), None, time=self.clock()).all()
        return self.pool.match(rows).slots

    def match(self, letters: str, spec: NamespaceSpec = SPEC) -> int:
        return len(self.pool.match(self.rows(letters, spec)).slots)

    def states(self, slots: SlotArray) -> set[SlotState]:
        return {SlotState(state) for state in self.pool.extents.state[slots].tolist()}

    def generations(self, slots: SlotArray) -> list[int]:
        containing = self.pool.extents.containing
        return [
            int(containing(slot).table.generation[slot - containing(slot).base]) for slot in slots.tolist()
        ]

    def removals(self) -> list[tuple[RemovalCause, int]]:
        taken = [(each.cause, len(each.hashes) // 16) for each in self.pool.removed]
        self.pool.removed.clear()
        return taken
