"""Leases: pins with an owner, an id and a deadline."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.block import Chain, MissCause, Shard, SlotArray, TierName
from kvstore.errors import LeaseError
from kvstore.hints import NO_HINTS, Hints


class Terms(NamedTuple):
    """How a request asks for a prompt.

    The caller has the blocks before ``first_block`` itself: they are neither looked for nor promoted,
    leased or counted. ``counted`` is False for what is no request, or was counted before: it is not in
    the hit rate, and policies do not hear of it. ``waits`` is False where nobody waits for the blocks.
    """

    first_block: int = 0
    hints: Hints = NO_HINTS
    counted: bool = True
    waits: bool = True


class Segment(NamedTuple):
    """Blocks ``start`` … of a chain, in one tier; ``source`` is the tier that they came from."""

    tier: TierName
    start: int
    slots: SlotArray
    source: TierName

    @property
    def stop(self) -> int:
        return self.start + len(self.slots)


@dataclass(slots=True, eq=False)
class Lease:
    """What one request was promised: ``blocks`` blocks from ``first_block`` on, readable until ``deadline``.

    ``segments`` tell, by shard, where the promised blocks are, in chain order and without gaps.
    ``held`` is what the lease pins beside them. ``pending`` counts promotions that may yet make
    the run longer; ``cause`` says why it ends where it does. ``asked_redis`` is how many blocks
    redis was asked for, ``asked_at`` the block at which the run ended when it was last asked, and
    ``broke`` where and why the first of the promotions since then came to an end. ``seen`` says that
    the policies were told of the request; ``absent`` how many blocks no tier had then, by cause.
    ``hints`` are the last that were said of it. ``waiters`` are called once, when nothing is pending any
    more or the lease is over.
    """

    id: int
    owner: str
    request_id: str
    chain: Chain
    shards: tuple[Shard, ...]
    deadline: float
    first_block: int = 0
    hints: Hints = NO_HINTS
    counted: bool = True
    waits: bool = True
    blocks: int = 0
    pending: int = 0
    cause: MissCause | None = None
    over: bool = False
    asked_redis: int = 0
    asked_at: int = 0
    broke: tuple[int, MissCause] | None = None
    seen: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)
    segments: dict[Shard, list[Segment]] = field(default_factory=dict)
    held: list[tuple[TierName, SlotArray]] = field(default_factory=list)
    absent: dict[MissCause, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The block of the chain at which the promised run ends."""
        return self.first_block + self.blocks

    @property
    def complete(self) -> bool:
        """Whether the run is all that was asked for."""
        return self.end == len(self.chain)

    @property
    def tokens(self) -> int:
        """Tokens of the promised run."""
        return self.blocks * self.chain.root.block_size

    def wake(self) -> None:
        """Call those who wait."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()

    def pinned(self) -> Iterator[tuple[TierName, SlotArray]]:
        """Every pin that belongs to the lease, once."""
        for segments in self.segments.values():
            for segment in segments:
                yield segment.tier, segment.slots
        yield from self.held

    def hit_blocks(self, used: int) -> dict[TierName, int]:
        """The first ``used`` blocks of the run by the tier that they came from (of the first shard)."""
        hits: dict[TierName, int] = {}
        stop = self.first_block + used
        for segment in self.segments.get(self.shards[0], ()):
            count = min(segment.stop, stop) - segment.start
            if count > 0:
                hits[segment.source] = hits.get(segment.source, 0) + count
        return hits


class LeaseTable:
    """All leases that are not over, by id, by request and by deadline. Reads no clock."""

    def __init__(self) -> None:
        self._by_id: dict[int, Lease] = {}
        self._by_request: dict[tuple[str, str], Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next_id = 1
        self._held: Counter[str] = Counter()
        self._chain_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_id.values())

    def open(
        self,
        request: tuple[str, str],
        chain: Chain,
        shards: tuple[Shard, ...],
        deadline: float,
        terms: Terms,
    ) -> Lease:
        """A new, empty lease for ``request`` = (owner, request id)."""
        owner, request_id = request
        lease = Lease(self._next_id, owner, request_id, chain, shards, deadline, *terms)
        self._next_id += 1
        self._by_id[lease.id] = lease
        self._by_request[request] = lease
        self._held[owner] += 1
        self._chain_bytes[owner] += chain.nbytes
        heapq.heappush(self._deadlines, (deadline, lease.id))
        return lease

    def by_request(self, owner: str, request_id: str) -> Lease | None:
        return self._by_request.get((owner, request_id))

    def held_by(self, owner: str) -> int:
        """How many live leases an owner has."""
        return self._held[owner]

    def chain_bytes_of(self, owner: str) -> int:
        """Bytes of the prompts that an owner's live leases keep."""
        return self._chain_bytes[owner]

    def find(self, lease_id: int, owner: str) -> Lease | None:
        """The live lease with this id, if it is that owner's."""
        lease = self._by_id.get(lease_id)
        return lease if lease is not None and lease.owner == owner else None

    def get(self, lease_id: int, owner: str) -> Lease:
        """The live lease with this id; LeaseError when it is over or somebody else's."""
        lease = self.find(lease_id, owner)
        if lease is None:
            raise LeaseError(f"lease {lease_id} is not held by {owner!r}; it may have run out: acquire again")
        return lease

    def renew(self, lease: Lease, deadline: float) -> None:
        """Move a live lease's deadline out."""
        assert not lease.over
        # Its one entry in the heap is moved when it comes up.
        lease.deadline = deadline

    def close(self, lease: Lease) -> None:
        """Forget a lease; what it holds is the caller's to unpin."""
        lease.over = True
        del self._by_id[lease.id]
        del self._by_request[lease.owner, lease.request_id]
        self._held[lease.owner] -= 1
        self._chain_bytes[lease.owner] -= lease.chain.nbytes
        if not self._held[lease.owner]:
            del self._held[lease.owner], self._chain_bytes[lease.owner]

    def overdue(self, now: float) -> list[Lease]:
        """Live leases whose deadline has passed."""
        late: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._by_id.get(lease_id)
            if lease is None:
                continue
            if lease.deadline > now:
                heapq.heappush(self._deadlines, (lease.deadline, lease_id))
            else:
                late.append(lease)
        return late
