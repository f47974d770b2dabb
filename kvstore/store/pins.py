"""Prompts that an operator keeps in memory, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.block import Chain, Shard, SlotArray, TierName
from kvstore.errors import LeaseError
from kvstore.lease import Segment
from kvstore.pool import BlockPool
from kvstore.store.local import cut, local_run, slots_in
from kvstore.store.parts import Parts

_NO_STAMP = 0.0
"""What is pinned here is not promised beyond the end of this process."""


class PinnedRun(NamedTuple):
    """A name, the tokens of the run that it holds, and the bytes of their slots over all ranks."""

    name: str
    tokens: int
    size: int


@dataclass(frozen=True, slots=True)
class _Held:
    """``hashes`` are packed, of the whole prompt; ``segments`` those of all ranks."""

    hashes: bytes
    tokens: int
    segments: list[Segment]
    size: int


class Pins:
    """Named holds on the resident part of a prompt. They count no request and have no deadline."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._held: dict[str, _Held] = {}

    def all(self) -> list[PinnedRun]:
        """What is held now."""
        return [PinnedRun(name, held.tokens, held.size) for name, held in self._held.items()]

    def pin(self, name: str, chain: Chain, shards: tuple[Shard, ...]) -> int:
        """Hold the leading run that is in memory now, over all ranks; its blocks.

        The same name holds more of the same prompt when more is there. LeaseError when it holds
        another prompt, or when pins would hold more than half of the pool. Where nothing of the
        prompt is there, nothing is held, also under that name.
        """
        known = self._held.get(name)
        if known is not None and known.hashes != chain.hashes:
            raise LeaseError(f"pin {name!r} holds another prompt; unpin it first, or use another name")
        runs = [local_run(self._parts.tiers.memory, chain.rows(shard)) for shard in shards]
        blocks = min(run.blocks for run in runs)
        segments = [segment for run in runs for segment in cut(run.segments, blocks)]
        size = sum(map(self._bytes, segments))
        others = sum(held.size for other, held in self._held.items() if other != name)
        limit = sum(tier.pool.limit_bytes for tier in self._parts.tiers.memory) // 2
        if others + size > limit:
            raise LeaseError(
                f"other pins hold {others} bytes, and {name!r} makes it more than {limit}, half of the pool; "
                "unpin something, or raise pool_bytes"
            )
        for segment in segments:
            self._pool(segment.tier).pin(segment.slots, _NO_STAMP)
        self.unpin(name)
        if blocks:
            self._held[name] = _Held(chain.hashes, blocks * chain.root.block_size, segments, size)
        return blocks

    def unpin(self, name: str) -> bool:
        """Let go of what a name holds; False when it holds nothing."""
        held = self._held.pop(name, None)
        for segment in held.segments if held is not None else ():
            self._pool(segment.tier).unpin(segment.slots)
        return held is not None

    def pins(self, tier: TierName) -> SlotArray:
        """All slots that are held in a tier, one entry a pin."""
        segments = [segment for held in self._held.values() for segment in held.segments]
        return slots_in(segments, tier)

    def _bytes(self, segment: Segment) -> int:
        extents = self._pool(segment.tier).extents
        return sum(
            (positions.stop - positions.start) * extent.slot_class.slot_bytes
            for extent, positions, _ in extents.groups(segment.slots)
        )

    def _pool(self, tier: TierName) -> BlockPool:
        return next(each.pool for each in self._parts.tiers.memory if each.name is tier)
