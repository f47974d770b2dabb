"""Room for a block of one size, where the memory is full of blocks of two sizes."""

from __future__ import annotations

import numpy as np
import pytest

from hashing import Root
from kvstore.block import WHOLE, Chain, SlotArray
from kvstore.evict.lru import LRU
from kvstore.index import Space
from kvstore.pool import BlockPool
from kvstore.spec import SLOT_ALIGNMENT
from tests.support.policy_pool import TableMemory

EXTENT_BLOCKS = 8
SMALL, LARGE = bytes(16), b"l" * 16


class Choosy(LRU):
    """Takes nothing in for which something else would have to go."""

    def victims(self, limit: int, wanted: bytes = b"") -> SlotArray:
        return np.zeros(0, dtype=np.int64) if wanted else super().victims(limit)


class Two:
    """A pool of two extents: one full of small blocks, used first, one full of large ones."""

    def __init__(self, policy: type[LRU]) -> None:
        self.pool = BlockPool(TableMemory(EXTENT_BLOCKS, extents=2), policy)
        self.small = self.pool.open_space(SMALL, WHOLE, SLOT_ALIGNMENT, 1)
        self.large = self.pool.open_space(LARGE, WHOLE, 2 * SLOT_ALIGNMENT, 1)
        self.fill(self.large, LARGE, 1.0)
        self.fill(self.small, SMALL, 2.0)
        assert self.large.ready
        assert self.small.ready

    def fill(self, space: Space, namespace: bytes, time: float) -> None:
        rows = chain(namespace, 0).rows(WHOLE)
        slots = self.pool.stage(space, EXTENT_BLOCKS, rows)
        self.pool.commit(slots, rows.slice(0, len(slots)), None, time=time)

    def ask(self, *, selective: bool) -> int:
        """Slots for two more of the large blocks, whose extent is the one that was used longest ago."""
        rows = chain(LARGE, 1).rows(WHOLE)
        return len(self.pool.stage(self.large, 2, rows, selective=selective))


def chain(namespace: bytes, number: int) -> Chain:
    tokens = np.arange(EXTENT_BLOCKS, dtype=np.uint32) + 100 * number
    return Chain.of(Root(namespace, 1, "xxh3_128"), tokens)


def test_what_a_policy_refuses_takes_no_extent_of_another_size() -> None:
    two = Two(Choosy)
    small, large = dict(two.small.ready), dict(two.large.ready)
    assert two.ask(selective=True) == 0
    assert (two.small.ready, two.large.ready) == (small, large)


def test_who_does_not_leave_it_to_the_policy_gets_room_of_its_own_size() -> None:
    two = Two(Choosy)
    small = dict(two.small.ready)
    assert two.ask(selective=False) == 2
    assert two.small.ready == small


@pytest.mark.parametrize("policy", [LRU, Choosy])
def test_where_all_of_its_own_is_held_an_extent_changes_hands(policy: type[LRU]) -> None:
    two = Two(policy)
    held = np.fromiter(two.large.ready.values(), dtype=np.int64)
    two.pool.pin(held, until=9.0)
    assert two.ask(selective=True) == 2
    assert not two.small.ready


def test_a_guaranteed_group_may_refuse_too() -> None:
    pool = BlockPool(TableMemory(EXTENT_BLOCKS), Choosy)
    space = pool.open_space(SMALL, WHOLE, SLOT_ALIGNMENT, 1, group=1)
    pool.guarantee(1, EXTENT_BLOCKS * SLOT_ALIGNMENT)
    rows = chain(SMALL, 0).rows(WHOLE)
    pool.commit(pool.stage(space, len(rows), rows)[:EXTENT_BLOCKS], rows, None, time=1.0)
    kept = dict(space.ready)
    assert len(pool.stage(space, 2, chain(SMALL, 1).rows(WHOLE), selective=True)) == 0
    assert space.ready == kept
    assert len(pool.stage(space, 2, chain(SMALL, 1).rows(WHOLE))) == 2
