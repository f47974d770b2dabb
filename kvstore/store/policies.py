"""What the pools' policies are told of requests."""

from __future__ import annotations

from kvstore.block import HASH_BYTES, BlockRows, Residency
from kvstore.events import BlocksReused
from kvstore.evict.base import Touch
from kvstore.hints import Hints
from kvstore.lease import Lease, Segment
from kvstore.store.local import slots_in
from kvstore.store.parts import Parts
from kvstore.tiers.memory import MemoryTier


def tell_of_request(parts: Parts, lease: Lease) -> None:
    """Tell each pool of a request: when no more of it is to come from redis."""
    for shard in lease.shards:
        for tier in parts.tiers.memory:
            space = parts.space(tier, lease.chain.namespace, shard)
            served = [part for part in lease.segments.get(shard, []) if part.tier is tier.name]
            touch = _touch_of(tier, lease.chain.rows(shard), served)
            touch = touch._replace(time=parts.clock(), hints=lease.hints)
            reuse = tier.pool.touch(space, touch)
            if served:
                size = space.payload_bytes
                parts.bus.emit(
                    BlocksReused(touch.time, tier.name, space.namespace, reuse.gaps, reuse.first_reads, size)
                )


def tell_hints(parts: Parts, prompt: BlockRows, hints: Hints) -> None:
    """Tell each pool what a request, of which it knows, or a write says of its own future by now."""
    for tier in parts.tiers.memory:
        space = parts.space(tier, prompt.namespace, prompt.shard)
        tier.pool.hint(space, Touch(prompt.hashes, tier.pool.match(prompt).slots, 0, parts.clock(), hints))


def _touch_of(tier: MemoryTier, rows: BlockRows, served: list[Segment]) -> Touch:
    """What a tier's policy is told of a request of which the tier ``served`` these parts.

    Policies think in whole prompts, so what hangs from what: of the blocks before a part, which the
    caller brings or a faster tier serves, the policy hears too where they are resident. Where some are
    not, the request begins behind them for this tier.
    """
    hits = sum(len(part.slots) for part in served if part.source is tier.name)
    slots = slots_in(served, tier.name)
    if not served or (served[0].start == 0 and served[-1].stop == len(slots)):
        return Touch(rows.hashes, slots, hits, 0.0)
    stop = served[-1].stop
    missing = [
        at for at, is_ in enumerate(tier.pool.residency(rows.slice(0, stop))) if is_ is not Residency.READY
    ]
    begin = missing[-1] + 1 if missing else 0
    run = tier.pool.match(rows.slice(begin, stop)).slots
    fetched = len(slots) - hits
    brought = max(0, served[0].start - begin)
    return Touch(rows.hashes[begin * HASH_BYTES :], run, len(run) - fetched, 0.0, brought_blocks=brought)
