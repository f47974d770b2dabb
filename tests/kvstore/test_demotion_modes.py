"""When blocks go to redis: as they leave memory, or once they were reused; every block is accounted for."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.block import WHOLE, Chain, TierName
from kvstore.events import BlocksDropped, BlocksRemoved, BlocksStored, DropCause, RemovalCause
from kvstore.evict.lru import LRU
from kvstore.integrity import check_pool
from kvstore.pool import BlockPool
from kvstore.service.client import ClientNamespace
from kvstore.spec import SLOT_ALIGNMENT
from kvstore.store import BlockStatus, Demotion, StoreOptions
from kvstore.store.ahead import vacate_ahead
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_value import block_key
from tests.support.clients import MAPPED, assert_right, client_of, put
from tests.support.clients import eventually as until
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import HeldTier
from tests.support.policy_pool import TableMemory
from tests.support.sidecars import sidecar
from tests.support.stores import (
    FakeClock,
    Rig,
    RigOptions,
    make_chain,
    make_host,
    make_rig,
    make_spec,
    pool_folder,
)
from tests.support.valkey import ValkeyServer, shared_valkey, start_valkey, valkey

__all__ = ["shared_valkey", "start_valkey", "valkey"]

pytestmark = pytest.mark.redis

SPEC = make_spec()
ON_EVICT = StoreOptions(demotion=Demotion.ON_EVICT, batch_bytes=4096)
ON_REUSE = StoreOptions(demotion=Demotion.ON_REUSE, batch_bytes=4096)
ROOM = 64
"""Blocks in the host tier: 4 extents of 16."""
EXTENT_BYTES = 20 << 10


def letters_of(number: int, blocks: int) -> str:
    """A prompt that shares no block with another number's."""
    return "".join(chr(0x4E00 + 16 * number + block) for block in range(blocks))


def prompt(number: int, blocks: int = 4) -> Chain:
    return make_chain(SPEC, letters_of(number, blocks))


@contextmanager
def rig_above(
    redis: Tier, options: StoreOptions, clock: Callable[[], float], device: int = 0
) -> Iterator[Rig]:
    made = RigOptions(4, device, EXTENT_BYTES, 8 << 10, redis, options)
    with make_rig(clock, [(SPEC, (WHOLE,))], made) as rig:
        yield rig


@contextmanager
def rig_on(server: ValkeyServer, options: StoreOptions) -> Iterator[Rig]:
    """A store whose redis is that server; at its end nothing is held and nothing is lost track of."""
    tier = RedisTier(RedisOptions(server.url), time.monotonic)
    with rig_above(tier, options, time.monotonic) as rig:
        yield rig
        rig.settle()
        usage = rig.store.usage()[TierName.HOST]
        assert (usage.leased, usage.staged, rig.store.queued_bytes) == (0, 0, 0)
        rig.store.check()


def write(rig: Rig, numbers: range, blocks: int = 4) -> None:
    """Write prompts one by one, with time for redis between them."""
    for number in numbers:
        assert rig.write(prompt(number, blocks)) == [BlockStatus.YOURS] * blocks
        rig.settle()


def in_redis(server: ValkeyServer, chain: Chain) -> list[bool]:
    rows = chain.rows(WHOLE)
    return [bool(server.client.exists(block_key("kv", rows, block))) for block in range(len(rows))]


