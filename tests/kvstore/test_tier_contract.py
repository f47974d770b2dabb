"""Every sentence of ``kvstore/tiers/base.py``, for every tier. A new tier is one entry of ``CASES``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvstore.block import MissCause, TierName
from kvstore.tiers.base import LoadResult, SaveOutcome, TierMatch, TierStatus
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.null import NullTier
from tests.support.redis_ways import shared_acl, shared_cluster, shared_sentinel, shared_tls, shared_unix
from tests.support.sidecars import Sidecar
from tests.support.stores import (
    SPLIT,
    make_chain,
    make_device,
    make_host,
    make_spec,
    payloads_of,
    pool_folder,
)
from tests.support.tier_cases import (
    CASES,
    SPEC,
    Case,
    checksum,
    flip_in_memory,
    rows_of,
    running_sidecar,
    soon,
)
from tests.support.valkey import shared_redis, shared_valkey

__all__ = [
    "shared_acl",
    "shared_cluster",
    "shared_redis",
    "shared_sentinel",
    "shared_tls",
    "shared_unix",
    "shared_valkey",
]

LONG = 300
"""Blocks of a prompt that spans three segments."""


@pytest.fixture(scope="module")
def shared_sidecar() -> Iterator[Sidecar]:
    with running_sidecar() as made:
        yield made


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with pool_folder() as folder:
        made = request.param(request, folder)
        yield made
        made.tier.close()


def test_what_was_saved_is_matched_and_loaded(case: Case) -> None:
    rows = rows_of("abcd")
    assert case.match(rows) == 0
    assert case.save(rows) == [SaveOutcome.STORED] * 4
    assert case.match(rows) == 4
    case.assert_holds(rows)
    assert case.tier.status() == TierStatus(healthy=True)
    assert case.tier.name in TierName


def test_match_is_the_leading_run(case: Case) -> None:
    rows = rows_of("abcdef")
    case.save(rows.slice(0, 3))
    case.save(rows.slice(4, 6))
    assert case.match(rows) == 3
    assert case.match(rows.slice(3, 6)) == 0
    assert case.match(rows.slice(4, 6)) == (0 if case.shared else 2)
    case.assert_holds(rows.slice(4, 6))


def test_a_match_says_what_ended_it(case: Case) -> None:
    """dynamo #8164 #5565 #3581: "0 cached" can be explained."""
    rows = rows_of("abcd")
    assert case.tier.match(rows, soon()) == TierMatch(0, MissCause.COLD)
    case.save(rows.slice(0, 3))
    assert case.tier.match(rows, soon()) == TierMatch(3, MissCause.COLD)
    assert case.tier.match(rows.slice(0, 3), soon()) == TierMatch(3, None)
    assert case.tier.match(rows.slice(3, 3), soon()) == TierMatch(0, None)


def test_match_changes_nothing(case: Case) -> None:
    rows = rows_of("abc")
    case.save(rows)
    assert [case.match(rows_of("abcx")) for _ in range(3)] == [3] * 3
    assert case.match(rows_of("xyz")) == 0
    case.assert_holds(rows)


def test_a_missing_block_in_the_middle_is_a_miss_and_the_others_are_loaded(case: Case) -> None:
    """LMCache #3388: a failed load says exactly which blocks failed."""
    rows = rows_of("abcde")
    case.save(rows.slice(0, 2))
    case.save(rows.slice(3, 5))
    result, loaded = case.load(rows)
    assert [cause is None for cause in result.causes] == [True, True, False, True, True]
    assert result.causes[2] in (MissCause.COLD, MissCause.UNKNOWN)
    expected = payloads_of(rows)
    assert all(loaded[block].tobytes() == expected[block].tobytes() for block in (0, 1, 3, 4))


def test_a_collision_in_the_block_itself_is_a_miss_and_stays(case: Case) -> None:
    """vllm #12621 #54727, aibrix #749: what collides is never another prompt's KV."""
    rows, other = rows_of("ab"), rows_of("aB")
    assert rows.hashes == other.hashes
    case.save(rows)
    assert case.load(other)[0].causes == [None, MissCause.COLLISION]
    case.assert_holds(rows)
    if case.local:
        assert case.match(other) == 1
        assert case.save(other)[1] is SaveOutcome.REFUSED
        case.assert_holds(rows)


def test_a_collision_in_an_ancestor_is_a_miss_and_stays(case: Case) -> None:
    """Hash, parent and tokens of block 1 agree: only the fingerprint knows that block 0 was another."""
    rows, other = rows_of("ab"), rows_of("Ab")
    case.save(rows)
    result, _ = case.load(other.slice(1, 2))
    assert result.causes == [MissCause.COLLISION]
    case.assert_holds(rows)


