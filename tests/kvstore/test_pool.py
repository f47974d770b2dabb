"""Slots through their life, found by hash, freed by leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import WHOLE, BlockRows, Chain, MissCause, Residency
from kvstore.events import RemovalCause
from kvstore.integrity import check_pool
from kvstore.table import SlotState
from tests.support.pools import SPEC, Bench
from tests.support.stores import make_chain, make_spec


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    check_pool(made.pool)


class TestLifeOfASlot:
    def test_a_commit_makes_visible_and_an_eviction_takes_away(self, bench: Bench) -> None:
        rows = bench.rows("abc")
        slots = bench.pool.stage(bench.space, 3, rows)
        assert bench.states(slots) == {SlotState.STAGED}
        assert all(generation % 2 for generation in bench.generations(slots))
        assert bench.match("abc") == 0
        bench.pool.commit(slots, rows, None, time=1.0)
        before = bench.generations(slots)
        assert all(generation % 2 == 0 for generation in before)
        assert bench.match("abc") == 3
        assert bench.pool.evict(bench.space.slot_class, 2) == 2
        assert bench.match("abc") == 1
        after = bench.generations(slots)
        assert [new - old for old, new in zip(before, after, strict=True)] == [0, 1, 1]

    def test_an_abort_leaves_nothing(self, bench: Bench) -> None:
        """LMCache #4991."""
        rows = bench.rows("ab")
        bench.pool.abort(bench.pool.stage(bench.space, 2, rows), rows)
        assert bench.pool.residency(rows) == [Residency.MISS] * 2
        usage = bench.pool.usage()
        assert (usage.staged, usage.free) == (0, usage.reserved)

    def test_a_second_writer_is_told_that_it_is_one(self, bench: Bench) -> None:
        bench.pool.stage(bench.space, 2, bench.rows("ab"))
        assert bench.pool.residency(bench.rows("abc")) == [
            Residency.PENDING,
            Residency.PENDING,
            Residency.MISS,
        ]

    def test_a_quarantined_slot_is_nobodys(self, bench: Bench) -> None:
        rows = bench.rows("ab")
        slots = bench.pool.stage(bench.space, 2, rows)
        bench.pool.quarantine(slots, rows)
        assert bench.pool.residency(rows) == [Residency.MISS] * 2
        everything = bench.pool.stage(bench.space, 1000)
        assert not np.isin(slots, everything).any()
        assert bench.pool.evict(bench.space.slot_class, 1000) == 0
        bench.pool.abort(everything)
        bench.pool.unquarantine(slots)
        assert bench.pool.usage().quarantined == 0
        assert np.isin(slots, bench.pool.stage(bench.space, 1000)).all()

    @pytest.mark.parametrize("step", ["abort", "commit", "unquarantine"])
    def test_a_slot_goes_no_way_that_is_not_in_the_table(self, bench: Bench, step: str) -> None:
        rows, slots = bench.rows("ab"), bench.put("ab")
        steps: dict[str, Callable[[], object]] = {
            "abort": lambda: bench.pool.abort(slots),
            "unquarantine": lambda: bench.pool.unquarantine(slots),
            "commit": lambda: bench.pool.commit(slots, bench.rows("xy"), None, time=1.0),
        }
        with pytest.raises(AssertionError, match="expected slots to be"):
            steps[step]()
        bench.pool = Bench().pool  # the old one is broken, as an assertion says
        assert len(rows) == 2

    def test_a_pin_can_be_given_back_once_only(self, bench: Bench) -> None:
        """LMCache #987 #1034 #1130: a count that is clamped hides who miscounted."""
        slots = bench.put("ab")
        bench.pool.pin(slots, until=9.0)
        bench.pool.unpin(slots)
        with pytest.raises(AssertionError):
            bench.pool.unpin(slots)
        bench.pool.pin(slots, until=9.0)


class TestNaming:
    def test_what_is_there_or_named_by_another_stays_the_callers(self, bench: Bench) -> None:
        named = bench.pool.stage(bench.space, 2, bench.rows("ab"))
        mine = bench.pool.stage(bench.space, 3)
        rows = bench.rows("abc")
        assert bench.pool.commit(mine, rows, None, time=1.0).tolist() == [False, False, True]
        assert bench.pool.commit(named, bench.rows("ab"), None, time=2.0).all()
        assert bench.match("abc") == 3
        assert bench.states(mine[:2]) == {SlotState.STAGED}
        bench.pool.abort(mine[:2])

    def test_a_prompt_that_names_a_block_twice_is_cut_there(self, bench: Bench) -> None:
        """It takes a collision within one chain, and then it must not give two slots one name."""
        rows = renamed(bench.rows("abcd"), block=3, like=bench.rows("ab").hash_at(1))
        slots = bench.pool.stage(bench.space, 4, rows)
        assert len(slots) == 3
        assert bench.pool.commit(slots, rows.slice(0, 3), None, time=1.0).all()
        match = bench.pool.match(rows)
        assert (len(match.slots), match.cause) == (3, MissCause.COLLISION)

    def test_computed_blocks_of_one_name_become_visible_once(self, bench: Bench) -> None:
        rows = renamed(bench.rows("abcd"), block=3, like=bench.rows("ab").hash_at(1))
        slots = bench.pool.stage(bench.space, 4)
        assert bench.pool.commit(slots, rows, None, time=1.0).tolist() == [True, True, True, False]
        bench.pool.abort(slots[3:])

    def test_a_chain_that_runs_in_a_ring_is_followed_once(self, bench: Bench) -> None:
        """Hash and parent agree all the way round; a slot that was twice in a run would be pinned once."""
        ring = renamed(bench.rows("abc"), block=2, like=SPEC.root.digest)
        bench.pool.commit(bench.pool.stage(bench.space, 3, ring), ring, None, time=1.0)
        endless = Chain(SPEC.root, ring.hashes * 3, 36).rows(WHOLE)
        assert len(bench.pool.match(endless).slots) == 3


