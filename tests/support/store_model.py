"""A store beside a model of what it may answer; each operation checks its own answer.

Every payload is a function of its block's identity, so whatever is leased can be checked byte by
byte; every event is checked against what the pools hold. Calls to the remote tier wait until they
are let through, one by one, so that all that may happen between a request and its answer does
happen, and happens again when it is replayed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from kvstore.block import WHOLE, BlockRows, Chain, Shard, SlotArray, TierName
from kvstore.errors import LeaseError, WriteError
from kvstore.events import BlocksRemoved, BlocksStored, RequestSettled
from kvstore.lease import Lease
from kvstore.store import BlockStatus, Demotion, StoreOptions, Write
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import MemoryTier
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import FaultyTier, HeldTier
from tests.support.stores import (
    SPLIT,
    FakeClock,
    Rig,
    RigOptions,
    fill,
    make_chain,
    make_rig,
    make_spec,
    payload_of,
)

LEASE_SECONDS = 30.0
WRITE_SECONDS = 20.0
SHARDS: dict[str, tuple[Shard, ...]] = {"small": (WHOLE,), "large": (WHOLE,), "divided": SPLIT}
SPECS = {
    "small": make_spec("small", block_size=4, payload_bytes=448),
    "large": make_spec("large", block_size=8, payload_bytes=1000),
    "divided": make_spec("divided", block_size=4, payload_bytes=448),
}
_STRANGERS = "\u4e00"
_MODES = (
    Demotion.WRITE_THROUGH,
    Demotion.ON_EVICT,
    Demotion.WRITE_THROUGH,
    Demotion.ON_REUSE,
    Demotion.WRITE_THROUGH,
)
"""By seed. Where less is copied to redis there is less to promote, so most have it all."""

Identity = tuple[bytes, str, bytes, int]


def identities(rows: BlockRows) -> list[Identity]:
    """Names of blocks that do not collide."""
    assert rows.fingerprints is not None
    return [
        (rows.namespace, str(rows.shard), rows.hash_at(block), int(rows.fingerprints[block]))
        for block in range(len(rows))
    ]


def model_of(chain: Chain) -> str:
    return next(model for model, spec in SPECS.items() if spec.root.digest == chain.namespace)


@dataclass
class Place:
    """A slot as a lease named it: what it held, and by what a reader notices that it changed hands."""

    tier: MemoryTier
    slot: int
    generation: int
    extent_generation: int
    payload: Payload

    @classmethod
    def now(cls, tier: MemoryTier, slot: int, payload: Payload) -> Place:
        extent = tier.pool.extents.containing(slot)
        generation = int(extent.table.generation[slot - extent.base])
        assert generation % 2 == 0, "a leased block is not readable"
        return cls(tier, slot, generation, extent.generation, payload)

    def is_unchanged(self) -> bool:
        extent = self.tier.pool.extents.containing(self.slot)
        row = self.slot - extent.base
        if extent.generation != self.extent_generation or not 0 <= row < extent.rows:
            return False
        return int(extent.table.generation[row]) == self.generation

    def holds_its_payload(self) -> bool:
        target = np.empty(len(self.payload), dtype=np.uint8)
        self.tier.read_slot(self.slot, target)
        return bool((target == self.payload).all())


@dataclass
class Request:
    """A live lease and what it published."""

    lease: Lease
    published: list[Place] = field(default_factory=list)


class StoreModel:
    """Device, host and remote tier, two slot sizes and two ranks, in pools of a few blocks each.

    Hashes are those of ``make_chain(colliding=True)``: a capital collides with its small letter.
    """

    def __init__(self, seed: int) -> None:
        self.clock = FakeClock()
        self.remote = DictTier()
        self.faulty = FaultyTier(self.remote, seed, {})
        self.network = HeldTier(self.faulty)
        self.requests: list[Request] = []
        self.writes: list[Write] = []
        self.reserved: list[int] = []
        self.asked = 0
        self._written: set[Identity] = set()
        self._left_behind: list[Place] = []
        self._resident: dict[TierName, set[tuple[bytes, Shard, bytes]]] = {
            TierName.DEVICE: set(),
            TierName.HOST: set(),
        }
        self._heard = 0
        self._strangers = count(ord(_STRANGERS))
        self._stack = contextlib.ExitStack()
        self.mode = _MODES[seed % len(_MODES)]
        times = StoreOptions(
            lease_seconds=LEASE_SECONDS,
            write_seconds=WRITE_SECONDS,
            batch_bytes=1400,
            threads=1,
            demotion=self.mode,
        )
        self.rig: Rig = self._stack.enter_context(
            make_rig(
                self.clock,
                [(spec, SHARDS[model]) for model, spec in SPECS.items()],
                RigOptions(4, 3, 8192, redis=self.network, store=times),
            )
        )
        self.store = self.rig.store

    # -- requests ---------------------------------------------------------------------------------

    def acquire(self, chain: Chain, first_block: int = 0) -> None:
        shards, first_block = SHARDS[model_of(chain)], min(first_block, len(chain))
        expected = min(self._run(chain, shard, first_block) for shard in shards)
        probed = {
            self.store.lookup(chain, (shard,), tiers={TierName.DEVICE, TierName.HOST}).matched
            for shard in shards
        }
        lease = self.store.acquire(f"request {self.asked}", chain, shards, first_block=first_block)
        self.asked += 1
        assert lease.blocks == expected
        assert first_block or expected == min(probed) // chain.root.block_size
        assert self.store.acquire(lease.request_id, chain, shards, first_block=first_block) is lease
        self.requests.append(Request(lease))

    def renew(self, request: Request) -> None:
        self.store.renew(request.lease)
        assert request.lease.deadline == self.clock() + LEASE_SECONDS

    def release(self, request: Request, used_blocks: int | None) -> None:
        self.requests.remove(request)
        self._leave_behind(request)
        self.store.release(request.lease, used_blocks)
        self.store.release(request.lease, used_blocks)
        with pytest.raises(LeaseError):
            self.store.promote(request.lease)

    def promote(self, request: Request, rank: int) -> None:
        lease = request.lease
        shard = lease.shards[rank % len(lease.shards)]
        before = lease.blocks
        assert self.store.promote(lease, shard) == lease.blocks <= before
        assert all(segment.tier is TierName.DEVICE for segment in lease.segments.get(shard, []))

    def compute(self, request: Request, most: int) -> None:
        """What a model does: it computes what follows its lease, straight in the device tier."""
        lease = request.lease
        shard, size = lease.shards[0], SPECS[model_of(lease.chain)].payload_bytes_on()
        room = self.store.reserve(lease.chain.namespace, min(most, len(lease.chain) - lease.end), shard)
        rows = lease.chain.rows(shard, lease.end, lease.end + len(room))
        for block, slot in enumerate(room.tolist()):
            self.rig.top.write_slot(slot, payload_of(rows, block, size))
        kept = set(self.store.publish(lease, rows, room).tolist())
        for block, (slot, identity) in enumerate(zip(room.tolist(), identities(rows), strict=True)):
            if slot not in kept:
                self._written.add(identity)
                request.published.append(Place.now(self.rig.top, slot, payload_of(rows, block, size)))
        self.reserved.extend(kept)

    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        over = [request for request in self.requests if request.lease.deadline <= self.clock()]
        for request in over:
            self._leave_behind(request)
        self.store.tick()
        assert all(request.lease.over for request in over)
        self.requests = [request for request in self.requests if not request.lease.over]
        assert all(write.quarantined == (write.deadline < self.clock()) for write in self.writes)

    # -- writes -----------------------------------------------------------------------------------

    def put(self, chain: Chain) -> None:
        """Write a prompt in one go, for all ranks, as far as there is room."""
        for shard in SHARDS[model_of(chain)]:
            with self.store.write(chain, shard) as write:
                fill(write)
            self._written.update(identities(write.rows.pick(write.positions)))

    def flood(self, model: str) -> None:
        """Others press the older prompts out: three are written, and one needs room to compute in."""
        spec = SPECS[model]
        for _ in range(3):
            self.put(make_chain(spec, chr(next(self._strangers)) + "abab", colliding=True))
        self.store.unreserve(self.store.reserve(spec.root.digest, 12))

    def begin_write(self, chain: Chain, rank: int, first_block: int) -> None:
        shards = SHARDS[model_of(chain)]
        shard, first_block = shards[rank % len(shards)], min(first_block, len(chain))
        rows = chain.rows(shard, first_block)
        resident = [self._has(self.rig.host, rows, block) for block in range(len(rows))]
        write = self.store.write(chain, shard, first_block=first_block)
        for status, is_here in zip(write.status, resident, strict=True):
            assert status is not BlockStatus.PRESENT or is_here, "told of a block that is not there"
            assert status is not BlockStatus.YOURS or not is_here, "told to write what is there"
        self.writes.append(write)

    def scribble(self, write: Write) -> None:
        """A writer may write to its slots for as long as it has not said that it is done."""
        for payload in write.payloads:
            payload[:] = 0xA5

    def end_write(self, write: Write, how: str) -> None:
        self.writes.remove(write)
        fill(write)
        if how == "abort":
            write.abort()
            write.abort()
        elif how == "raise":
            with pytest.raises(ZeroDivisionError), write:
                raise ZeroDivisionError
        elif self.clock() > write.deadline:
            with pytest.raises(WriteError, match="deadline"):
                write.commit()
        else:
            write.commit()
            self._written.update(identities(write.rows.pick(write.positions)))
        with pytest.raises(WriteError, match="already"):
            write.commit()

    def reserve(self, model: str, blocks: int) -> None:
        self.reserved.extend(self.store.reserve(SPECS[model].root.digest, blocks).tolist())

    def unreserve(self, blocks: int) -> None:
        given, self.reserved = self.reserved[:blocks], self.reserved[blocks:]
        self.store.unreserve(np.array(given, dtype=np.int64))

    # -- the remote tier --------------------------------------------------------------------------

    def deliver(self, calls: int) -> None:
        """Some calls come through, and what they brought is collected."""
        self.store.pump()
        for _ in range(calls):
            if self.store.idle:
                return
            self.network.let_one_through()
            assert self.rig.woken.acquire(timeout=10)
            self.store.pump()

    def flip_a_byte(self, pick: int) -> None:
        key = sorted(self.remote.values)[pick % len(self.remote.values)]
        value = self.remote.values[key]
        damaged = bytearray(value.payload)
        damaged[pick % len(damaged)] ^= 0x10
        self.remote.values[key] = value._replace(payload=bytes(damaged))

    # -- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """All that must hold at any moment."""
        self.store.check()
        late = [write for write in self.writes if write.quarantined]
        quarantined = sum(len(write.slots) * write.space.slot_class.slot_bytes for write in late)
        assert self.store.usage()[TierName.HOST].quarantined == quarantined
        for request in self.requests:
            self._check_promise(request)
        for place in self._left_behind:
            assert not place.is_unchanged() or place.holds_its_payload(), "a late reader cannot tell"
        self._check_events()

    def finish(self) -> None:
        """Everybody goes home: nothing may be held any more, and all can be evicted. Closes the store."""
        with self._stack:
            self.network.open()
            self.rig.settle()
            for request in self.requests:
                self.store.release(request.lease)
            for write in self.writes:
                write.abort()
            self.unreserve(len(self.reserved))
            self.rig.settle()
            self.store.check()
            assert len(self.rig.events.of(RequestSettled)) == self.asked
            for tier, usage in self.store.usage().items():
                assert (usage.leased, usage.staged, usage.quarantined) == (0, 0, 0), f"{tier} keeps something"
                pool = self.rig.tier(tier).pool
                for slot_class in pool.extents.classes():
                    pool.evict(slot_class, 1000)
                assert pool.usage().ready == 0, "eviction does not find what nobody leases"

    def _check_promise(self, request: Request) -> None:
        lease = request.lease
        self.rig.assert_promised(lease)
        for shard in lease.shards:
            promised = identities(lease.chain.rows(shard, lease.first_block, lease.end))
            assert self._written.issuperset(promised), "nobody ever committed this"
        for place in request.published:
            assert place.is_unchanged()
            assert place.holds_its_payload()

    def _check_events(self) -> None:
        for event in self.rig.events.events[self._heard :]:
            if isinstance(event, RequestSettled):
                assert event.asked_tokens == sum(event.hit_tokens.values()) + sum(event.miss_tokens.values())
            if isinstance(event, BlocksStored | BlocksRemoved) and event.tier in self._resident:
                hashes = [event.hashes[at : at + 16] for at in range(0, len(event.hashes), 16)]
                named = {(event.namespace, event.shard, each) for each in hashes}
                known = self._resident[event.tier]
                if isinstance(event, BlocksStored):
                    assert known.isdisjoint(named), "stored twice"
                    known |= named
                else:
                    assert known >= named, "removed, and it was not there"
                    known -= named
        self._heard = len(self.rig.events.events)
        for name, known in self._resident.items():
            spaces = self.rig.tier(name).pool.spaces()
            assert known == {(each.namespace, each.shard, key) for each in spaces for key in each.ready}

    def _has(self, tier: MemoryTier, rows: BlockRows, block: int) -> bool:
        """Is this very block in a tier? Asked slowly, of one row of one table."""
        space = tier.pool.space(rows.namespace, rows.shard)
        assert space is not None
        slot = space.ready.get(rows.hash_at(block))
        return slot is not None and identities(tier.pool.rows_of(_slots(slot))) == [identities(rows)[block]]

    def _run(self, chain: Chain, shard: Shard, first_block: int) -> int:
        rows = chain.rows(shard, first_block)
        tiers = (self.rig.top, self.rig.host)
        found = [any(self._has(tier, rows, block) for tier in tiers) for block in range(len(rows))]
        return [*found, False].index(False)

    def _leave_behind(self, request: Request) -> None:
        """The reader may go on reading when its lease is over: remember from where."""
        lease = request.lease
        places = list(request.published)
        for shard in lease.shards:
            rows = lease.chain.rows(shard)
            for segment in lease.segments.get(shard, []):
                size = SPECS[model_of(lease.chain)].payload_bytes_on(shard)
                for block, slot in enumerate(segment.slots.tolist(), segment.start):
                    places.append(Place.now(self.rig.tier(segment.tier), slot, payload_of(rows, block, size)))
        self._left_behind = [*self._left_behind, *places][-40:]


def _slots(slot: int) -> SlotArray:
    return np.array([slot], dtype=np.int64)