def test_who_knows_only_hashes_is_served_by_hash_and_parent(case: Case) -> None:
    rows = rows_of("abc")
    case.save(rows)
    unknown = replace(rows, tokens=None, fingerprints=None)
    assert case.match(unknown) == 3
    result, loaded = case.load(unknown)
    assert result.causes == [None] * 3
    assert [each.tobytes() for each in loaded] == [each.tobytes() for each in payloads_of(rows)]
    elsewhere = replace(unknown, parents=bytes(len(rows.parents)))
    assert case.load(elsewhere)[0].causes == [MissCause.COLLISION] * 3


@pytest.mark.parametrize("size", [1, 1023, 1025, 4096])
def test_a_destination_of_another_size_gets_nothing_and_costs_nothing(case: Case, size: int) -> None:
    rows = rows_of("ab")
    case.save(rows)
    assert case.load(rows, size)[0].causes == [MissCause.COLLISION] * 2
    case.assert_holds(rows)


def test_a_save_copies(case: Case) -> None:
    rows = rows_of("ab")
    payloads = [payload.copy() for payload in payloads_of(rows)]
    case.save(rows, payloads)
    for payload in payloads:
        payload[:] = 0
    case.assert_holds(rows)


def test_a_block_that_is_there_may_be_saved_again(case: Case) -> None:
    rows = rows_of("abc")
    case.save(rows.slice(0, 2))
    outcomes = case.save(rows)
    assert set(outcomes[:2]) <= {SaveOutcome.PRESENT, SaveOutcome.STORED}
    assert outcomes[2] is SaveOutcome.STORED
    case.assert_holds(rows)


def test_a_flipped_byte_is_found_once_and_then_gone(case: Case) -> None:
    """LMCache #4533 #4558."""
    rows = rows_of("abc")
    case.save(rows)
    case.flip(rows, 1)
    assert case.load(rows)[0].causes == [None, MissCause.CORRUPT, None]
    if case.shared:
        assert case.load(rows)[0].causes == [None, MissCause.CORRUPT, None]
        return
    assert case.match(rows) == 1
    assert case.load(rows)[0].causes[1] in (MissCause.COLD, MissCause.UNKNOWN)
    case.assert_holds(rows.slice(2, 3))


def test_two_namespaces_with_one_hash_chain_do_not_meet(case: Case) -> None:
    """An engine's own hashes are not rooted in the namespace: it keeps two models apart all the same."""
    rows = rows_of("abc")
    other = replace(rows, namespace=make_spec("other").root.digest)
    case.save(rows)
    assert case.match(other) == 0
    assert None not in case.load(other)[0].causes
    assert case.tier.discard(other, soon()) == 0
    case.save(other)
    case.assert_holds(rows)
    case.assert_holds(other)


def test_two_shards_do_not_meet(case: Case) -> None:
    first, second = (make_chain(SPEC, "abc").rows(shard) for shard in SPLIT)
    case.save(first)
    assert case.match(second) == 0
    assert None not in case.load(second)[0].causes
    assert case.tier.discard(second, soon()) == 0
    case.save(second)
    case.assert_holds(first)
    case.assert_holds(second)


def test_discard_forgets_and_counts(case: Case) -> None:
    rows = rows_of("abcd")
    case.save(rows)
    if case.shared:
        assert case.tier.discard(rows, soon()) == 0
        case.assert_holds(rows)
        return
    assert case.tier.discard(rows.slice(2, 4), soon()) == 2
    assert case.match(rows) == 2
    assert case.tier.discard(rows, soon()) == 2
    assert case.match(rows) == 0
    assert case.tier.discard(rows, soon()) == 0


def test_nothing_asked_is_nothing_answered(case: Case) -> None:
    empty = rows_of("")
    assert case.match(empty) == 0
    assert case.save(empty) == []
    assert case.load(empty)[0] == LoadResult()
    assert case.tier.discard(empty, soon()) == 0


def test_prompts_longer_than_a_segment(case: Case) -> None:
    rows = rows_of("".join(chr(0x4E00 + number) for number in range(LONG)))
    assert case.save(rows) == [SaveOutcome.STORED] * LONG
    assert case.match(rows) == LONG
    case.assert_holds(rows)
    if not case.shared:
        case.tier.discard(rows.slice(200, 201), soon())
        assert case.match(rows) == 200


def test_a_deadline_that_has_passed_is_an_outcome(case: Case) -> None:
    rows = rows_of("ab")
    case.save(rows)
    past = time.monotonic() - 1
    began = time.monotonic()
    assert case.tier.match(rows, past) in (TierMatch(2, None), TierMatch(0, MissCause.TIMEOUT))
    destinations = [np.zeros(SPEC.payload_bytes_on(), dtype=np.uint8) for _ in range(2)]
    result = case.tier.load(rows, destinations, past)
    assert set(result.causes) <= {None, MissCause.TIMEOUT}
    outcomes = case.tier.save(rows, payloads_of(rows), [checksum(each) for each in payloads_of(rows)], past)
    assert set(outcomes) <= {SaveOutcome.STORED, SaveOutcome.PRESENT, SaveOutcome.TIMEOUT}
    assert case.tier.discard(rows.slice(1, 2), past) in (0, 1)
    assert time.monotonic() - began < 1


