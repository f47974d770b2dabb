"""What the policies and the listeners are told: each request once, and all that is known of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.block import WHOLE, BlockRows, Chain, MissCause, SlotArray
from kvstore.errors import LeaseError
from kvstore.events import BlocksRemoved, BlocksReused, BlocksStored, Event, RequestSettled
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.evict.lru import LRU
from kvstore.hints import Hints
from kvstore.store import StoreOptions, TieredStore, Tiers
from kvstore.tiers.base import Payload, SaveOutcome
from kvstore.tiers.host import HostTier
from tests.support.dict_tier import DictTier
from tests.support.stores import (
    EXTENT_BYTES,
    SPLIT,
    FakeClock,
    Recorder,
    fill,
    hash_only,
    make_chain,
    make_spec,
)

SPEC = make_spec()
ONE_EXTENT = "".join(chr(0x4E00 + each) for each in range(80))


class Watched(LRU):
    """The real policy, and what it was told."""

    def __init__(self, occupancy: Occupancy) -> None:
        super().__init__(occupancy)
        self.touches: list[Touch] = []
        self.added: list[tuple[int, int]] = []

    def touch(self, touch: Touch) -> None:
        self.touches.append(touch)
        super().touch(touch)

    def add(self, slots: SlotArray, hashes: bytes, parent: int, time: float) -> None:
        self.added.append((len(slots), parent))
        super().add(slots, hashes, parent, time)


class Bench:
    """A store with one host extent, a dictionary for redis, and a policy that remembers."""

    def __init__(self, folder: str, *listeners: Recorder, redis: DictTier | None = None) -> None:
        self.clock = FakeClock()
        self.policies: list[Watched] = []
        self.events = Recorder()
        self.redis = redis or DictTier()
        host = HostTier(
            Path(folder) / "pool",
            pool_bytes=EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            make_evictor=self._make_policy,
            clock=self.clock,
        )
        self.store = TieredStore(
            Tiers(host, None, self.redis),
            clock=self.clock,
            options=StoreOptions(lease_seconds=30),
            listeners=(*listeners, self.events),
        )
        self.store.register(SPEC, (WHOLE, *SPLIT))

    def _make_policy(self, occupancy: Occupancy) -> Evictor:
        self.policies.append(Watched(occupancy))
        return self.policies[-1]

    @property
    def policy(self) -> Watched:
        [policy] = self.policies
        return policy

    def write(self, chain: Chain) -> None:
        with self.store.write(chain) as write:
            fill(write)
        assert self.store.drain(10.0)

    def forget(self) -> None:
        """Lose all that the host has, by pressure."""
        self.write(make_chain(SPEC, ONE_EXTENT))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(str(tmp_path))
    yield made
    made.store.check()
    made.store.close()


def test_a_request_is_seen_once_with_all_that_it_asked(bench: Bench) -> None:
    chain = make_chain(SPEC, "abcdef")
    bench.write(make_chain(SPEC, "abcd"))
    hints = Hints(ended=True)
    lease = bench.store.acquire("r", chain, hints=hints)
    bench.store.wait(lease, 1.0)
    bench.store.renew(lease)
    bench.store.release(lease)
    [seen] = bench.policy.touches
    assert (seen.hashes, len(seen.slots), seen.hit_blocks, seen.hints) == (chain.hashes, 4, 4, hints)
    assert bench.policy.added == [(4, -1)]


def test_a_complete_miss_is_seen_too(bench: Bench) -> None:
    chain = make_chain(SPEC, "xyz")
    lease = bench.store.acquire("r", chain)
    bench.store.wait(lease, 1.0)
    bench.store.release(lease)
    [seen] = bench.policy.touches
    assert (seen.hashes, len(seen.slots), seen.hit_blocks) == (chain.hashes, 0, 0)


def test_what_redis_brought_is_of_the_request_and_no_hit_of_the_pool(bench: Bench) -> None:
    bench.write(make_chain(SPEC, "abcdef"))
    bench.forget()
    bench.policy.touches.clear()
    lease = bench.store.acquire("r", make_chain(SPEC, "abcdef"))
    bench.store.wait(lease, 5.0)
    assert lease.blocks == 6
    bench.store.release(lease)
    [seen] = bench.policy.touches
    assert (len(seen.slots), seen.hit_blocks) == (6, 0)


def test_new_blocks_are_added_behind_their_parent(bench: Bench) -> None:
    bench.write(make_chain(SPEC, "ab"))
    bench.write(make_chain(SPEC, "abcd"))
    (first, root), (second, parent) = bench.policy.added
    assert (first, root, second) == (2, -1, 2)
    assert parent == 1


def test_removal_tells_age_idleness_and_what_was_never_read(bench: Bench) -> None:
    bench.write(make_chain(SPEC, "ab"))
    bench.clock.advance(5)
    lease = bench.store.acquire("r", make_chain(SPEC, "a"))
    bench.store.release(lease)
    bench.clock.advance(7)
    bench.forget()
    gone = bench.events.of(BlocksRemoved)
    ages = np.concatenate([event.lifetimes for event in gone])
    idle = np.concatenate([event.idle for event in gone])
    assert ages.tolist() == [12.0, 12.0]
    assert sorted(idle.tolist()) == [7.0, 12.0]
    assert sum(event.unread_blocks for event in gone) == 1
    assert {event.payload_bytes for event in gone} == {1024}


def test_reuse_tells_gaps_and_first_reads(bench: Bench) -> None:
    bench.write(make_chain(SPEC, "ab"))
    for _ in range(2):
        bench.clock.advance(3)
        bench.store.release(bench.store.acquire("r", make_chain(SPEC, "ab")))
    first, second = bench.events.of(BlocksReused)
    assert (first.gaps.tolist(), first.first_reads) == ([3.0, 3.0], 2)
    assert (second.gaps.tolist(), second.first_reads) == ([3.0, 3.0], 0)


def test_a_settled_request_can_be_recorded(bench: Bench) -> None:
    chain = make_chain(SPEC, "abcd")
    bench.write(chain)
    bench.store.release(bench.store.acquire("r", chain, hints=Hints(priority=2)), used_blocks=3)
    [settled] = bench.events.of(RequestSettled)
    assert (settled.hashes, settled.hit_blocks, settled.hints) == (chain.hashes, 3, Hints(priority=2))


def test_a_missing_block_is_cold_until_something_has_left(bench: Bench) -> None:
    def cause() -> dict[MissCause, int]:
        lease = bench.store.acquire("r", make_chain(SPEC, "new"))
        seen = lease.cause
        bench.store.wait(lease, 1.0)
        bench.store.release(lease)
        assert seen is not None
        return {seen: len(lease.chain)}

    assert cause() == {MissCause.COLD: 3}
    bench.write(make_chain(SPEC, "ab"))
    bench.forget()
    assert cause() == {MissCause.UNKNOWN: 3}


@pytest.mark.parametrize("other", ["shards", "tokens"])
def test_a_request_id_does_not_come_back_with_less_or_other(bench: Bench, other: str) -> None:
    chain = make_chain(SPEC, "ab")
    bench.write(chain)
    first = chain if other == "shards" else hash_only(chain)
    lease = bench.store.acquire("r", first)
    with pytest.raises(LeaseError, match="other shards" if other == "shards" else "without these tokens"):
        bench.store.acquire("r", chain, SPLIT if other == "shards" else (WHOLE,))
    with pytest.raises(LeaseError, match=r"not on 0\.2\.0\.1"):
        bench.store.promote(lease, SPLIT[0])
    bench.store.release(lease)


def test_deadlines_pass_for_an_owner_who_never_ticks(bench: Bench) -> None:
    bench.write(make_chain(SPEC, "ab"))
    lease = bench.store.acquire("r", make_chain(SPEC, "ab"))
    for _ in range(1000):
        bench.store.renew(lease)
    bench.clock.advance(31)
    bench.store.acquire("another", make_chain(SPEC, "a"))
    assert lease.over


class Broken(Recorder):
    """A listener with a defect."""

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, BlocksStored):
            raise RuntimeError("a defect of the listener")


def test_a_listener_that_raises_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    bench = Bench(str(tmp_path), broken)
    bench.write(make_chain(SPEC, "abcdef"))
    bench.forget()
    lease = bench.store.acquire("r", make_chain(SPEC, "abcdef"))
    bench.store.wait(lease, 5.0)
    assert (lease.blocks, lease.pending) == (6, 0)
    bench.store.release(lease)
    bench.store.check()
    assert len(bench.events.events) == len(broken.events), "who comes after it hears everything"
    assert "a listener failed on BlocksStored" in caplog.text
    bench.store.close()


class SlowSaves(DictTier):
    """Saves take as long as the test wants; everything else is quick."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def save(
        self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int], deadline: float
    ) -> list[SaveOutcome]:
        self.go_on.wait(20)
        return super().save(rows, payloads, checksums, deadline)


def test_nobody_waits_for_blocks_behind_blocks_that_are_sent(tmp_path: Path) -> None:
    slow = SlowSaves()
    bench = Bench(str(tmp_path), redis=slow)
    slow.go_on.set()
    bench.write(make_chain(SPEC, "abc"))
    bench.forget()
    slow.go_on.clear()
    for letters in ("stu", "vwx", "yz"):
        with bench.store.write(make_chain(SPEC, letters)) as write:
            fill(write)
    bench.store.pump()
    lease = bench.store.acquire("r", make_chain(SPEC, "abc"))
    bench.store.wait(lease, 5.0)
    assert (lease.blocks, lease.pending) == (3, 0)
    bench.store.release(lease)
    slow.go_on.set()
    assert bench.store.drain(10.0)
    bench.store.close()


def test_what_was_hashed_is_what_is_stored(bench: Bench) -> None:
    buffer = np.arange(8, dtype=np.uint32)
    chain = Chain.of(SPEC.root, buffer)
    buffer[:] = 0
    assert chain.tokens is not None
    assert chain.tokens.reshape(-1).tolist() == list(range(8))
    with pytest.raises(ValueError, match="read-only"):
        chain.tokens[0, 0] = 1
