"""What the pieces of one store share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore.block import BlockRows, Shard, TierName
from kvstore.errors import NamespaceError
from kvstore.events import BlocksDropped, BlocksRemoved, BlocksStored, DropCause, EventBus, RemovalCause
from kvstore.failpoints import Failpoint, no_failpoint
from kvstore.index import Space
from kvstore.removal import Removed
from kvstore.store.absence import Absences, memory_for
from kvstore.store.copies import Copies
from kvstore.store.mailbox import Mailbox
from kvstore.store.options import Demotion, StoreOptions
from kvstore.tiers.base import Tier
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.null import NullTier

_FOR_ROOM = {RemovalCause.CAPACITY, RemovalCause.RECLAIMED}


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of a store. Without a device, the host is the fastest.

    ``remote`` is the tier below them that is asked and not owned: Redis, a sidecar in its place, or none.
    """

    host: HostTier
    device: MemoryTier | None = None
    remote: Tier = field(default_factory=lambda: NullTier(TierName.REDIS))

    @property
    def memory(self) -> tuple[MemoryTier, ...]:
        """Tiers in this process's reach, fastest first."""
        return (self.host,) if self.device is None else (self.device, self.host)

    @property
    def all(self) -> tuple[Tier, ...]:
        """Fastest first."""
        return (*self.memory, self.remote)


def absences_of(tiers: Tiers, options: StoreOptions) -> Absences:
    """What a store over these tiers can know of absent blocks, with what was there before it."""
    pool = tiers.host.pool
    inherited = {space.namespace for space in pool.spaces() if space.ready}
    return Absences(memory_for(pool.limit_bytes), options.ttl_seconds, inherited)


@dataclass(frozen=True, slots=True)
class Parts:
    """Tiers, times, threads, listeners and what is known of absent blocks, for each piece of the store."""

    tiers: Tiers
    options: StoreOptions
    clock: Callable[[], float]
    mailbox: Mailbox
    bus: EventBus
    absences: Absences
    copies: Copies
    failpoint: Failpoint = no_failpoint

    def space(self, tier: MemoryTier, namespace: bytes, shard: Shard) -> Space:
        """Where a registered namespace's blocks are in a tier."""
        space = tier.pool.space(namespace, shard)
        if space is None:
            raise NamespaceError(
                f"namespace {namespace.hex()} has no shard {shard} here; register it with that shard"
            )
        return space

    @property
    def demotes(self) -> Demotion | None:
        """When blocks of the host tier go to redis; None where there is none."""
        return None if isinstance(self.tiers.remote, NullTier) else self.options.demotion

    def report_stored(self, tier: TierName, rows: BlockRows, payload_bytes: int) -> None:
        """Blocks became readable. Removals go first: what was evicted may be what has come back."""
        self.report_removed()
        self.bus.emit(
            BlocksStored(self.clock(), tier, rows.namespace, rows.shard, rows.hashes, payload_bytes)
        )

    def report_removed(self) -> None:
        """Turn what the pools have given up into events; called after whatever may evict."""
        for tier in self.tiers.memory:
            if tier.pool.removed:
                now = self.clock()
                for gone in tier.pool.removed:
                    space = gone.space
                    self.bus.emit(
                        BlocksRemoved(
                            now,
                            tier.name,
                            space.namespace,
                            space.shard,
                            gone.hashes,
                            gone.cause,
                            space.payload_bytes,
                            now - gone.history.stored_at,
                            now - gone.history.used_at,
                            int((gone.history.reads == 0).sum()),
                        )
                    )
                    if tier is self.tiers.host:
                        self._left_host(gone, now)
                tier.pool.removed.clear()

    def _left_host(self, gone: Removed, now: float) -> None:
        """What redis was to get when it leaves, and left before it could be copied, is lost, and counted."""
        lost = int(np.count_nonzero(self.copies.lacking(gone.slots, now)))
        self.copies.forget(gone.slots)
        if lost and not gone.whole and self.demotes is Demotion.ON_EVICT and gone.cause in _FOR_ROOM:
            namespace = gone.space.namespace
            self.bus.emit(BlocksDropped(now, self.tiers.remote.name, namespace, lost, DropCause.QUEUE))
