"""The store: match and pin in one step, write in two, promote and demote. Policy, no bytes.

Synchronous, with one owner and no locks: whoever calls it, calls it from one thread. Work that
blocks runs on threads and comes back through ``pump``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from kvstore.block import WHOLE, BlockRows, Chain, Shard, SlotArray, TierName
from kvstore.errors import LeaseError
from kvstore.events import BytesMoved, EventBus, Listener, TokensProbed
from kvstore.failpoints import Failpoint, no_failpoint
from kvstore.hints import NO_HINTS, Hints
from kvstore.integrity import check_pool
from kvstore.lease import Lease, LeaseTable, Terms
from kvstore.pool import PoolUsage
from kvstore.spec import NamespaceSpec
from kvstore.store.copies import Copies
from kvstore.store.demotion import Demotions
from kvstore.store.holding import Holding
from kvstore.store.idle import IdleBlocks
from kvstore.store.inherited import Inherited
from kvstore.store.inventory import clear, resident
from kvstore.store.mailbox import Mailbox
from kvstore.store.options import StoreOptions
from kvstore.store.parts import Parts, Tiers, absences_of
from kvstore.store.pins import PinnedRun, Pins
from kvstore.store.probe import Explanation, Lookup, Probe, present_in
from kvstore.store.promotion import promote
from kvstore.store.registry import Registry
from kvstore.store.remote import Remote
from kvstore.store.write import Write
from kvstore.store.writes import Writes
from kvstore.tiers.base import TierStatus
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.null import NullTier

_DEFAULTS = StoreOptions()


class TieredStore:
    """Blocks in memory tiers that it owns and a remote tier that it asks."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        clock: Callable[[], float],
        options: StoreOptions = _DEFAULTS,
        listeners: tuple[Listener, ...] = (),
        wake: Callable[[], None] | None = None,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """``wake`` is called from other threads when ``pump`` has something to do."""
        mailbox = Mailbox(options.threads, wake)
        absences = absences_of(tiers, options)
        bus = EventBus((absences, *listeners))
        self._clock, copies = clock, Copies(options.ttl_seconds)
        self._parts = Parts(tiers, options, clock, mailbox, bus, absences, copies, failpoint)
        self._registry = Registry(self._parts)
        self._demotions = Demotions(self._parts)
        self._holding = Holding(self._parts, self._demotions.used)
        self._remote = Remote(self._parts, self._holding)
        self._writes = Writes(self._parts, self._demotions)
        self._pins = Pins(self._parts)
        self._inherited = Inherited(self._parts)
        self._idle = IdleBlocks(self._parts)

    @property
    def host(self) -> HostTier:
        return self._parts.tiers.host

    @property
    def memory(self) -> tuple[MemoryTier, ...]:
        """The tiers in this process's reach, fastest first."""
        return self._parts.tiers.memory

    @property
    def options(self) -> StoreOptions:
        return self._parts.options

    def register(self, spec: NamespaceSpec, shards: tuple[Shard, ...] = (WHOLE,), *, group: int = 0) -> None:
        """Make a namespace known, with the size of its blocks on each shard.

        ``group`` says whose blocks they are, for pools that guarantee somebody a share.
        """
        self._registry.register(spec, shards, group)

    def lookup(
        self,
        chain: Chain,
        shards: tuple[Shard, ...] = (WHOLE,),
        *,
        tiers: Collection[TierName] | None = None,
    ) -> Lookup:
        """Where a prompt's blocks are, on all ranks. Changes nothing, counts no hit.

        ``tiers`` None asks all of them. Redis is asked on the caller's thread, for at most
        ``probe_seconds``; its part of the run is unverified.
        """
        probe = self._probe(chain, shards, tiers)
        deadline = self._clock() + self._parts.options.probe_seconds
        return probe.answer(probe.ask(deadline) if probe.asks_redis else None)

    def begin_lookup(
        self,
        chain: Chain,
        shards: tuple[Shard, ...],
        tiers: Collection[TierName] | None,
        then: Callable[[Lookup], None],
    ) -> None:
        """``lookup`` for an owner that must not block: ``then`` is called at once, or in a later ``pump``."""
        probe = self._probe(chain, shards, tiers)
        if not probe.asks_redis:
            then(probe.answer(None))
            return
        deadline = self._clock() + self._parts.options.probe_seconds  # the time that it waits counts
        self._parts.mailbox.ask(lambda: probe.ask(deadline), lambda redis: then(probe.answer(redis)))

    def begin_explain(self, chain: Chain, shard: Shard, then: Callable[[Explanation], None]) -> None:
        """Block by block, where it is or why it is not; ``then`` as in ``begin_lookup``."""
        self._registry.require(chain, (shard,))
        rows, redis = chain.rows(shard), self._parts.tiers.remote
        if isinstance(redis, NullTier) or not len(rows):
            then(Explanation(self._parts, rows, None))
            return
        deadline = self._clock() + self._parts.options.probe_seconds * 2
        self._parts.mailbox.ask(
            lambda: present_in(redis, rows, self._clock, deadline),
            lambda known: then(Explanation(self._parts, rows, known or [None] * len(rows))),
        )

    def acquire(
        self,
        request_id: str,
        chain: Chain,
        shards: tuple[Shard, ...] = (WHOLE,),
        *,
        owner: str = "",
        first_block: int = 0,
        hints: Hints = NO_HINTS,
    ) -> Lease:
        """Pin the run that is resident from ``first_block`` on, and begin to promote the rest from redis.

        The caller has the blocks before ``first_block`` itself: they are neither looked for nor
        promoted, leased or counted. Idempotent: the same request gets the same lease, with its
        progress, and renews it. ``wait`` for the part that is ``pending``. The lease ends by
        ``release``, or when nobody renews it; who then acquires again gets what is still there.
        """
        return self._acquire((owner, request_id), chain, shards, Terms(first_block, hints))

    def acquire_uncounted(
        self,
        request: tuple[str, str],
        chain: Chain,
        shards: tuple[Shard, ...] = (WHOLE,),
        *,
        first_block: int = 0,
        waits: bool = True,
    ) -> Lease:
        """``acquire`` by (owner, request id) for a request that was counted before, or is none.

        It is not in the hit rate, and policies do not hear of it. Where nobody ``waits`` for the blocks,
        as in a prefetch, they are brought however long that takes.
        """
        return self._acquire(request, chain, shards, Terms(first_block, counted=False, waits=waits))

    def wait(self, lease: Lease, seconds: float) -> None:
        """Work until nothing is pending for the lease, for at most ``seconds``."""
        deadline = self._clock() + seconds
        while lease.pending and not self.idle and (left := deadline - self._clock()) > 0:
            self.pump(left)

    def promote(self, lease: Lease, shard: Shard = WHOLE) -> int:
        """Copy the promised blocks to the fastest tier; the blocks of the run that are there now.

        When that tier is full of leases the run is cut to what fits. LeaseError when it is over.
        """
        self._holding.require_live(lease)
        if shard not in lease.shards:
            raise LeaseError(
                f"lease {lease.id} is on shards {', '.join(map(str, lease.shards))}, not on {shard}; "
                "acquire with every shard that is read"
            )
        blocks = promote(self._parts, self._holding, lease, shard)
        self._parts.report_removed()
        return blocks

    def renew(self, lease: Lease) -> None:
        """Keep a lease for another ``lease_seconds``; LeaseError when it is over."""
        self._holding.renew(lease)

    def release(
        self,
        lease: Lease,
        used_blocks: int | None = None,
        compared_blocks: int = 0,
        hints: Hints | None = None,
    ) -> None:
        """End a lease and count its request. Idempotent.

        ``used_blocks`` is how much of the run was valid and used (None: all), ``compared_blocks`` how
        much a reader of its own memory compared with its checksums (``StoreOptions.readers_verify``).
        ``hints`` replace those of the acquire; HintsError where one is out of range.
        """
        self._holding.release(lease, used_blocks, compared_blocks, hints)

    def write(self, chain: Chain, shard: Shard = WHOLE, *, first_block: int = 0, writer: int = 0) -> Write:
        """Begin a two-phase write of blocks ``first_block`` … of a prompt into the host tier.

        ``writer`` is the number of the client that fills the slots, where that is another process.
        """
        self._registry.require(chain, (shard,))
        self.tick()
        write = self._writes.begin(chain, shard, first_block, writer)
        self._parts.report_removed()
        return write

    def reserve(self, namespace: bytes, count: int, shard: Shard = WHOLE) -> SlotArray:
        """Up to ``count`` unnamed slots in the fastest tier, for a model to compute into.

        They stay the caller's until they are published or given back; there is no deadline, since
        the caller is the store's own thread.
        """
        slots = self._writes.reserve(namespace, shard, count)
        self._parts.report_removed()
        return slots

    def offsets(self, slots: SlotArray) -> NDArray[np.int64]:
        """Byte offset of each slot in the fastest tier's memory."""
        return self._parts.tiers.memory[0].pool.extents.offsets(slots)

    def room(self, namespace: bytes, shard: Shard = WHOLE) -> int:
        """Blocks of a namespace that the fastest tier can hold when it holds nothing else."""
        pool = self._parts.tiers.memory[0].pool
        space = pool.space(namespace, shard)
        return 0 if space is None else pool.extents.most_slots(space.slot_class)

    def publish(self, lease: Lease, rows: BlockRows, slots: SlotArray) -> SlotArray:
        """Make computed blocks readable under the identities ``rows``; ``lease`` holds them too.

        Returned are the slots that did not become visible, because somebody else had those blocks
        already: they stay the caller's. LeaseError when the lease is over, and nothing is visible.
        """
        self._holding.require_live(lease)
        fresh = self._writes.publish(rows, slots)
        if len(fresh):
            self._holding.pin(lease, self._parts.tiers.memory[0].name, fresh)
        return slots[~np.isin(slots, fresh)]

    def unreserve(self, slots: SlotArray) -> None:
        """Give reserved slots back unpublished."""
        self._parts.tiers.memory[0].pool.abort(slots)

    def when_settled(self, lease: Lease, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing is pending for the lease, or it is over; at once if that is so."""
        if lease.over or not lease.pending:
            then()
        else:
            lease.waiters.append(then)

    def pin(self, name: str, chain: Chain, shards: tuple[Shard, ...] = (WHOLE,)) -> int:
        """Keep the leading run that is in memory, under a name, until ``unpin``; its blocks."""
        self._registry.require(chain, shards)
        return self._pins.pin(name, chain, shards)

    def pins(self) -> list[PinnedRun]:
        """What is kept under names."""
        return self._pins.all()

    def unpin(self, name: str) -> bool:
        """Let go of what a name keeps; False when it keeps nothing."""
        return self._pins.unpin(name)

    def clear(self, namespace: bytes | None, tiers: Collection[TierName] | None = None) -> tuple[int, int]:
        """Forget what nobody holds in memory, of one namespace or all: (forgotten, held) blocks."""
        return clear(self._parts, namespace, tiers)

    def resident(self, namespace: bytes) -> dict[TierName, tuple[int, int]]:
        """(Blocks, their payload bytes) of a namespace in each memory tier, all ranks together."""
        return resident(self._parts, namespace)

    def reap(self, alive: Callable[[int], bool]) -> None:
        """Give back what an earlier store's writers left, once they have ended: ``alive(number)`` says."""
        self._inherited.reap(alive)

    def pump(self, timeout: float = 0.0) -> None:
        """Collect what threads have done, waiting up to ``timeout`` for it, and give them more.

        What is overdue ends, as with ``tick``.
        """
        self.tick()
        self._idle.expire()
        self._demotions.make_room()
        self._demotions.step()
        self._parts.mailbox.collect(timeout)
        self._demotions.step()
        self._parts.report_removed()

    def offer(self, chain: Chain, first_block: int, shard: Shard = WHOLE) -> None:
        """Queue the host tier's blocks once more for the tier below, which lost them or never got them."""
        self._demotions.offer_again(chain.rows(shard, first_block))

    def tick(self) -> None:
        """End what is overdue: leases, and the writes of writers that went silent.

        ``acquire``, ``write`` and ``pump`` do it too; who calls none of them calls this.
        """
        self._holding.expire()
        self._writes.expire()
        self._inherited.expire()

    def drain(self, seconds: float) -> bool:
        """Work until lower tiers have all that was queued for them; False when time ran out."""
        deadline = self._clock() + seconds
        self.pump()
        while not self._demotions.idle and (left := deadline - self._clock()) > 0:
            self.pump(left)
        return self._demotions.idle

    def report_moved(self, source: TierName | None, target: TierName | None, size: int, began: float) -> None:
        """Payload bytes went between the host tier and a caller (None) of this store's owner."""
        now = self._clock()
        self._parts.bus.emit(BytesMoved(now, source, target, size, now - began))

    def usage(self) -> dict[TierName, PoolUsage]:
        return {tier.name: tier.pool.usage() for tier in self.memory}

    def status(self) -> dict[TierName, TierStatus]:
        return {tier.name: tier.status() for tier in self._parts.tiers.all}

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way between tiers."""
        return self._demotions.idle and not self._parts.mailbox.pending

    @property
    def leases(self) -> int:
        """Leases that are not over."""
        return len(self._holding.leases)

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait for a lower tier."""
        return self._demotions.queued_bytes

    @property
    def listener_failures(self) -> int:
        """How often a listener raised."""
        return self._parts.bus.failures

    @property
    def writes(self) -> int:
        """Writes that are neither committed nor aborted."""
        return len(self._writes)

    @property
    def lease_table(self) -> LeaseTable:
        """Leases that are not over, to be looked at only."""
        return self._holding.leases

    def check(self) -> None:
        """AssertionError when the books of a pool do not balance. For tests and when idle."""
        for tier in self._parts.tiers.memory:
            pins = [self._holding.pins(tier.name), self._pins.pins(tier.name)]
            pins += self._demotions.pins(tier.name)
            if tier is self._parts.tiers.host:
                pins += [*self._remote.pins(), self._inherited.pins()]
            check_pool(tier.pool, np.concatenate(pins))

    def close(self) -> None:
        """Let running transfers end and close every tier. What is queued is lost."""
        self._parts.mailbox.close()
        for tier in self._parts.tiers.all:
            tier.close()

    def _probe(self, chain: Chain, shards: tuple[Shard, ...], tiers: Collection[TierName] | None) -> Probe:
        self._registry.require(chain, shards)
        probe = Probe(self._parts, chain, shards, tiers)
        self._parts.bus.emit(TokensProbed(self._clock(), chain.namespace, chain.prompt_tokens))
        return probe

    def _acquire(
        self, request: tuple[str, str], chain: Chain, shards: tuple[Shard, ...], terms: Terms
    ) -> Lease:
        self._registry.require(chain, shards)
        self.tick()
        known = len(self._holding.leases)
        lease = self._holding.open(request, chain, shards, terms)
        if len(self._holding.leases) > known and not lease.complete:
            self._remote.ask(lease)
        if not lease.pending:
            self._holding.tell_policies(lease)
        return lease
