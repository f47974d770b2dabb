"""The time to live of blocks that nobody uses: against a slow model, in a store, and in a server."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashing import Root
from kvstore.block import WHOLE, BlockRows, Chain, MissCause, TierName
from kvstore.events import BlocksDropped, BlocksRemoved, RemovalCause
from kvstore.evict.base import Touch
from kvstore.evict.expiry import Expiry
from kvstore.integrity import check_pool
from kvstore.pool import BlockPool
from kvstore.simulate import POLICIES, MakeEvictor
from kvstore.simulate.expiring import ExpiringInstance
from kvstore.spec import SLOT_ALIGNMENT
from kvstore.stamps import TableAges
from kvstore.store import Demotion, StoreOptions, TieredStore, Tiers
from tests.kvstore.test_policies import ONLINE
from tests.support.dict_tier import DictTier
from tests.support.left_behind import found_of_all, make_scene
from tests.support.policy_forest import prefixes
from tests.support.policy_pool import PoolInstance, TableMemory
from tests.support.policy_workloads import workload_of
from tests.support.sidecars import sidecar
from tests.support.stores import (
    FakeClock,
    RigOptions,
    make_chain,
    make_rig,
    make_spec,
)
from tests.support.stubs import dialled, spec, tokens_of
from tests.support.valkey import eventually

TTL = 16
"""Sweeps begin a second apart."""
ROOT = Root(bytes(16), 1, "xxh3_128")
prompts = st.text("ab", min_size=1, max_size=6)


class Pool:
    """A pool that is never full, and beside it when each of its blocks was last used."""

    def __init__(self, make_evictor: MakeEvictor, slice_slots: int) -> None:
        self.pool = BlockPool(TableMemory(16, extents=8), make_evictor)
        self.space = self.pool.open_space(ROOT.digest, WHOLE, SLOT_ALIGNMENT, 1)
        self.expiry = Expiry(TTL, self.pool.occupancy, TableAges(self.pool.extents), slice_slots)
        self.used: dict[str, int] = {}
        self.pins: Counter[str] = Counter()
        self.now = 0

    def rows(self, prompt: str) -> BlockRows:
        return Chain.of(ROOT, np.array([ord(letter) for letter in prompt], dtype=np.uint32)).rows(WHOLE)

    def ask(self, prompt: str) -> None:
        rows, now = self.rows(prompt), float(self.now)
        run = self.pool.match(rows).slots
        self.pool.touch(self.space, Touch(rows.hashes, run, len(run), now))
        names = prefixes(prompt)
        missing = [at for at, name in enumerate(names) if name not in self.used]
        slots = self.pool.stage(self.space, len(missing), rows.pick(np.array(missing, dtype=np.int64)))
        self.pool.commit(slots, rows.pick(np.array(missing, dtype=np.int64)), None, time=now)
        self.used.update(dict.fromkeys([*names[: len(run)], *(names[at] for at in missing)], self.now))

    def hold(self, prompt: str) -> None:
        run = self.pool.match(self.rows(prompt)).slots
        self.pool.pin(run, 0.0)
        self.pins.update(prefixes(prompt)[: len(run)])

    def let_go(self) -> None:
        for name in self.pins:
            slot = self.space.ready[bytes(self.rows(name).hashes[-16:])]
            for _ in range(self.pins[name]):
                self.pool.unpin(np.array([slot]))
        self.pins.clear()

    def lose(self, prompt: str) -> None:
        """A block leaves from under its children, as a damaged one does."""
        if prompt in self.used and not self.pins[prompt]:
            slot = self.space.ready[bytes(self.rows(prompt).hashes[-16:])]
            self.pool.discard(np.array([slot]), RemovalCause.CORRUPT)
            del self.used[prompt]

    def expire(self) -> None:
        """Both by what they know: what is gone from the pool, and what the search below says."""
        self.pool.removed.clear()
        while self.expiry.behind(self.now):
            self.pool.expire(self.expiry.due(self.now))
            check_pool(self.pool)
        while over := [name for name in self.used if self.is_over(name)]:
            for name in over:
                del self.used[name]
        assert {each.cause for each in self.pool.removed} <= {RemovalCause.EXPIRED}
        hashes = {name: bytes(self.rows(name).hashes[-16:]) for name in self.used}
        assert set(self.space.ready) == set(hashes.values())

    def is_over(self, name: str) -> bool:
        has_children = any(each[:-1] == name for each in self.used)
        return not has_children and not self.pins[name] and self.used[name] <= self.now - TTL


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), prompts, st.integers(0, 12)),
        st.tuples(st.sampled_from(["hold", "lose", "let_go"]), prompts, st.just(0)),
        st.tuples(st.just("pass"), st.just(""), st.integers(1, 24)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("policy", ONLINE)
@given(done=steps, slice_slots=st.sampled_from([1, 3, 8192]))
def test_what_leaves_is_what_a_search_of_all_blocks_finds(
    policy: str, done: list[tuple[str, str, int]], slice_slots: int
) -> None:
    """Leaves that nobody holds or has used, again and again; the policy knows of it, and gives the rest."""
    pool = Pool(ONLINE[policy], slice_slots)
    for step, prompt, seconds in done:
        pool.now += seconds
        if step == "let_go":
            pool.let_go()
        elif step != "pass":
            getattr(pool, step)(prompt)
        else:
            pool.expire()
    held = {name for name in pool.used if any(each.startswith(name) for each in pool.pins if pool.pins[each])}
    pool.pool.evict(pool.space.slot_class, 1000)
    check_pool(pool.pool)
    assert len(pool.space.ready) == len(held)


@pytest.mark.parametrize("policy", ONLINE)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=30
    ),
    capacity=st.integers(2, 16),
    ttl=st.sampled_from([1.0, 20.0, 100.0]),
)
def test_the_pool_and_the_replay_keep_the_same_blocks(
    policy: str, asked: list[tuple[int, list[int]]], capacity: int, ttl: float
) -> None:
    times = np.cumsum([pause for pause, _ in asked])
    workload = workload_of((float(time), ids) for time, (_, ids) in zip(times, asked, strict=True))
    lean = ExpiringInstance(POLICIES[policy](workload), workload, capacity, ttl)
    pool = PoolInstance(POLICIES[policy](workload), capacity, ttl)
    for number, request in enumerate(workload.requests):
        assert lean.serve(number) == pool.serve(request)
        assert len(lean.resident) == len(pool.resident())


def test_however_short_the_time_sweeps_come_to_an_end() -> None:
    pool = Pool(ONLINE["lru"], 8192)
    expiry = Expiry(1e-12, pool.pool.occupancy, TableAges(pool.pool.extents))
    assert expiry.behind(1e9)
    expiry.due(1e9)
    assert not expiry.behind(1e9)
    assert expiry.behind(1e9 + 1)


SPEC = make_spec()
KEPT = StoreOptions(idle_ttl_seconds=TTL, lease_seconds=1000.0, demotion=Demotion.ON_EVICT)


def test_both_memory_tiers_let_go_of_what_nobody_holds_and_redis_gets_none_of_it() -> None:
    clock, redis = FakeClock(), DictTier()
    options = RigOptions(device_extents=2, redis=redis, store=KEPT)
    with make_rig(clock, [(SPEC, (WHOLE,))], options) as rig:
        idle, raised, leased, pinned = (
            make_chain(SPEC, letters) for letters in ("abcd", "pq", "abef", "xyz")
        )
        for chain in (idle, raised, leased, pinned):
            rig.write(chain)
        assert rig.store.pin("kept", pinned) == 3
        lease = rig.store.acquire("r", raised)
        assert rig.store.promote(lease) == 2
        rig.store.release(lease)
        lease = rig.store.acquire("s", leased)

        def resident() -> list[int]:
            rig.settle()
            rig.store.check()
            assert rig.device is not None
            there = [rig.resident(rig.host, chain) for chain in (idle, leased, pinned)]
            return [*there, rig.resident(rig.device, raised)]

        clock.advance(TTL - 1)
        assert resident() == [4, 4, 3, 2]
        clock.advance(1 + TTL / 16)
        assert resident() == [2, 4, 3, 0]
        rig.assert_promised(lease)
        rig.store.release(lease)
        clock.advance(TTL / 16)
        assert resident() == [0, 0, 3, 0]
        gone = rig.events.of(BlocksRemoved)
        assert {each.cause for each in gone} == {RemovalCause.EXPIRED}
        assert min(each.idle.min() for each in gone) >= TTL
        assert Counter(each.tier for each in gone for _ in each.idle) == {
            TierName.HOST: 8,
            TierName.DEVICE: 2,
        }
        assert not redis.values
        assert not rig.events.of(BlocksDropped)
        lease = rig.store.acquire("t", idle)
        rig.store.wait(lease, 10.0)
        assert lease.cause is MissCause.EXPIRED


def test_a_restart_does_not_make_blocks_younger() -> None:
    """Of what a killed server left, c and d were used before 1010, all others since; now it is 1100."""
    options = StoreOptions(idle_ttl_seconds=95.0)
    with make_scene() as scene:
        host = scene.adopt()
        store = TieredStore(Tiers(host), clock=scene.clock, options=options)
        assert found_of_all(host) == [4, 4, 4, 2]
        store.pump()
        assert found_of_all(host) == [2, 4, 4, 2]


def test_a_server_forgets_what_is_idle_and_says_why() -> None:
    settings = {"idle_ttl_seconds": "300ms", "eviction_policy": "reuse"}
    with sidecar(**settings) as server, dialled(server.address) as raw:
        peer = raw.register(spec("idle"))
        held, idle = tokens_of(4), tokens_of(4, seed=1)
        peer.write(held)
        lease = peer.hold(held, "held")
        peer.write(idle)
        assert eventually(lambda: {each.cause for each in peer.explain(idle).blocks} == {"expired"}, 10.0)
        assert peer.matched(held) == 64
        assert peer.acquire(idle, "r").cause == "expired"
        peer.release(lease)
        assert dict(raw.status().miss_tokens) == {"expired": 64}
        assert eventually(lambda: raw.pool().ready_bytes == 0, 10.0)