def counts(rig: Rig) -> tuple[int, int, Counter[DropCause]]:
    """(Blocks that left the host for room, that redis stored, and that it did not get, by cause)."""
    left = sum(
        len(event.lifetimes) for event in rig.events.of(BlocksRemoved) if event.cause is RemovalCause.CAPACITY
    )
    stored = [event for event in rig.events.of(BlocksStored) if event.tier is TierName.REDIS]
    dropped: Counter[DropCause] = Counter()
    for event in rig.events.of(BlocksDropped):
        assert event.tier is TierName.REDIS
        dropped[event.cause] += event.blocks
    return left, sum(len(event.hashes) // 16 for event in stored), dropped


def read(rig: Rig, chain: Chain, first_block: int = 0) -> dict[TierName, int]:
    """Ask for a prompt until nothing more comes, compare every byte, and end the request: where it was."""
    lease = rig.store.acquire("reader", chain, first_block=first_block)
    rig.store.wait(lease, 10.0)
    rig.assert_promised(lease)
    hits = lease.hit_blocks(lease.blocks)
    rig.store.release(lease)
    rig.settle()
    return hits


class TestOnEvict:
    def test_what_leaves_is_in_redis_and_nothing_else(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, ON_EVICT) as rig:
            write(rig, range(14))
            assert counts(rig) == (0, 0, Counter())
            assert valkey.client.dbsize() == 0, "as long as there is room"
            write(rig, range(14, 40))
            left, stored, dropped = counts(rig)
            assert left == stored == valkey.client.dbsize() > 40 * 4 - ROOM - 1
            assert not dropped
            for number in range(40):
                here = rig.resident(rig.host, prompt(number))
                assert in_redis(valkey, prompt(number)) == [block >= here for block in range(4)]

    def test_room_is_made_before_it_is_needed(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, ON_EVICT) as rig:
            write(rig, range(40))
            free = sum(extent.free for extent in rig.host.pool.extents.extents())
            assert ROOM // 32 <= free <= ROOM // 16 + 4

    def test_a_head_here_and_its_tail_in_redis_are_one_run(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, ON_EVICT) as rig:
            write(rig, range(6), 10)
            rig.write(prompt(9, 3))
            rig.settle()
            here = rig.resident(rig.host, prompt(0, 10))
            assert 0 < here < 10
            assert read(rig, prompt(0, 10)) == {TierName.HOST: here, TierName.REDIS: 10 - here}

    def test_what_came_from_redis_is_not_sent_again(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, ON_EVICT) as rig:
            write(rig, range(40))
            assert read(rig, prompt(0)) == {TierName.REDIS: 4}
            sent = valkey.calls()["set"]
            write(rig, range(40, 80))
            assert rig.resident(rig.host, prompt(0)) == 0
            left, stored, _ = counts(rig)
            assert valkey.calls()["set"] - sent == stored - sent == left - 4 - sent
            assert in_redis(valkey, prompt(0)) == [True] * 4

    def test_a_burst_takes_what_it_needs_and_says_what_that_cost(self, valkey: ValkeyServer) -> None:
        """A write never waits for redis: what had to go at once was not copied, and is counted."""
        with rig_on(valkey, ON_EVICT) as rig:
            write(rig, range(15))
            for number in range(15, 21):
                assert rig.write(prompt(number)) == [BlockStatus.YOURS] * 4
            rig.settle()
            left, stored, dropped = counts(rig)
            assert dropped == {DropCause.QUEUE: left - stored}
            assert dropped[DropCause.QUEUE] >= 20 - 4
            held = sum(rig.resident(rig.host, prompt(number)) for number in range(21))
            assert held + stored + dropped[DropCause.QUEUE] == 21 * 4

    def test_a_stalled_server_costs_its_blocks_and_nobody_s_time(
        self, start_valkey: Callable[..., ValkeyServer]
    ) -> None:
        """RSS flat after N stores to a slow Redis (production-stack #923, LMCache #2017)."""
        options = replace(ON_EVICT, flight_seconds=0.2, queue_bytes=8 * 1024)
        server = start_valkey()
        with rig_on(server, options) as rig:
            write(rig, range(20))
            _, before, dropped = counts(rig)
            assert not dropped
            with server.frozen():
                for number in range(20, 60):
                    assert rig.write(prompt(number)) == [BlockStatus.YOURS] * 4
                    rig.store.pump()
                    assert rig.store.queued_bytes <= 8 * 1024
                    assert rig.store.usage()[TierName.HOST].staged <= 8 * 1024
                    rig.store.check()
                rig.settle()
            left, stored, dropped = counts(rig)
            assert dropped[DropCause.QUEUE] > 0
            assert dropped[DropCause.UNAVAILABLE] > 0, "those that waited in the queue"
            assert set(dropped) == {DropCause.QUEUE, DropCause.UNAVAILABLE}
            assert left == stored + dropped.total()
            assert stored - before <= 8, "what the server had been sent and did when it went on"
            until(lambda: _takes_again(rig, server))

    def test_a_dead_server_is_no_reason_to_keep_slots(
        self, start_valkey: Callable[..., ValkeyServer]
    ) -> None:
        server = start_valkey()
        with rig_on(server, ON_EVICT) as rig:
            write(rig, range(16))
            server.kill()
            write(rig, range(16, 30))
            left, stored, dropped = counts(rig)
            assert dropped == {DropCause.UNAVAILABLE: left - stored}
            server.restart()
            until(lambda: _takes_again(rig, server))

    def test_a_crash_leaves_no_slot_behind(self, valkey: ValkeyServer) -> None:
        """What waits for redis when its server dies is nobody's: not visible, and free for the next."""
        held = HeldTier(RedisTier(RedisOptions(valkey.url), time.monotonic))
        with rig_above(held, ON_EVICT, time.monotonic) as rig, pool_folder() as folder:
            for number in range(17):
                rig.write(prompt(number))
                rig.store.pump()
            assert rig.store.usage()[TierName.HOST].staged > 0
            shutil.copy(rig.host.file.path, folder / "copy")
            ready = rig.store.usage()[TierName.HOST].ready
            next_owner = make_host(folder, time.monotonic, extent_bytes=EXTENT_BYTES, name="copy")
            usage = next_owner.pool.usage()
            assert (usage.staged, usage.quarantined, usage.ready) == (0, 0, ready)
            assert next_owner.adopted.damaged == 0
            check_pool(next_owner.pool)
            next_owner.close()
            held.open()
            rig.settle()

    def test_the_next_store_goes_on(self, valkey: ValkeyServer) -> None:
        """What this one sent is found by one that begins with empty memory."""
        with rig_on(valkey, ON_EVICT) as rig:
            write(rig, range(40))
        with rig_on(valkey, ON_EVICT) as rig:
            assert read(rig, prompt(0)) == {TierName.REDIS: 4}

    def test_without_redis_nothing_is_let_go_ahead(self) -> None:
        with rig_above(RigOptions().redis, ON_EVICT, FakeClock()) as rig:
            write(rig, range(20))
            assert sum(extent.free for extent in rig.host.pool.extents.extents()) == 0
            assert counts(rig)[1:] == (0, Counter())

    def test_what_is_cleared_is_not_lost(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, ON_EVICT) as rig:
            write(rig, range(4))
            rig.store.clear(None)
            assert counts(rig) == (0, 0, Counter())


class Scarce(TableMemory):
    """The system has memory for two extents and no more."""

    def reserve(self, extent: int) -> bool:
        return extent < 2


def test_room_is_made_in_a_pool_that_stays_smaller_than_it_should_be() -> None:
    pool = BlockPool(Scarce(16, extents=4), LRU)
    space = pool.open_space(SPEC.root.digest, WHOLE, SLOT_ALIGNMENT, SPEC.block_size)
    for number in range(3):
        assert vacate_ahead(pool, 1 << 20, Counter()) == [], "there may be more"
        rows = prompt(number, 16).rows(WHOLE)
        pool.commit(pool.stage(space, 16, rows), rows, None, time=number)
    [(left, slots)] = vacate_ahead(pool, 1 << 20, Counter())
    assert (left, len(slots)) == (space, 32 * 4 // 64)
    pool.abort(slots)
    assert vacate_ahead(pool, 1 << 20, Counter()) == []
    check_pool(pool)


def _takes_again(rig: Rig, server: ValkeyServer) -> bool:
    """Whether what leaves now gets to the server."""
    number = 100 + len(rig.events.of(BlocksStored))
    before = server.client.dbsize()
    write(rig, range(number, number + 4))
    return bool(server.client.dbsize() > before)


class TestOnReuse:
    def test_a_block_goes_down_when_it_is_hit(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, ON_REUSE) as rig:
            write(rig, range(20))
            assert valkey.client.dbsize() == 0
            assert read(rig, prompt(19, 3)) == {TierName.HOST: 3}
            assert in_redis(valkey, prompt(19)) == [True] * 3 + [False]
            read(rig, prompt(19))
            assert in_redis(valkey, prompt(19)) == [True] * 4
            assert valkey.calls()["set"] == valkey.client.dbsize() == 4, "each once"
            assert counts(rig)[1:] == (4, Counter())

    def test_when_it_is_hit_often_enough(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, replace(ON_REUSE, reuse_count=3)) as rig:
            write(rig, range(1))
            for expected in (0, 0, 4, 4):
                read(rig, prompt(0))
                assert valkey.client.dbsize() == expected
            assert valkey.calls()["set"] == 4

    def test_its_head_goes_with_it(self, valkey: ValkeyServer) -> None:
        """Nobody reads the head of a prompt that an engine keeps itself, and yet redis needs it."""
        with rig_on(valkey, ON_REUSE) as rig:
            write(rig, range(1))
            assert read(rig, prompt(0), first_block=2) == {TierName.HOST: 2}
            assert in_redis(valkey, prompt(0)) == [True] * 4

    def test_the_head_alone_does_not_go(self, valkey: ValkeyServer) -> None:
        """An engine that has it asks for what comes after it, and nobody has read that often enough."""
        with rig_on(valkey, replace(ON_REUSE, reuse_count=2)) as rig:
            write(rig, range(1))
            assert read(rig, prompt(0), first_block=2) == {TierName.HOST: 2}
            assert valkey.client.dbsize() == 0
            read(rig, prompt(0), first_block=2)
            assert in_redis(valkey, prompt(0)) == [True] * 4

    def test_where_the_head_is_not_here_the_rest_goes(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, ON_REUSE) as rig:
            write(rig, range(1))
            head = rig.host.pool.match(prompt(0, 1).rows(WHOLE)).slots
            assert rig.host.pool.discard(head, RemovalCause.CLEARED) == 1
            read(rig, prompt(0), first_block=2)
            assert in_redis(valkey, prompt(0)) == [False, False, True, True]

    def test_what_does_not_fit_the_queue_goes_at_the_next_hit(self, valkey: ValkeyServer) -> None:
        with rig_on(valkey, replace(ON_REUSE, queue_bytes=3 * 1024)) as rig:
            write(rig, range(1))
            read(rig, prompt(0))
            assert in_redis(valkey, prompt(0)) == [True] * 3 + [False]
            assert counts(rig)[1:] == (3, Counter({DropCause.QUEUE: 1}))
            read(rig, prompt(0))
            assert in_redis(valkey, prompt(0)) == [True] * 4

    def test_what_a_dead_server_did_not_take_goes_when_it_is_back(
        self, start_valkey: Callable[..., ValkeyServer]
    ) -> None:
        server = start_valkey()
        with rig_on(server, ON_REUSE) as rig:
            write(rig, range(1))
            server.kill()
            read(rig, prompt(0))
            assert counts(rig)[1:] == (0, Counter({DropCause.UNAVAILABLE: 4}))
            server.restart()
            until(lambda: bool(read(rig, prompt(0)) and in_redis(server, prompt(0)) == [True] * 4))

    def test_a_copy_is_renewed_when_it_may_have_expired(self) -> None:
        redis, clock = DictTier(), FakeClock()
        with rig_above(redis, replace(ON_REUSE, ttl_seconds=100.0, lease_seconds=1e6), clock) as rig:
            write(rig, range(1))
            read(rig, prompt(0))
            redis.values.clear()
            clock.advance(74)
            read(rig, prompt(0))
            assert not redis.values, "as far as is known it is there"
            clock.advance(2)
            read(rig, prompt(0))
            assert len(redis.values) == 4

    def test_hits_in_the_device_tier_count(self) -> None:
        redis = DictTier()
        with rig_above(redis, ON_REUSE, FakeClock(), device=1) as rig:
            lease = rig.store.acquire("r", prompt(0))
            assert rig.publish(lease, 0, 4) == []
            rig.store.release(lease)
            rig.settle()
            assert not redis.values
            assert read(rig, prompt(0, 2)) == {TierName.DEVICE: 2}
            assert len(redis.values) == 2


@pytest.mark.parametrize("mode", ["on_evict", "on_reuse"])
def test_a_sidecar_does_as_it_is_told(mode: str, valkey: ValkeyServer) -> None:
    spec = make_spec(payload_bytes=20_000)
    chains = [make_chain(spec, letters_of(number, 3)) for number in range(40)]
    settings = {"pool_bytes": "2MiB", "extent_bytes": "1MiB", "redis_url": valkey.url, "redis_demotion": mode}
    with sidecar(**settings, redis_probe_seconds=0.5) as server, client_of(MAPPED, server.address) as client:
        namespace = client.namespace(spec)
        for chain in chains:
            put(namespace, chain)
        if mode == "on_evict":
            until(lambda: 0 < valkey.client.dbsize() <= 40 * 3 - 90)
            until(lambda: any(_from_redis(namespace, chain) for chain in chains))
        else:
            assert valkey.client.dbsize() == 0, "nobody had used them"
            with namespace.acquire(chains[-1]) as lease:
                assert_right(lease, chains[-1], 3)
            until(lambda: valkey.client.dbsize() == 3)


def _from_redis(namespace: ClientNamespace, chain: Chain) -> bool:
    with namespace.acquire(chain, wait_seconds=10) as lease:
        assert_right(lease, chain, lease.blocks)
        return TierName.REDIS in lease.hit_blocks
