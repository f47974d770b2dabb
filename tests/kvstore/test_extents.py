"""Extents handed from one slot size to another, and blocks that lose their parents by it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.block import WHOLE, BlockRows, Chain, Residency
from kvstore.errors import NamespaceError, PoolError
from kvstore.events import RemovalCause
from kvstore.integrity import check_pool
from tests.support.pools import OTHER, SPEC, Bench
from tests.support.stores import FakeClock, make_chain, make_device, make_spec


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    check_pool(made.pool)


class TestOrphans:
    def test_a_parent_that_returns_finds_its_children(self, bench: Bench) -> None:
        slots = bench.put("abcd")
        bench.pool.discard(slots[1:2], RemovalCause.CORRUPT)
        check_pool(bench.pool)
        assert bench.removals() == [(RemovalCause.CORRUPT, 1)]
        assert bench.match("abcd") == 1
        bench.put("abcd")
        assert bench.match("abcd") == 4

    def test_siblings_may_leave_together(self, bench: Bench) -> None:
        leaving = np.array([bench.put("ab")[1], bench.put("ac")[1]])
        assert bench.pool.discard(leaving, RemovalCause.CLEARED) == 2
        check_pool(bench.pool)
        assert bench.pool.evict(bench.space.slot_class, 1) == 1

    def test_orphans_go_first(self, bench: Bench) -> None:
        bench.put("wxyz")
        slots = bench.put("abcd")
        bench.pool.discard(slots[:1], RemovalCause.CORRUPT)
        bench.pool.evict(bench.space.slot_class, 3)
        assert bench.match("wxyz") == 4
        assert bench.pool.residency(bench.rows("abcd")) == [Residency.MISS] * 4

    def test_thousands_of_orphans_of_one_parent_are_evicted_in_linear_time(self) -> None:
        """LMCache #418 #4563: with a list of them, this takes seconds."""
        bench = Bench(extents=1, extent_bytes=4 << 20)
        space = bench.open(make_spec("tiny", payload_bytes=64))
        root = bench.put("a", make_spec("tiny", payload_bytes=64))
        children = 20_000
        rows = children_of(make_chain(make_spec("tiny", payload_bytes=64), "a"), children)
        slots = bench.pool.stage(space, children)
        bench.pool.commit(slots, rows, None, time=1.0)
        bench.pool.discard(root, RemovalCause.CORRUPT)
        began = time.process_time()  # of this process: the machine may be busy
        assert bench.pool.evict(space.slot_class, children) == children
        assert time.process_time() - began < 2.0
        check_pool(bench.pool)


def children_of(chain: Chain, count: int) -> BlockRows:
    """Second blocks of ``count`` prompts with one beginning."""
    numbers = np.arange(count, dtype="<u8")
    hashes = np.stack((numbers, numbers + np.uint64(1 << 40)), axis=1).tobytes()
    return BlockRows(
        chain.namespace,
        WHOLE,
        hashes,
        chain.hashes * count,
        chain.hashes * count,
        np.ones(count, dtype=np.uint32),
        np.repeat(numbers.astype(np.uint32)[:, None], chain.root.block_size, axis=1),
        numbers,
    )


class TestExtents:
    def test_the_pool_grows_as_it_is_used(self, bench: Bench) -> None:
        assert bench.pool.usage().reserved == 0
        bench.put("a")
        assert bench.pool.usage().reserved == 16 << 10

    def test_the_colder_extent_changes_hands(self, bench: Bench) -> None:
        bench.put("abcdefghijklmnop")
        bench.put("qrstuvwx")
        assert bench.put("ab", OTHER).size == 2
        assert bench.match("abcdefghijklmnop") == 0
        assert bench.match("qrstuvwx") == 8
        assert bench.removals() == [(RemovalCause.RECLAIMED, 16)]

    def test_a_warmer_extent_stays_where_it_is(self, bench: Bench) -> None:
        bench.put("abcdefghijklmnop")
        bench.put("wxyz", OTHER)
        bench.put("qr")
        assert bench.match("wxyz", OTHER) == 4
        assert bench.match("abcdefghijklmnop") == 14

    def test_an_extent_that_changes_hands_has_another_generation(self, bench: Bench) -> None:
        """local-inference-lab/vllm #480: an old lease must not read what is there now."""
        bench.put("abcdefghijklmnop")
        old = bench.pool.extents.containing(int(bench.put("a")[0]))
        bench.put("qrstuvwxyzabcdef")
        bench.put("mnop", OTHER)
        new = next(each for each in bench.pool.extents.extents() if each.number == old.number)
        assert new.generation > old.generation

    @pytest.mark.parametrize("use", ["leased", "staged", "quarantined"])
    def test_an_extent_in_use_does_not(self, bench: Bench, use: str) -> None:
        if use == "leased":
            bench.pool.pin(bench.put("!"), until=9.0)
        else:
            taken = bench.pool.stage(bench.space, 1)
            if use == "quarantined":
                bench.pool.quarantine(taken)
        bench.put("abcdefghijklmno")
        bench.put("qrst")
        bench.put("xy", OTHER)
        assert bench.match("abcdefghijklmno") == 15, "the extent is colder, and one of its slots is in use"
        assert bench.match("qrst") == 0

    def test_what_hangs_below_a_reclaimed_block_is_found_again_with_it(self, bench: Bench) -> None:
        bench.put("abcdefghijklmnop")
        bench.put("abcdefghijklmnopqrst")
        bench.put("x", OTHER)
        assert bench.match("abcdefghijklmnopqrst") == 0
        check_pool(bench.pool)
        bench.pool.evict(bench.other.slot_class, 1)
        bench.pool.evict(bench.space.slot_class, 2)
        check_pool(bench.pool)

    def test_slot_ids_do_not_run_away_when_extents_change_hands(self, bench: Bench) -> None:
        for _ in range(20):
            bench.put("abcdefghijklmnopqrstuvwxyz")
            bench.pool.evict(bench.space.slot_class, 1000)
            bench.put("abcdefgh", OTHER)
            bench.pool.evict(bench.other.slot_class, 1000)
        assert bench.pool.extents.slots <= 2 * (16 + 4)

    def test_a_slot_that_fits_no_extent_is_an_error_with_numbers(self, bench: Bench) -> None:
        with pytest.raises(PoolError, match=r"17000 bytes does not fit an extent of 16384 bytes; raise"):
            bench.open(make_spec("wide", payload_bytes=17000))

    def test_a_namespace_cannot_change_the_size_of_its_blocks(self, bench: Bench) -> None:
        """dynamo #1233 #659 are of this kind: two sizes under one name are garbage."""
        with pytest.raises(
            NamespaceError, match=r"4 tokens and 1024 bytes .* not of 4 tokens and 2048 bytes"
        ):
            bench.pool.open_space(SPEC.root.digest, WHOLE, 2048, 4)

    def test_a_pool_without_an_extent_is_an_error_with_numbers(self) -> None:
        with pytest.raises(
            PoolError, match=r"pool of 0 bytes holds no extent of 16384 bytes; raise its size"
        ):
            make_device(FakeClock(), extents=0, extent_bytes=16 << 10)
