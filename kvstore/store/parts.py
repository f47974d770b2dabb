"""What the pieces of one store share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.block import BlockRows, Shard, TierName
from kvstore.errors import NamespaceError
from kvstore.events import BlocksRemoved, BlocksStored, EventBus
from kvstore.failpoints import Failpoint, no_failpoint
from kvstore.index import Space
from kvstore.store.mailbox import Mailbox
from kvstore.store.options import StoreOptions
from kvstore.tiers.base import Tier
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.null import NullTier


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of a store. Without a device, the host is the fastest; redis may be absent."""

    host: HostTier
    device: MemoryTier | None = None
    redis: Tier = field(default_factory=lambda: NullTier(TierName.REDIS))

    @property
    def memory(self) -> tuple[MemoryTier, ...]:
        """Tiers in this process's reach, fastest first."""
        return (self.host,) if self.device is None else (self.device, self.host)


@dataclass(frozen=True, slots=True)
class Parts:
    """Tiers, times, threads and listeners, handed to each piece of the store."""

    tiers: Tiers
    options: StoreOptions
    clock: Callable[[], float]
    mailbox: Mailbox
    bus: EventBus
    failpoint: Failpoint = no_failpoint

    def space(self, tier: MemoryTier, namespace: bytes, shard: Shard) -> Space:
        """Where a registered namespace's blocks are in a tier."""
        space = tier.pool.space(namespace, shard)
        if space is None:
            raise NamespaceError(
                f"namespace {namespace.hex()} has no shard {shard} here; register it with that shard"
            )
        return space

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
                tier.pool.removed.clear()
