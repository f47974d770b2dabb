"""The account of saves over several ranks, without an engine: pins, verdicts, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.connectors.vllm.groups import NULL_BLOCK
from kvstore.connectors.vllm.messages import Progress
from kvstore.connectors.vllm.saves import Prefix, Saves
from tests.vllm.test_identity import BASE


@dataclass
class Pool:
    """Reference counts, as vLLM's pool of blocks keeps them."""

    blocks: Sequence[int] = field(default_factory=lambda: list(range(40)))
    counts: dict[int, int] = field(default_factory=dict)

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.counts[block] = self.counts.get(block, 0) + 1

    def free_blocks(self, ordered_blocks: Sequence[int]) -> None:
        for block in ordered_blocks:
            self.counts[block] -= 1

    @property
    def pinned(self) -> set[int]:
        return {block for block, count in self.counts.items() if count}


def make(ranks: int = 2, width: int = 1) -> tuple[Saves, Pool]:
    saves, pool = Saves(ranks, width), Pool()
    saves.bind(pool)
    return saves, pool


def prefix(*block_ids: int) -> Prefix:
    return Prefix("r", BASE.spec(), None, b"", list(block_ids))


def computed(job_id: int, ranks: int = 1) -> Progress:
    progress = Progress()
    progress.computed[job_id] = ranks
    return progress


def ended(job_id: int, ranks: int = 1) -> Progress:
    progress = Progress()
    progress.ended[job_id] = ranks
    return progress


def test_blocks_stay_pinned_until_the_last_rank_is_through() -> None:
    saves, pool = make()
    assert saves.begin(prefix(3, 4, 5), 1)
    [order], _ = saves.take_orders()
    assert (order.first_block, order.block_ids) == (1, [3, 4, 5])
    assert pool.pinned == {4, 5}
    saves.update(ended(order.job_id), set())
    assert pool.pinned == {4, 5}
    saves.update(ended(order.job_id), set())
    assert not pool.pinned
    assert len(saves) == 0


def test_a_save_is_published_only_after_every_rank_has_computed_it() -> None:
    """TP ranks never disagree (LMCache #1467 #1379): both publish, or none does."""
    saves, _ = make()
    saves.begin(prefix(3, 4), 0)
    [order], verdicts = saves.take_orders()
    assert not verdicts
    both = computed(order.job_id)
    both.add(computed(order.job_id))
    saves.update(both, set())
    assert saves.take_orders() == ([], {order.job_id: True})


def test_what_was_computed_from_a_failed_load_of_any_rank_is_dropped_on_all() -> None:
    saves, _ = make()
    saves.begin(prefix(3, 4, 5), 2)
    [order], _ = saves.take_orders()
    # Block 3 is not among those that are saved, but they were computed from it.
    assert saves.update(computed(order.job_id, 2), {3}) == [("r", 2)]
    assert saves.take_orders() == ([], {order.job_id: False})


def test_an_unrelated_failure_drops_nothing() -> None:
    saves, _ = make()
    saves.begin(prefix(3, 4, 5), 2)
    [order], _ = saves.take_orders()
    assert not saves.update(computed(order.job_id, 2), {9})
    assert saves.take_orders() == ([], {order.job_id: True})


def test_at_most_half_of_the_engines_blocks_are_pinned() -> None:
    saves, pool = make()
    assert saves.begin(prefix(*range(1, 21)), 0)
    assert not saves.begin(prefix(30), 0)
    assert pool.pinned == set(range(1, 21))
    [order], _ = saves.take_orders()
    saves.update(ended(order.job_id, 2), set())
    assert saves.begin(prefix(30), 0)


def test_blocks_of_all_groups_of_layers_are_pinned() -> None:
    saves, pool = make(ranks=1, width=3)
    assert saves.begin(prefix(1, 11, 21, 2, 12, 22), 1)
    [order], _ = saves.take_orders()
    assert pool.pinned == {2, 12, 22}
    saves.update(ended(order.job_id), set())
    assert not pool.pinned


def test_what_a_window_has_let_go_of_is_left_out() -> None:
    """A block of the store has all groups of layers, and what follows a gap is right by itself."""
    saves, pool = make(ranks=1, width=2)
    assert saves.begin(prefix(1, 11, 2, NULL_BLOCK, 3, 13), 0)
    [order], _ = saves.take_orders()
    assert (order.first_block, pool.pinned) == (2, {3, 13})
    assert saves.begin(prefix(1, 11, 2, NULL_BLOCK), 0), "nothing is left, which is no failure"
    assert saves.take_orders() == ([], {})