def renamed(rows: BlockRows, *, block: int, like: bytes) -> BlockRows:
    """The rows with another hash for one block, as a collision makes it."""
    hashes: list[bytes] = [rows.hash_at(each) for each in range(len(rows))]
    hashes[block] = like
    return replace(rows, hashes=b"".join(hashes))


class TestMatching:
    def test_a_write_gets_neighbouring_slots(self, bench: Bench) -> None:
        bench.put("ab")
        slots = bench.put("efghijkl")
        assert (np.diff(slots) == 1).all()

    @given(pieces=st.permutations(range(12)), absent=st.sets(st.integers(0, 11), max_size=3))
    def test_the_run_is_found_however_it_is_scattered(self, pieces: list[int], absent: set[int]) -> None:
        """Runs of neighbours are compared at once; that must equal looking up one by one."""
        bench = Bench()
        rows = bench.rows("abcdefghijkl")
        slots = bench.pool.stage(bench.space, 12)
        for piece, slot in zip(pieces, slots.tolist(), strict=True):
            one = rows.slice(piece, piece + 1)
            bench.pool.commit(np.array([slot]), one, None, time=1.0)
        check_pool(bench.pool)
        found = dict(zip(pieces, slots.tolist(), strict=True))
        bench.pool.discard(np.array([found[each] for each in sorted(absent)], np.int64), RemovalCause.CLEARED)
        check_pool(bench.pool)
        expected = [found[each] for each in range(min(absent, default=12))]
        assert bench.pool.match(rows).slots.tolist() == expected

    def test_an_old_hash_in_a_freed_slot_is_not_followed(self, bench: Bench) -> None:
        bench.put("abcdef")
        bench.pool.evict(bench.space.slot_class, 3)
        assert bench.match("abcdef") == 3

    def test_tokens_are_compared_where_there_is_no_fingerprint(self, bench: Bench) -> None:
        bench.put("abc")
        rows = bench.rows("abc")
        assert rows.tokens is not None
        tokens = rows.tokens.copy()
        tokens[1, 3] += 1
        match = bench.pool.match(replace(rows, tokens=tokens, fingerprints=None))
        assert (len(match.slots), match.cause) == (1, MissCause.COLLISION)

    def test_a_namespace_that_is_not_here_is_cold(self, bench: Bench) -> None:
        match = bench.pool.match(make_chain(make_spec("stranger"), "ab").rows(WHOLE))
        assert (len(match.slots), match.cause) == (0, MissCause.COLD)


class TestEviction:
    def test_what_is_leased_is_never_taken(self, bench: Bench) -> None:
        """LMCache #717 #911 #1686 #4133, vllm #42289."""
        slots = bench.put("abcd")
        bench.pool.pin(slots[:2], until=9.0)
        assert bench.pool.evict(bench.space.slot_class, 1000) == 2
        assert bench.match("abcd") == 2
        assert bench.pool.evict(bench.space.slot_class, 1000) == 0
        bench.pool.unpin(slots[:2])
        assert bench.pool.evict(bench.space.slot_class, 1000) == 2

    def test_heads_outlive_tails(self, bench: Bench) -> None:
        bench.put("abcd")
        bench.put("abxy")
        for left in range(6, -1, -1):
            together = max(bench.match("abcd"), bench.match("abxy"))
            assert together >= left - 2
            bench.pool.evict(bench.space.slot_class, 1)
            check_pool(bench.pool)

    def test_what_new_blocks_hang_from_is_not_taken_for_them(self, bench: Bench) -> None:
        bench.put("abcd")
        for number in range(28):
            bench.put(chr(0x4E00 + number))
        rows = bench.rows("abcdefgh")
        assert bench.pool.usage().free == 0
        slots = bench.pool.stage(bench.space, 4, rows.slice(4, 8))
        assert bench.match("abcd") == 4
        bench.pool.commit(slots, rows.slice(4, 8), None, time=bench.clock())
        assert bench.match("abcdefgh") == 8

    def test_a_full_pool_gives_what_it_has(self, bench: Bench) -> None:
        """LMCache #2942, Mooncake #3331 #403: never spins, never forgets silently."""
        bench.pool.pin(bench.put("abcdefghijklmnopqrst"), until=9.0)
        assert len(bench.pool.stage(bench.space, 100)) == 12
        assert len(bench.pool.stage(bench.space, 100)) == 0

    def test_the_order_does_not_depend_on_the_process(self) -> None:
        def run() -> list[int]:
            bench = Bench()
            for letters in ("abcd", "abxy", "mnop", "abcz"):
                bench.put(letters)
            order: list[int] = []
            while bench.pool.evict(bench.space.slot_class, 1):
                free = np.flatnonzero(bench.pool.extents.state == SlotState.FREE)
                order.extend(each for each in free.tolist() if each not in order)
            return order

        assert run() == run()
