"""Policies under a pool whose blocks come and go in every way, with hashes and with made-up names."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hashing import Root
from kvstore.block import WHOLE, BlockRows, Chain, Residency, SlotArray
from kvstore.events import RemovalCause
from kvstore.evict.base import Touch
from kvstore.evict.expiry import Expiry
from kvstore.evict.reuse import Reuse
from kvstore.hints import Hints
from kvstore.index import Space
from kvstore.integrity import check_pool
from kvstore.pool import BlockPool
from kvstore.simulate import MakeEvictor
from kvstore.spec import SLOT_ALIGNMENT
from kvstore.stamps import TableAges
from tests.kvstore.test_policies import ONLINE
from tests.support.policy_pool import TableMemory

SPACES = {b"a" * 16: 1, b"b" * 16: 1, b"c" * 16: 2}
"""Namespaces, and how many of the smallest slots one of their blocks takes."""
ROOT = Root(b"a" * 16, 1, "xxh3_128")
SAID = (Hints(), Hints(ended=True), Hints(priority=5), Hints(idle_seconds=7.0))


def named(root: Root, letters: bytes) -> BlockRows:
    """A prompt in which a letter is a block's hash, wherever it stands."""
    hashes = b"".join(bytes([letter] * 16) for letter in letters)
    nothing = np.zeros(len(letters), dtype=np.uint64)
    return Chain(root, hashes, len(letters), nothing.astype(np.uint32)[:, None], nothing).rows(WHOLE)


class Traffic:
    """A small pool, and a client of it that does anything; ``made_up``: by the same few names."""

    def __init__(self, make_evictor: MakeEvictor, random: Random, *, made_up: bool) -> None:
        self.pool = BlockPool(TableMemory(12, extents=2), make_evictor)
        self.expiry = Expiry(25.0, self.pool.occupancy, TableAges(self.pool.extents), slice_slots=5)
        self.random, self.made_up, self.now = random, made_up, 0.0
        for name, slots in SPACES.items():
            self.pool.open_space(name, WHOLE, slots * SLOT_ALIGNMENT, 1)
        self.written: list[tuple[SlotArray, BlockRows]] = []
        self.pinned: list[SlotArray] = []

    def prompt(self) -> BlockRows:
        root = Root(self.random.choices(list(SPACES), (8, 1, 1))[0], 1, "xxh3_128")
        letters = self.random.choices(range(30 if self.made_up else 3), k=self.random.randint(1, 8))
        tokens = np.array(letters, dtype=np.uint32)
        if not self.made_up:
            return Chain.of(root, tokens).rows(WHOLE)
        return named(root, bytes(1 + letter for letter in letters))

    def step(self) -> None:
        self.now += self.random.choice((0.0, 0.5, 1.0, 5.0))
        often = (self.ask, self.write, self.finish)
        seldom = (self.hold, self.let_go, self.hint, self.lose, self.evict, self.expire)
        self.random.choice(often if self.random.random() < 0.8 else seldom)()
        if self.random.random() < 0.01:
            self.clear()
        self.pool.removed.clear()

    def ask(self) -> None:
        rows = self.prompt()
        self.pool.touch(*self._touch(rows))
        self.write(rows)

    def hint(self) -> None:
        self.pool.hint(*self._touch(self.prompt()))

    def write(self, rows: BlockRows | None = None) -> None:
        """Perhaps without having asked, or with blocks before it that nobody has."""
        rows = self.prompt() if rows is None else rows
        first = self.random.randrange(len(rows)) if self.random.random() < 0.3 else 0
        wanted = [at for at, is_ in enumerate(self.pool.residency(rows)) if is_ is Residency.MISS]
        rows = rows.pick(np.array([at for at in wanted if at >= first], dtype=np.int64))
        space = self.pool.space(rows.namespace, WHOLE)
        assert space is not None
        slots = self.pool.stage(space, len(rows), rows, selective=self.random.random() < 0.5)
        self.written.append((slots, rows.slice(0, len(slots))))

    def finish(self) -> None:
        if self.written:
            slots, rows = self.written.pop(self.random.randrange(len(self.written)))
            assert self.pool.commit(slots, rows, None, time=self.now).all()

    def hold(self) -> None:
        self.pinned.append(self.pool.match(self.prompt()).slots)
        self.pool.pin(self.pinned[-1], self.now)

    def let_go(self) -> None:
        if self.pinned:
            self.pool.unpin(self.pinned.pop(self.random.randrange(len(self.pinned))))

    def lose(self) -> None:
        for space in self.pool.spaces():
            if space.ready:
                slot = self.random.choice(list(space.ready.values()))
                self.pool.discard(np.array([slot]), RemovalCause.CORRUPT)

    def clear(self) -> None:
        space = self.random.choice(self.pool.spaces())
        self.pool.discard(np.fromiter(space.ready.values(), dtype=np.int64), RemovalCause.CLEARED)
        self.pool.regroup(space, self.random.randrange(2))

    def evict(self) -> None:
        self.pool.evict(self.random.choice(self.pool.spaces()).slot_class, self.random.randint(1, 4))

    def expire(self) -> None:
        if self.expiry.behind(self.now):
            self.pool.expire(self.expiry.due(self.now))

    def _touch(self, rows: BlockRows) -> tuple[Space, Touch]:
        space, run = self.pool.space(rows.namespace, WHOLE), self.pool.match(rows).slots
        assert space is not None
        return space, Touch(rows.hashes, run, len(run), self.now, self.random.choice(SAID))


