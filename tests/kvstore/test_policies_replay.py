"""The server's pool and the replay choose alike, and what each policy hits on traces, known and generated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.hints import Hints
from kvstore.index import split_hashes
from kvstore.simulate import POLICIES, Instance, Workload, replay
from kvstore.trace import read_trace
from tests.support.policy_pool import PoolInstance
from tests.support.policy_workloads import GENERATED, with_ends, workload_of

CONVERSATION = Path(__file__).resolve().parents[2] / "tests/data/conversation_trace.jsonl.gz"
ONLINE = [name for name in POLICIES if name != "oracle"]
BEST_OTHERS = ["lru", "lfu", "arc"]

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@cache
def conversation() -> Workload:
    return Workload.of(read_trace([CONVERSATION]))


@cache
def generated(name: str) -> Workload:
    return workload_of(GENERATED[name](np.random.default_rng(5)))


def percent(workload: Workload, policy: str, blocks: int) -> float:
    return replay(workload, POLICIES[policy](workload), blocks).block_rate * 100


# -- server and simulator -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ONLINE)
@given(asked=st.lists(prompts, min_size=1, max_size=40), capacity=st.integers(1, 16))
@example(asked=[[0, 0], [1, 0, 0, 0], [0, 0], [0, 1], [1]], capacity=3)  # one that is longer than the cache
def test_the_pool_and_the_replay_keep_the_same_blocks(
    policy: str, asked: list[list[int]], capacity: int
) -> None:
    workload = workload_of(enumerate(asked))
    keys = {
        int(number): key
        for request, ids in zip(workload.requests, workload.blocks, strict=True)
        for number, key in zip(ids, split_hashes(request.chain.hashes), strict=True)
    }
    lean = Instance(POLICIES[policy](workload), workload, capacity)
    pool = PoolInstance(POLICIES[policy](workload), capacity)
    for number, request in enumerate(workload.requests):
        assert lean.serve(number) == pool.serve(request)
        assert {keys[block] for block in lean.resident.tolist()} == pool.resident()


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_a_long_trace_is_served_alike(policy: str) -> None:
    workload = generated("sessions")
    lean = Instance(POLICIES[policy](workload), workload, 800)
    pool = PoolInstance(POLICIES[policy](workload), 800)
    assert [lean.serve(number) for number in range(len(workload.requests))] == [
        pool.serve(request) for request in workload.requests
    ]


# -- the oracle -------------------------------------------------------------------------------------------


@given(asked=st.lists(prompts, min_size=1, max_size=30), capacity=st.integers(1, 12))
def test_nobody_hits_more_than_the_oracle_nor_the_oracle_more_than_there_is(
    asked: list[list[int]], capacity: int
) -> None:
    workload = workload_of(enumerate(asked))
    most = replay(workload, POLICIES["lru"](workload), None).hit_blocks
    oracle = replay(workload, POLICIES["oracle"](workload), capacity).hit_blocks
    assert oracle <= most
    for policy in ONLINE:
        assert replay(workload, POLICIES[policy](workload), capacity).hit_blocks <= oracle, policy


@pytest.mark.parametrize(("blocks", "known"), [(1_000, 19.1), (10_000, 36.6)])
def test_the_oracle_hits_what_it_is_known_to_hit(blocks: int, known: float) -> None:
    assert percent(conversation(), "oracle", blocks) == pytest.approx(known, abs=0.1)


# -- reuse on the conversation trace -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "least"),
    [(1_000, 8.5), (3_000, 14.0), (10_000, 23.5), (50_000, 35.6)],
)
def test_reuse_hits_what_was_asked_of_it(blocks: int, least: float) -> None:
    assert percent(conversation(), "reuse", blocks) >= least


@pytest.mark.parametrize(("blocks", "least"), [(3_000, 22.0), (10_000, 35.0)])
def test_reuse_does_better_when_it_is_told_of_ends(blocks: int, least: float) -> None:
    assert percent(with_ends(conversation()), "reuse", blocks) >= least


def test_hints_that_are_wrong_cost_little() -> None:
    """Whoever says "ended" of everything is soon no longer believed."""
    workload = generated("sessions")
    ended = [replace(each, hints=Hints(ended=True)) for each in workload.requests]
    wrong = replace(workload, requests=ended)
    assert percent(wrong, "reuse", 2_000) >= percent(workload, "reuse", 2_000) - 3


# -- reuse on what was made up ------------------------------------------------------------------------------

SHORT_BY = {
    # Measured. Popularity alone is better served by counts, and what an instruction is worth is seen late.
    "documents": 1.0,
    "few shot": 0.7,
}


@pytest.mark.parametrize("share", [20, 5])
@pytest.mark.parametrize("name", GENERATED)
def test_reuse_is_not_beaten_by_much(name: str, share: int) -> None:
    workload = generated(name)
    blocks = max(200, workload.distinct_blocks // share)
    best = max(percent(workload, policy, blocks) for policy in BEST_OTHERS)
    assert percent(workload, "reuse", blocks) >= best - SHORT_BY.get(name, 0.3)
