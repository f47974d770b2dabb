"""Leases over tiers: match and pin in one step, renew, settle once."""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from kvstore.block import HASH_BYTES, Chain, MissCause, Shard, SlotArray, TierName
from kvstore.errors import LeaseError
from kvstore.events import RequestSettled
from kvstore.hints import Hints, checked
from kvstore.lease import Lease, LeaseTable, Segment, Terms
from kvstore.store.first_read import first_reads, learn_from_reader
from kvstore.store.local import LocalRun, credit, cut, local_run, slots_in
from kvstore.store.parts import Parts
from kvstore.store.policies import tell_hints, tell_of_request
from kvstore.tiers.memory import MemoryTier

_ABSENT = (None, MissCause.COLD, MissCause.UNKNOWN)
"""What tiers say of blocks that they just do not have."""


class Holding:
    """Every lease of one store, and the pins that belong to them."""

    def __init__(self, parts: Parts, told: Callable[[Lease], None]) -> None:
        """``told`` is called once for each request that counts, after the policies have heard of it."""
        self._parts = parts
        self._told = told
        self._clock = parts.clock
        self._tier: dict[TierName, MemoryTier] = {tier.name: tier for tier in parts.tiers.memory}
        self.leases = LeaseTable()

    def open(
        self,
        request: tuple[str, str],
        chain: Chain,
        shards: tuple[Shard, ...],
        terms: Terms,
    ) -> Lease:
        """A lease on the chain's local run from its first block on.

        To ask again for what is held already renews it. LeaseError if the request has another chain or
        first block, or a first block beyond the chain; HintsError.
        """
        known = self.leases.by_request(*request)
        if known is not None:
            _require_same(known, chain, shards, terms.first_block)
            self.renew(known)
            return known
        if not 0 <= terms.first_block <= len(chain):
            raise LeaseError(
                f"first_block is {terms.first_block}, but the chain has {len(chain)} blocks; expected "
                f"0 … {len(chain)}"
            )
        checked(terms.hints)
        deadline = self._clock() + self._parts.options.lease_seconds
        lease = self.leases.open(request, chain, shards, deadline, terms)
        self.extend(lease)
        return lease

    def extend(self, lease: Lease, fetched: Container[int] = ()) -> None:
        """Pin what is resident past the lease's end; ``fetched`` host slots came from redis."""
        if lease.over or lease.complete:
            return
        memory, chain = self._parts.tiers.memory, lease.chain
        runs = {shard: local_run(memory, chain.rows(shard, lease.end)) for shard in lease.shards}
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
            segments = cut(run.segments, lease.first_block + blocks)
            if fetched:
                segments = credit(segments, fetched, self._parts.tiers.remote.name)
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

    def release(
        self,
        lease: Lease,
        used_blocks: int | None = None,
        compared_blocks: int = 0,
        hints: Hints | None = None,
    ) -> None:
        """Unpin and count the request, once. Idempotent.

        ``used_blocks`` is how much of the run the reader found valid and used (None: all of it),
        ``compared_blocks`` how much it compared with its checksums, where readers do that. ``hints``
        replace what the request said before.
        """
        if lease.over:
            return
        if hints is not None:
            lease.hints = checked(hints)
        known = lease.seen
        self.tell_policies(lease)
        if hints is not None and (known or not lease.counted):
            for shard in lease.shards:
                tell_hints(self._parts, lease.chain.rows(shard), hints)
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
        self._explain(lease)
        tell_of_request(self._parts, lease)
        self._told(lease)

    def _explain(self, lease: Lease) -> None:
        """Find out why no tier has the rest, before the request itself stores it."""
        if lease.complete or lease.pending or lease.cause not in _ABSENT:
            return
        chain = lease.chain
        rest, asked_redis = chain.hashes[lease.end * HASH_BYTES :], bool(lease.asked_redis)
        found = self._parts.absences.missing(chain.namespace, rest, self._clock(), asked_redis=asked_redis)
        lease.cause, lease.absent = found

    def _settled(self, lease: Lease, used: int) -> RequestSettled:
        size, chain = lease.chain.root.block_size, lease.chain
        hits = {tier: blocks * size for tier, blocks in lease.hit_blocks(used).items()}
        misses: dict[MissCause, int] = {}
        if used < lease.blocks:
            misses[MissCause.STALE] = (lease.blocks - used) * size
        for cause, blocks in _missing(lease).items():
            misses[cause] = misses.get(cause, 0) + blocks * size
        tail = chain.prompt_tokens - len(chain) * size
        if tail:
            misses[MissCause.TAIL] = tail
        asked: dict[TierName, int] = {}
        own = lease.first_block * size
        left = len(chain) * size - own
        for tier in self._parts.tiers.memory:
            asked[tier.name] = left
            left -= hits.get(tier.name, 0)
        if lease.asked_redis:
            asked[self._parts.tiers.remote.name] = lease.asked_redis * size
        return RequestSettled(
            self._clock(),
            chain.namespace,
            chain.prompt_tokens - own,
            hits,
            misses,
            asked,
            chain.hashes,
            used,
            lease.hints,
            lease.first_block,
        )


def _missing(lease: Lease) -> dict[MissCause, int]:
    """Blocks behind the promised run, by cause."""
    misses = dict(lease.absent)
    others = len(lease.chain) - lease.end - sum(misses.values())
    if others:
        # Who ends a lease while redis is still at it has given up waiting.
        cause = MissCause.TIMEOUT if lease.pending else lease.cause or MissCause.UNKNOWN
        misses[cause] = misses.get(cause, 0) + others
    return misses


def _require_same(known: Lease, chain: Chain, shards: tuple[Shard, ...], first_block: int) -> None:
    """LeaseError when a request id comes back with other blocks, ranks or knowledge of tokens."""
    same = known.chain.hashes == chain.hashes and known.chain.namespace == chain.namespace
    ours, theirs = known.chain.fingerprints, chain.fingerprints
    informed = theirs is None or (ours is not None and np.array_equal(ours, theirs))
    what = ""
    if not same:
        what = "another prompt"
    elif set(known.shards) != set(shards):
        what = "other shards"
    elif not informed:
        what = "hashes without these tokens"
    elif known.first_block != first_block:
        what = f"the blocks from {known.first_block} on, not from {first_block}"
    if what:
        raise LeaseError(
            f"request {known.request_id!r} already holds lease {known.id} on {what}; "
            "release it, or use another request id"
        )


def _shortest(runs: dict[Shard, LocalRun]) -> LocalRun:
    return min(runs.values(), key=lambda run: run.blocks)