@pytest.mark.parametrize("made_up", [False, True])
@pytest.mark.parametrize("policy", ONLINE)
def test_whatever_happens_books_balance_and_in_the_end_all_can_go(policy: str, *, made_up: bool) -> None:
    """A policy that takes a block for another one's frees it twice; one that forgets it keeps it for ever."""
    for seed in range(6):
        traffic = Traffic(ONLINE[policy], Random(seed), made_up=made_up)
        for number in range(150):
            traffic.step()
            if number % 10 == 0:
                check_pool(traffic.pool)
        pool = traffic.pool
        for slots, rows in traffic.written:
            pool.abort(slots, rows)
        for slots in traffic.pinned:
            pool.unpin(slots)
        for space in pool.spaces():
            pool.evict(space.slot_class, 1000, pool.group_of(space))
        check_pool(pool)
        assert not pool.usage().ready, f"blocks that cannot go, with seed {seed}"


class Prompts:
    """A pool under ``reuse``, in which prompts of letters are asked for and written."""

    def __init__(self) -> None:
        self.pool = BlockPool(TableMemory(16), Reuse)
        self.space = self.pool.open_space(b"a" * 16, WHOLE, SLOT_ALIGNMENT, 1)

    def rows(self, prompt: str) -> BlockRows:
        return Chain.of(ROOT, np.array([ord(letter) for letter in prompt], dtype=np.uint32)).rows(WHOLE)

    def ask(self, prompt: str) -> None:
        rows = self.rows(prompt)
        run = self.pool.match(rows).slots
        self.pool.touch(self.space, Touch(rows.hashes, run, len(run), 1.0))

    def write(self, prompt: str) -> None:
        self.write_rows(self.rows(prompt))

    def write_rows(self, rows: BlockRows) -> None:
        missing = [at for at, is_ in enumerate(self.pool.residency(rows)) if is_ is Residency.MISS]
        rows = rows.pick(np.array(missing, dtype=np.int64))
        self.pool.commit(self.pool.stage(self.space, len(rows), rows), rows, None, time=1.0)

    def evict_all(self) -> None:
        self.pool.evict(self.space.slot_class, 1000)
        check_pool(self.pool)
        assert not self.space.ready


def test_what_was_out_of_reach_is_used_again_once_the_block_before_it_is_back() -> None:
    prompts = Prompts()
    prompts.ask("abc")
    prompts.write("abc")
    prompts.pool.discard(prompts.pool.match(prompts.rows("a")).slots, RemovalCause.CORRUPT)
    prompts.write("a")
    prompts.ask("abc")
    prompts.evict_all()


def test_what_was_brought_behind_a_prompt_that_lost_its_end_is_not_forgotten_with_it() -> None:
    """As a prefetch brings it, which is no request; then the prompt itself comes back."""
    prompts = Prompts()
    prompts.ask("abcdef")
    prompts.write("abcdef")
    prompts.pool.evict(prompts.space.slot_class, 3)
    prompts.write("abcxyz")
    prompts.ask("abcdef")
    prompts.evict_all()


def test_what_leaves_with_its_parent_need_not_have_waited_for_it() -> None:
    """Others do: they name a parent that stands at another place of a prompt."""
    prompts = Prompts()
    for letters in (b"pq", b"xypr"):
        prompts.write_rows(named(ROOT, letters))
    everything = np.fromiter(prompts.space.ready.values(), dtype=np.int64)
    assert prompts.pool.discard(everything, RemovalCause.CLEARED) == 5
    check_pool(prompts.pool)
