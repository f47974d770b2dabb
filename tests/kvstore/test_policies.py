"""What holds for every online policy, and each of the known ones against a list that is searched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hashing import Root
from kvstore.assemble import open_host
from kvstore.block import WHOLE, Chain
from kvstore.config import Config
from kvstore.evict.arc import ARC
from kvstore.evict.base import Evictor, Occupancy
from kvstore.evict.lfu import LFU
from kvstore.evict.lru import LRU
from kvstore.evict.reuse import Reuse
from kvstore.evict.s3fifo import S3FIFO
from kvstore.simulate import POLICIES
from tests.support.policy_forest import SLOTS, Forest, prefixes
from tests.support.policy_models import SlowARC, SlowLFU, SlowS3FIFO

MakeEvictor = Callable[[Occupancy], Evictor]
Slow = SlowLFU | SlowS3FIFO | SlowARC

ONLINE: dict[str, MakeEvictor] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO, "arc": ARC, "reuse": Reuse}
MODELS: dict[str, Callable[[], Slow]] = {"lfu": SlowLFU, "s3fifo": SlowS3FIFO, "arc": SlowARC}

prompts = st.text("abc", min_size=1, max_size=6)
steps = st.lists(st.tuples(prompts, st.integers(0, 4)), max_size=40)


@pytest.mark.parametrize("policy", MODELS)
@given(asked=steps)
@example(
    # More than fits, so that room has to be made before the last prompt.
    asked=[
        (prompt, 0)
        for prompt in ("ca", "aaca", "abca", "bcaa", "aaaaa", "baaaa", "bbaaa", "aabaaa", "abaaaa", "abbaaa")
    ]
    + [("acaaaa", 0)]
)
def test_the_order_is_that_of_the_slow_model(policy: str, asked: list[tuple[str, int]]) -> None:
    forest, model = Forest(ONLINE[policy]), MODELS[policy]()
    for prompt, evictions in asked:
        names = prefixes(prompt)
        missing = sum(name not in forest.slot for name in names)
        for _ in range(len(forest.slot) + missing - SLOTS):
            expected = model.victim(forest.leaves())
            assert forest.evict(1) == [expected]
        model.request(names, forest.request(prompt))
        for _ in range(min(evictions, len(forest.slot))):
            expected = model.victim(forest.leaves())
            assert forest.evict(1) == [expected]


@pytest.mark.parametrize("policy", ONLINE)
@given(asked=steps, picks=st.lists(st.integers(0, SLOTS - 1), max_size=5))
def test_everything_goes_that_neither_is_pinned_nor_leads_to_what_is(
    policy: str, asked: list[tuple[str, int]], picks: list[int]
) -> None:
    forest = Forest(ONLINE[policy])
    for prompt, evictions in asked:
        forest.request(prompt)
        forest.evict(evictions)
    resident = sorted(forest.slot)
    pinned = {resident[pick % len(resident)] for pick in picks if resident}
    for name in pinned:
        forest.pin(name)
    kept = {name for name in forest.slot if any(each.startswith(name) for each in pinned)}
    forest.evict(SLOTS)
    assert set(forest.slot) == kept
    for name in pinned:
        forest.unpin(name)
    forest.evict(SLOTS)
    assert not forest.slot


@pytest.mark.parametrize("policy", ONLINE)
@given(asked=steps)
def test_the_numbers_of_slots_decide_nothing(policy: str, asked: list[tuple[str, int]]) -> None:
    upwards, downwards = Forest(ONLINE[policy]), Forest(ONLINE[policy], backwards=True)
    for prompt, evictions in asked:
        assert upwards.request(prompt) == downwards.request(prompt)
        assert upwards.evict(evictions) == downwards.evict(evictions)


@pytest.mark.parametrize("policy", ONLINE)
@given(asked=steps, picks=st.lists(st.integers(0, SLOTS - 1), max_size=4))
def test_what_cannot_be_reached_goes_before_anything_else(
    policy: str, asked: list[tuple[str, int]], picks: list[int]
) -> None:
    forest = Forest(ONLINE[policy])
    for prompt, evictions in asked:
        forest.request(prompt)
        forest.evict(evictions)
    for pick in picks:
        if forest.slot:
            forest.lose(sorted(forest.slot)[pick % len(forest.slot)])
    lost = {name for name in forest.slot if any(each not in forest.slot for each in prefixes(name))}
    assert set(forest.evict(len(lost))) == lost
    forest.evict(SLOTS)
    assert not forest.slot


@pytest.mark.parametrize("policy", ONLINE)
def test_orphans_go_tail_first(policy: str) -> None:
    forest = Forest(ONLINE[policy])
    forest.request("xyz")
    forest.request("abcd")
    forest.lose("ab")
    assert forest.evict(2) == ["abcd", "abc"]


@pytest.mark.parametrize("policy", ONLINE)
def test_a_block_that_is_gone_is_not_offered(policy: str) -> None:
    forest = Forest(ONLINE[policy])
    forest.request("ab")
    forest.request("c")
    forest.lose("ab")
    assert set(forest.evict(5)) == {"a", "c"}


@pytest.mark.parametrize("policy", get_args(Config.model_fields["eviction_policy"].annotation))
def test_a_server_runs_every_policy_that_can_be_set(policy: str, tmp_path: Path) -> None:
    settings = {
        "eviction_policy": policy,
        "pool_path": tmp_path / "pool",
        "pool_bytes": 65536,
        "extent_bytes": 65536,
    }
    host = open_host(Config.model_validate(settings), clock=lambda: 0.0)
    pool = host.pool
    space = pool.open_space(bytes(16), WHOLE, 4096, 16)
    chain = Chain.of(Root(bytes(16), 16, "xxh3_128"), range(16 * 20))
    for prompt in (chain.rows(WHOLE, 0, 4), chain.rows(WHOLE, 4, 8)):
        pool.commit(pool.stage(space, 4, prompt), prompt, None, time=0.0)
    assert pool.evict(space.slot_class, 20) == 8
    host.close()


def test_all_that_can_be_set_can_be_simulated() -> None:
    settable = get_args(Config.model_fields["eviction_policy"].annotation)
    assert set(settable) == set(ONLINE) == set(POLICIES) - {"oracle"}
