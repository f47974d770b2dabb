"""Leases over tiers: match and pin in one step, renew, settle once."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from kvstore.block import Chain, MissCause, Shard, SlotArray, TierName
from kvstore.errors import LeaseError
from kvstore.events import BlocksReused, RequestSettled
from kvstore.evict.base import Touch
from kvstore.hints import Hints
from kvstore.lease import Lease, LeaseTable, Segment
from kvstore.store.first_read import first_reads, learn_from_reader
from kvstore.store.local import LocalRun, credit, cut, local_run, slots_in
from kvstore.store.parts import Parts
from kvstore.tiers.memory import MemoryTier


class Holding:
    """Every lease of one store, and the pins that belong to them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._tier: dict[TierName, MemoryTier] = {tier.name: tier for tier in parts.tiers.memory}
        self.leases = LeaseTable()

    def open(
        self,
        request: tuple[str, str],
        chain: Chain,
        shards: tuple[Shard, ...],
        hints: Hints,
        *,
        counted: bool = True,
    ) -> Lease:
        """A lease on the chain's leading local run; LeaseError if the request has another chain.

        To ask again for what is held already renews it.
        """
        known = self.leases.by_request(*request)
        if known is not None:
            _require_same(known, chain, shards)
            self.renew(known)
            return known
        deadline = self._clock() + self._parts.options.lease_seconds
        lease = self.leases.open(request, chain, shards, deadline, hints)
        lease.counted = counted
        self.extend(lease)
        return lease

    def extend(self, lease: Lease, fetched: Container[int] = ()) -> None:
        """Pin what is resident past the lease's end; ``fetched`` host slots came from redis."""
        if lease.over or lease.blocks == len(lease.chain):
            return
        memory, chain = self._parts.tiers.memory, lease.chain
        runs = {shard: local_run(memory, chain.rows(shard, lease.blocks)) for shard in lease.shards}
        if not self._parts.options.readers_verify:
            host, namespace = self._parts.tiers.host, chain.namespace
            runs = {
                shard: first_reads(self._parts, self._parts.space(host, namespace, shard), run)
                for shard, run in runs.items()
            }
        # Ranks must not disagree: the promise is the minimum over shards.
        blocks = lease.blocks + min(run.blocks for run in runs.values())
        lease.cause = _shortest(runs).cause
        if blocks == lease.blocks:
            return
        for shard, run in runs.items():
            segments = cut(run.segments, blocks)
            if fetched:
                segments = credit(segments, fetched)
            lease.segments.setdefault(shard, []).extend(segments)
            for segment in segments:
                self._tier[segment.tier].pool.pin(segment.slots, lease.deadline)
        lease.blocks = blocks

    def pin(self, lease: Lease, tier: TierName, slots: SlotArray) -> None:
        """Hold slots beside the promised run until the lease ends."""
        self._tier[tier].pool.pin(slots, lease.deadline)
        lease.held.append((tier, slots))

    def replace(self, lease: Lease, shard: Shard, segments: list[Segment]) -> None:
        """Give a shard's run new places, which are pinned already; unpin what it leaves."""
        for name, tier in self._tier.items():
            before = slots_in(lease.segments.get(shard, ()), name)
            tier.pool.unpin(before[~np.isin(before, slots_in(segments, name))])
        lease.segments[shard] = segments

    def renew(self, lease: Lease) -> None:
        """Move the deadline out."""
        self.require_live(lease)
        deadline = self._clock() + self._parts.options.lease_seconds
        self.leases.renew(lease, deadline)
        for tier, slots in lease.pinned():
            self._tier[tier].pool.extend_lease(slots, deadline)

    @staticmethod
    def require_live(lease: Lease) -> None:
        """LeaseError when a lease is over: its slots may be anybody's by now."""
        if lease.over:
            raise LeaseError(
                f"lease {lease.id} of request {lease.request_id!r} is over; acquire again, and renew in time"
            )

    def release(self, lease: Lease, used_blocks: int | None = None, compared_blocks: int = 0) -> None:
        """Unpin and count the request, once. Idempotent.

        ``used_blocks`` is how much of the run the reader found valid and used (None: all of it),
        ``compared_blocks`` how much it compared with its checksums, where readers do that.
        """
        if lease.over:
            return
        self.tell_policies(lease)
        for tier, slots in lease.pinned():
            self._tier[tier].pool.unpin(slots)
        self.leases.close(lease)
        used = lease.blocks if used_blocks is None else min(used_blocks, lease.blocks)
        if self._parts.options.readers_verify:
            learn_from_reader(self._parts, lease, used, compared_blocks)
        if lease.counted:
            self._parts.bus.emit(self._settled(lease, used))
        lease.wake()

    def expire(self) -> None:
        """End leases whose deadline has passed."""
        for lease in self.leases.overdue(self._clock()):
            self.release(lease)

    def pins(self, tier: TierName) -> SlotArray:
        """All slots that leases hold in a tier, one entry a pin."""
        held = [slots for lease in self.leases for name, slots in lease.pinned() if name is tier]
        return np.concatenate(held) if held else np.zeros(0, dtype=np.int64)

    def tell_policies(self, lease: Lease) -> None:
        """Tell each pool of the request, once: when no more of it is to come from redis."""
        if lease.seen or not lease.counted:
            return
        lease.seen = True
        for shard in lease.shards:
            for tier in self._tier.values():
                self._touch(lease, shard, tier)

    def _touch(self, lease: Lease, shard: Shard, tier: MemoryTier) -> None:
        space = self._parts.space(tier, lease.chain.namespace, shard)
        segments = lease.segments.get(shard, [])
        hits = sum(len(part.slots) for part in segments if part.source is tier.name)
        slots, now = slots_in(segments, tier.name), self._clock()
        reuse = tier.pool.touch(space, Touch(lease.chain.hashes, slots, hits, now, lease.hints))
        if len(slots):
            namespace, size = space.namespace, space.payload_bytes
            self._parts.bus.emit(BlocksReused(now, tier.name, namespace, reuse.gaps, reuse.first_reads, size))

    def _settled(self, lease: Lease, used: int) -> RequestSettled:
        size, chain = lease.chain.root.block_size, lease.chain
        hits = {tier: blocks * size for tier, blocks in lease.hit_blocks(used).items()}
        misses: dict[MissCause, int] = {}
        if used < lease.blocks:
            misses[MissCause.STALE] = (lease.blocks - used) * size
        if lease.blocks < len(chain):
            # Who ends a lease while redis is still at it has given up waiting.
            cause = MissCause.TIMEOUT if lease.pending else lease.cause or MissCause.UNKNOWN
            misses[cause] = misses.get(cause, 0) + (len(chain) - lease.blocks) * size
        tail = chain.prompt_tokens - len(chain) * size
        if tail:
            misses[MissCause.TAIL] = tail
        asked: dict[TierName, int] = {}
        left = len(chain) * size
        for tier in self._parts.tiers.memory:
            asked[tier.name] = left
            left -= hits.get(tier.name, 0)
        if lease.asked_redis:
            asked[TierName.REDIS] = lease.asked_redis * size
        return RequestSettled(
            self._clock(),
            chain.namespace,
            chain.prompt_tokens,
            hits,
            misses,
            asked,
            chain.hashes,
            used,
            lease.hints,
        )


def _require_same(known: Lease, chain: Chain, shards: tuple[Shard, ...]) -> None:
    """LeaseError when a request id comes back with other blocks, ranks or knowledge of tokens."""
    same = known.chain.hashes == chain.hashes and known.chain.namespace == chain.namespace
    ours, theirs = known.chain.fingerprints, chain.fingerprints
    informed = theirs is None or (ours is not None and np.array_equal(ours, theirs))
    if not same or set(known.shards) != set(shards) or not informed:
        what = "another prompt" if not same else "other shards" if informed else "hashes without these tokens"
        raise LeaseError(
            f"request {known.request_id!r} already holds lease {known.id} on {what}; "
            "release it, or use another request id"
        )


def _shortest(runs: dict[Shard, LocalRun]) -> LocalRun:
    return min(runs.values(), key=lambda run: run.blocks)
