"""Prompts that an operator keeps in memory, by name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.block import Chain, Shard, SlotArray, TierName
from kvstore.errors import LeaseError
from kvstore.lease import Segment
from kvstore.pool import BlockPool
from kvstore.store.local import cut, local_run
from kvstore.store.parts import Parts

_NO_STAMP = 0.0
"""What is pinned here is not promised beyond the end of this process."""


class PinnedRun(NamedTuple):
    """A name, the blocks of the run that it holds, and their bytes over all ranks."""

    name: str
    blocks: int
    size: int


class Pins:
    """Named holds on the resident part of a prompt. They count no request and have no deadline."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._held: dict[str, tuple[bytes, list[Segment], int]] = {}

    def all(self) -> list[PinnedRun]:
        """What is held now."""
        return [
            PinnedRun(name, blocks, sum(self._bytes(part) for part in parts))
            for name, (_, parts, blocks) in self._held.items()
        ]

    def pin(self, name: str, chain: Chain, shards: tuple[Shard, ...]) -> int:
        """Hold the leading run that is in memory now, over all ranks; its blocks.

        The same name holds more of the same prompt when more is there. LeaseError when it holds
        another prompt, or when pins would hold more than half of the pool.
        """
        known = self._held.get(name)
        if known is not None and known[0] != chain.hashes:
            raise LeaseError(f"pin {name!r} holds another prompt; unpin it first, or use another name")
        runs = [local_run(self._parts.tiers.memory, chain.rows(shard)) for shard in shards]
        blocks = min(run.blocks for run in runs)
        segments = [segment for run in runs for segment in cut(run.segments, blocks)]
        held = sum(self._bytes(part) for _, parts, _ in self._held.values() for part in parts)
        limit = sum(tier.pool.limit_bytes for tier in self._parts.tiers.memory) // 2
        if held + sum(map(self._bytes, segments)) > limit:
            raise LeaseError(
                f"pins hold {held} bytes, and {name!r} would make it more than {limit}, half of the pool; "
                "unpin something, or raise pool_bytes"
            )
        for segment in segments:
            self._pool(segment.tier).pin(segment.slots, _NO_STAMP)
        if known is not None:
            self._let_go(known[1])
        self._held[name] = chain.hashes, segments, blocks
        return blocks

    def unpin(self, name: str) -> bool:
        """Let go of what a name holds; False when it holds nothing."""
        held = self._held.pop(name, None)
        if held is not None:
            self._let_go(held[1])
        return held is not None

    def pins(self, tier: TierName) -> SlotArray:
        """All slots that are held in a tier, one entry a pin."""
        held = [part.slots for _, parts, _ in self._held.values() for part in parts if part.tier is tier]
        return np.concatenate(held) if held else np.zeros(0, dtype=np.int64)

    def _let_go(self, segments: list[Segment]) -> None:
        for segment in segments:
            self._pool(segment.tier).unpin(segment.slots)

    def _bytes(self, segment: Segment) -> int:
        extents = self._pool(segment.tier).extents
        return sum(
            (positions.stop - positions.start) * extent.slot_class.slot_bytes
            for extent, positions, _ in extents.groups(segment.slots)
        )

    def _pool(self, tier: TierName) -> BlockPool:
        return next(each.pool for each in self._parts.tiers.memory if each.name is tier)
