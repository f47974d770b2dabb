"""Why blocks are in no tier, against a slow model that forgets nothing; and what happens at the limit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import WHOLE, MissCause, TierName
from kvstore.events import BlocksRemoved, BlocksStored, RemovalCause, RequestSettled
from kvstore.store.absence import Absences, memory_for
from tests.support.dict_tier import DictTier
from tests.support.stores import FakeClock, RigOptions, make_chain, make_rig, make_spec

TTL = 100.0
SPACE = b"n" * 16
LEFT = {
    RemovalCause.CAPACITY: MissCause.EVICTED,
    RemovalCause.RECLAIMED: MissCause.EVICTED,
    RemovalCause.EXPIRED: MissCause.EXPIRED,
    RemovalCause.CORRUPT: MissCause.CORRUPT,
    RemovalCause.CLEARED: MissCause.UNKNOWN,
}


def names(*numbers: int) -> bytes:
    """Hashes, spread as hashes are."""
    return b"".join(np.random.default_rng(number).bytes(16) for number in numbers)


def removed(hashes: bytes, cause: RemovalCause, tier: TierName = TierName.HOST) -> BlocksRemoved:
    return BlocksRemoved(0.0, tier, SPACE, WHOLE, hashes, cause, 1)


def saved(hashes: bytes, time: float) -> BlocksStored:
    return BlocksStored(time, TierName.REDIS, SPACE, WHOLE, hashes, 1)


@dataclass
class Model:
    """What is known of each block by number, without bounds and one by one."""

    left: dict[int, MissCause] = field(default_factory=dict)
    saved: dict[int, float] = field(default_factory=dict)

    def missing(self, chain: list[int], now: float, *, asked_redis: bool) -> list[MissCause]:
        causes: list[MissCause] = []
        for number in chain:
            cause = self.left.get(number, MissCause.COLD)
            if asked_redis and number in self.saved:
                before = causes[-1] if causes else MissCause.EVICTED
                cause = MissCause.EXPIRED if now - self.saved[number] >= TTL else before
            if causes and causes[-1] is MissCause.COLD:
                cause = MissCause.COLD
            causes.append(cause)
        return [MissCause.CORRUPT] * len(chain) if causes[0] is MissCause.CORRUPT else causes


HAPPENINGS = st.tuples(
    st.sampled_from([*RemovalCause, "saved"]), st.lists(st.integers(0, 60), min_size=1, unique=True)
)


@given(
    happened=st.lists(HAPPENINGS, max_size=12),
    chain=st.lists(st.integers(0, 80), min_size=1, max_size=60, unique=True),
    asked_redis=st.booleans(),
)
def test_causes_are_those_of_a_model_that_forgets_nothing(
    happened: list[tuple[RemovalCause | str, list[int]]], chain: list[int], *, asked_redis: bool
) -> None:
    absences, model, now = Absences(memory_for(0), TTL), Model(), 1000.0
    for what, numbers in happened:
        now += 17.0
        if isinstance(what, RemovalCause):
            absences(removed(names(*numbers), what))
            model.left |= dict.fromkeys(numbers, LEFT[what])
        else:
            absences(saved(names(*numbers), now))
            model.saved |= dict.fromkeys(numbers, now)
    expected = model.missing(chain, now, asked_redis=asked_redis)
    found = absences.missing(SPACE, names(*chain), now, asked_redis=asked_redis)
    assert found.first is expected[0]
    assert found.blocks == {cause: expected.count(cause) for cause in set(expected)}
    alone = [model.missing([number], now, asked_redis=True)[0] for number in chain]
    assert absences.causes(SPACE, names(*chain), now) == alone


def test_what_redis_removed_for_damage_is_corrupt_until_it_is_stored_again() -> None:
    absences = Absences(memory_for(0), TTL)
    absences(saved(names(1, 2), 10.0))
    absences(removed(names(1), RemovalCause.CORRUPT, TierName.REDIS))
    assert absences.causes(SPACE, names(1), 20.0) == [MissCause.CORRUPT]
    absences(saved(names(1), 30.0))
    assert absences.causes(SPACE, names(1), 30.0 + TTL) == [MissCause.EXPIRED]


def test_a_name_in_another_namespace_is_another_block() -> None:
    absences = Absences(memory_for(0), TTL)
    absences(removed(names(1), RemovalCause.CAPACITY))
    assert absences.causes(b"m" * 16, names(1), 0.0) == [MissCause.COLD]


def test_a_namespace_that_was_taken_over_has_no_cold_blocks() -> None:
    absences = Absences(memory_for(0), TTL, inherited=[SPACE])
    assert absences.causes(SPACE, names(1), 0.0) == [MissCause.UNKNOWN]
    assert absences.causes(b"m" * 16, names(1), 0.0) == [MissCause.COLD]
    absences(removed(names(1), RemovalCause.CAPACITY))
    assert absences.causes(SPACE, names(1), 0.0) == [MissCause.EVICTED]


def test_memory_is_fixed_and_what_it_forgets_is_unknown() -> None:
    """Ten times as many as it holds: the last ones are known, no old one is called cold, few others are."""
    absences = Absences(memory_for(0), TTL)
    room = absences.nbytes // 2 // 12
    random = np.random.default_rng(0)
    for _ in range(10):
        old, last = random.bytes(16 * room // 2), random.bytes(16 * room // 2)
        for start in range(0, len(old), 16 * 500):
            absences(removed(old[start : start + 16 * 500], RemovalCause.CAPACITY))
        absences(removed(last, RemovalCause.CAPACITY))
    assert absences.nbytes <= memory_for(0)

    def causes(hashes: bytes) -> list[MissCause]:
        return absences.causes(SPACE, hashes[: 16 * 300], 0.0)

    assert causes(last[-16 * 300 :]).count(MissCause.EVICTED) > 270
    assert MissCause.COLD not in causes(old)
    assert set(causes(random.bytes(16 * 300))) == {MissCause.UNKNOWN}
    cold = Absences(memory_for(0), TTL)
    cold(removed(last, RemovalCause.CAPACITY))
    assert absences.missing(SPACE, last[-16 * 50 :], 0.0, asked_redis=True).first is MissCause.EVICTED
    proof = cold.missing(SPACE, random.bytes(16 * 400), 0.0, asked_redis=True)
    assert proof.blocks == {MissCause.COLD: 400}, "one that was never here proves the rest"


@pytest.mark.timeout(10)
def test_names_that_are_made_up_to_fall_into_one_set_cost_no_more_than_others() -> None:
    """100,000 at once: one after another would take minutes. What the set cannot hold it has forgotten."""
    absences = Absences(memory_for(0), TTL)
    alike = np.zeros((100_000, 2), dtype=np.uint64)
    alike[:, 0] = 2 * np.arange(len(alike), dtype=np.uint64)
    hashes = alike.tobytes()
    absences(removed(names(1) + hashes, RemovalCause.CAPACITY))
    assert absences.causes(SPACE, names(1), 0.0) == [MissCause.EVICTED]
    causes = absences.causes(SPACE, hashes, 0.0)
    assert causes.count(MissCause.EVICTED) == 8
    assert causes.count(MissCause.UNKNOWN) == len(alike) - 8


@pytest.mark.parametrize(("pool_bytes", "size"), [(0, 256 << 10), (1 << 30, 16 << 20), (1 << 40, 64 << 20)])
def test_memory_is_a_share_of_the_pool_between_bounds(pool_bytes: int, size: int) -> None:
    assert memory_for(pool_bytes) == size


def test_a_cause_is_that_of_the_moment_of_asking() -> None:
    """A request that itself stores what it missed is not told that this was evicted."""
    spec, clock = make_spec("asking"), FakeClock()
    with make_rig(clock, [(spec, (WHOLE,))], RigOptions(redis=DictTier())) as rig:
        rig.write(make_chain(spec, "ab"))
        rig.settle()
        lease = rig.store.acquire("r", make_chain(spec, "abcd"))
        rig.settle()
        assert (lease.blocks, lease.cause) == (2, MissCause.COLD)
        rig.write(make_chain(spec, "abcd"))
        rig.settle()
        rig.store.release(lease)
        (settled,) = rig.events.of(RequestSettled)
        assert settled.miss_tokens == {MissCause.COLD: 8}