def test_close_is_idempotent(case: Case) -> None:
    case.save(rows_of("a"))
    case.tier.close()
    case.tier.close()


class TestMemory:
    """What the tiers with a pool promise beyond that."""

    @pytest.fixture(params=["device", "host"])
    def tier(self, request: pytest.FixtureRequest) -> Iterator[MemoryTier]:
        with pool_folder() as folder:
            tier: MemoryTier
            if request.param == "device":
                tier = make_device(time.monotonic, extents=1, extent_bytes=8 << 10)
            else:
                tier = make_host(folder, time.monotonic, extents=1, extent_bytes=12 << 10)
            yield tier
            tier.close()

    @staticmethod
    def save(tier: MemoryTier, letters: str) -> list[SaveOutcome]:
        return Case(tier, flip_in_memory(tier)).save(rows_of(letters))

    def test_heads_are_saved_before_tails(self, tier: MemoryTier) -> None:
        """LMCache #2942, Mooncake #3331 #403: a full pool refuses with a cause, at once."""
        outcomes = self.save(tier, "abcdefghijkl")
        assert outcomes == [SaveOutcome.STORED] * 8 + [SaveOutcome.FULL] * 4
        assert tier.match(rows_of("abcdefghijkl"), soon()) == TierMatch(8, MissCause.COLD)

    def test_a_match_is_no_use(self, tier: MemoryTier) -> None:
        """Mooncake #3599 #2187: probes neither pin nor keep what nobody uses."""
        self.save(tier, "abcd")
        self.save(tier, "wxyz")
        for _ in range(3):
            assert tier.match(rows_of("abcd"), soon()).blocks == 4
        self.save(tier, "mn")
        assert tier.match(rows_of("abcd"), soon()).blocks == 2
        assert tier.match(rows_of("wxyz"), soon()).blocks == 4

    def test_what_is_held_is_not_discarded(self, tier: MemoryTier) -> None:
        self.save(tier, "abc")
        slots = tier.pool.match(rows_of("ab")).slots
        tier.pool.pin(slots, until=time.monotonic() + 60)
        assert tier.discard(rows_of("abc"), soon()) == 1
        assert tier.match(rows_of("abc"), soon()).blocks == 2
        tier.pool.unpin(slots)
        assert tier.discard(rows_of("abc"), soon()) == 2

    @pytest.mark.parametrize("size", [64, 1088, 9 << 10])
    def test_a_payload_of_another_size_is_refused(self, tier: MemoryTier, size: int) -> None:
        """One that is longer than its slot would overwrite its neighbour."""
        self.save(tier, "ab")
        rows = rows_of("abcd").slice(2, 4)
        payload = np.full(size, 0xEE, dtype=np.uint8)
        assert tier.save(rows, [payload] * 2, [checksum(payload)] * 2, soon()) == [SaveOutcome.REFUSED] * 2
        Case(tier, flip_in_memory(tier)).assert_holds(rows_of("ab"))

    def test_a_payload_that_fits_no_extent_is_refused(self, tier: MemoryTier) -> None:
        payload = np.zeros(64 << 10, dtype=np.uint8)
        assert tier.save(rows_of("a"), [payload], [checksum(payload)], soon()) == [SaveOutcome.REFUSED]

    def test_blocks_without_tokens_are_refused(self, tier: MemoryTier) -> None:
        rows = replace(rows_of("a"), tokens=None, fingerprints=None)
        payload = np.zeros(1024, dtype=np.uint8)
        assert tier.save(rows, [payload], [checksum(payload)], soon()) == [SaveOutcome.REFUSED]


def test_the_null_tier_holds_nothing() -> None:
    tier = NullTier(TierName.REDIS)
    rows = rows_of("ab")
    assert tier.name is TierName.REDIS
    assert tier.save(rows, payloads_of(rows), [0, 0], soon()) == [SaveOutcome.REFUSED] * 2
    assert tier.match(rows, soon()) == TierMatch(0, MissCause.COLD)
    assert tier.match(rows.slice(0, 0), soon()) == TierMatch(0, None)
    assert tier.load(rows, payloads_of(rows), soon()) == LoadResult([MissCause.COLD] * 2, [0, 0])
    assert tier.discard(rows, soon()) == 0
    assert tier.status() == TierStatus(healthy=True, reason="none is configured")
    tier.close()
    tier.close()
