"""The live what-if: its error against full replays, that sampling is not biased, and its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvstore.block import HASH_BYTES, MissCause
from kvstore.events import RequestSettled
from kvstore.hints import Hints
from kvstore.simulate import POLICIES, Workload, replay
from kvstore.simulate.expiring import ExpiringInstance
from kvstore.trace import Request, read_trace
from kvstore.whatif import SAMPLE_BLOCKS_MAX, SCALES, Estimate, WhatIf
from tests.support.policy_pool import PoolInstance
from tests.support.policy_workloads import GENERATED, workload_of
from tests.support.valkey import eventually

CONVERSATION = Path(__file__).resolve().parents[2] / "tests/data/conversation_trace.jsonl.gz"
SPACE = b"n" * 16
TOKENS = 16


@cache
def conversation() -> Workload:
    return Workload.of(read_trace([CONVERSATION]))


@contextmanager
def ghosts(workload: Workload, policy: str, blocks: int, seed: int = 0) -> Iterator[WhatIf]:
    """Of a pool of ``blocks`` blocks, each of one byte."""
    what_if = WhatIf(POLICIES[policy](workload), blocks, lambda _: 1, seed=seed, pause_seconds=0.0)
    yield what_if
    what_if.close()


def settled(request: Request, tail: int = 0) -> RequestSettled:
    asked = len(request.chain) * TOKENS + tail
    misses = {MissCause.TAIL: tail} if tail else {}
    return RequestSettled(
        request.time, SPACE, asked, {}, misses, {}, request.chain.hashes, hints=request.hints
    )


def estimates(workload: Workload, policy: str, blocks: int, seed: int = 0) -> list[Estimate]:
    with ghosts(workload, policy, blocks, seed) as what_if:
        feed(what_if, map(settled, workload.requests))
        return what_if.estimates()


def feed(what_if: WhatIf, events: Iterator[RequestSettled]) -> None:
    """Give it one request after another, none of which it may leave out."""
    for number, event in enumerate(events):
        what_if(event)
        if number % 256 == 0:
            assert eventually(lambda: what_if.idle, 30.0)
    assert eventually(lambda: what_if.idle, 30.0)
    assert what_if.dropped == 0


def errors(workload: Workload, policy: str, blocks: int, seed: int = 0) -> list[float]:
    """Points between the estimate and a full replay, for each scale."""
    found = [each.hit_tokens / each.asked_tokens for each in estimates(workload, policy, blocks, seed)]
    exact = [replay(workload, POLICIES[policy](workload), int(blocks * scale)).block_rate for scale in SCALES]
    return [100 * (ours - theirs) for ours, theirs in zip(found, exact, strict=True)]


@pytest.mark.parametrize(("blocks", "requests"), [(4_000, 2_500), (20_000, 6_000)])
def test_the_error_on_the_conversation_trace_is_small(blocks: int, requests: int) -> None:
    """From a quarter to four times of each: 1,000 … 80,000 blocks. Seen: at most 0.6 points."""
    head = Workload.of(conversation().requests[:requests])
    assert max(map(abs, errors(head, "lru", blocks))) < 1.0


def test_the_error_of_a_policy_that_learns_is_small() -> None:
    """``reuse`` knows chains by their length, and ghosts see them shortened.

    Seen on the whole trace at 5,000 to 50,000 blocks: at most 1.5 points. On this short head, 0.8 with
    this sample and up to 2.4 with others.
    """
    head = Workload.of(conversation().requests[:1200])
    assert max(map(abs, errors(head, "reuse", 5_000))) < 2.0


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo", "arc", "reuse"])
def test_a_pool_small_enough_is_not_sampled_and_exact(policy: str) -> None:
    workload = workload_of(GENERATED["sessions"](np.random.default_rng(1)))
    head = Workload.of(workload.requests[:250])
    found = estimates(head, policy, 200)
    exact = [replay(head, POLICIES[policy](head), int(200 * scale)).hit_blocks for scale in SCALES]
    assert [each.hit_tokens for each in found] == [TOKENS * blocks for blocks in exact]
    assert exact[0] < exact[-1]


def test_ghosts_let_go_of_what_the_pool_lets_go_of() -> None:
    workload = Workload.of(workload_of(GENERATED["sessions"](np.random.default_rng(1))).requests[:250])
    make_evictor, ttl = POLICIES["lru"](workload), 40.0
    what_if = WhatIf(make_evictor, 200, lambda _: 1, idle_ttl_seconds=ttl, pause_seconds=0.0)
    feed(what_if, map(settled, workload.requests))
    what_if.close()
    replays = [ExpiringInstance(make_evictor, workload, int(200 * scale), ttl) for scale in SCALES]
    exact = [sum(map(each.serve, range(250))) for each in replays]
    assert [each.hit_tokens for each in what_if.estimates()] == [TOKENS * blocks for blocks in exact]
    assert exact[-1] < replay(workload, make_evictor, None).hit_blocks


def test_one_prompt_that_all_share_does_not_tip_the_scale() -> None:
    """Whether its blocks are in the sample is luck, and must not matter: no bias, little noise."""
    random = np.random.default_rng(3)
    shared = list(range(20))

    def prompt(number: int) -> list[int]:
        own = int(random.zipf(1.3)) % 1000
        return [*shared, *(10_000 * (own + 1) + np.arange(30)).tolist()]

    workload = workload_of((float(number), prompt(number)) for number in range(1000))
    found = np.array([errors(workload, "lru", 20_000, seed)[:3] for seed in range(1, 9)])
    assert np.abs(found).max() < 3.0, found
    assert np.abs(found.mean(axis=0)).max() < 1.0, found


def test_tokens_are_those_of_the_requests() -> None:
    """Tails are asked and missed; what a caller brings itself is neither."""
    (request,) = workload_of([(0.0, list(range(10)))]).requests
    with ghosts(conversation(), "lru", 100) as what_if:
        feed(what_if, iter([settled(request, tail=5), settled(request, tail=5)]))
        assert {each[2:] for each in what_if.estimates()} == {(330, 170)}
        part = RequestSettled(2.0, SPACE, 4 * TOKENS, hashes=request.chain.hashes, first_block=6)
        feed(what_if, iter([part]))
        assert {each[2:] for each in what_if.estimates()} == {(394, 170)}
        assert [each.hit_tokens for each in what_if.estimates()] == [224] * 5


def test_memory_is_bounded_and_numbers_are_used_again() -> None:
    capacity = 10_000
    room = sum(int(capacity * scale) for scale in SCALES)
    random = np.random.default_rng(0)

    def event(_: int) -> RequestSettled:
        hashes = random.bytes(500 * HASH_BYTES)
        return RequestSettled(1.0, SPACE, 500 * TOKENS, hashes=hashes, hints=Hints(ended=True))

    with ghosts(conversation(), "lru", capacity) as what_if:
        assert what_if.rate == 1
        feed(what_if, map(event, range(400)))
        assert what_if.rate == 4, "40,000 blocks are four times what the largest may hold"
        assert what_if.tracked_blocks <= room // what_if.rate
        assert 4 * capacity // what_if.rate <= SAMPLE_BLOCKS_MAX


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo", "arc", "reuse"])
def test_names_that_a_client_makes_up_break_nothing(policy: str) -> None:
    """The same few hashes in any order, also twice in one prompt: blocks with several parents, and rings."""
    random = np.random.default_rng(8)
    known = random.bytes(24 * HASH_BYTES)

    def event(number: int) -> RequestSettled:
        picked = random.integers(24, size=random.integers(1, 12)).tolist()
        hashes = b"".join(known[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in picked)
        return RequestSettled(float(number), SPACE, len(picked) * TOKENS, hashes=hashes)

    with ghosts(conversation(), policy, 12) as what_if:
        feed(what_if, map(event, range(600)))
        assert what_if.tracked_blocks <= 24


def test_names_of_two_namespaces_with_blocks_of_two_sizes_make_no_room() -> None:
    """Brought as small blocks and taken away as large ones, they would leave more than there was."""
    sizes = {b"a" * 16: 1, b"b" * 16: 64}
    random = np.random.default_rng(8)
    what_if = WhatIf(POLICIES["lru"](conversation()), 64, sizes.__getitem__)

    def events() -> Iterator[RequestSettled]:
        for number in range(50):
            hashes = random.bytes(16 * HASH_BYTES)
            for name in sizes:
                yield RequestSettled(float(number), name, 16 * TOKENS, hashes=hashes)

    feed(what_if, events())
    what_if.close()
    assert what_if.tracked_blocks <= 4 * 64


def test_smaller_blocks_begin_again_and_no_count_falls() -> None:
    sizes = {b"a" * 16: 64, b"b" * 16: 1}
    random = np.random.default_rng(0)
    what_if = WhatIf(POLICIES["lru"](conversation()), 1 << 16, sizes.__getitem__)
    before = what_if.estimates()
    rates = []
    for name in (b"a" * 16, b"a" * 16, b"b" * 16, b"a" * 16):
        hashes = random.bytes(200 * HASH_BYTES)
        feed(what_if, iter([RequestSettled(1.0, name, 200 * TOKENS, hashes=hashes)]))
        now = what_if.estimates()
        assert all(
            new >= old
            for ours, theirs in zip(now, before, strict=True)
            for new, old in zip(ours, theirs, strict=True)
        )
        before = now
        rates.append(what_if.rate)
    what_if.close()
    assert rates == [1, 1, 16, 16]


def test_a_namespace_of_unknown_size_is_left_out() -> None:
    what_if = WhatIf(POLICIES["lru"](conversation()), 1 << 16, lambda _: 0)
    what_if(RequestSettled(1.0, SPACE, TOKENS, hashes=bytes(HASH_BYTES)))
    what_if.close()
    assert {each.asked_tokens for each in what_if.estimates()} == {0}


@pytest.mark.parametrize(("blocks", "first", "rate"), [(200, 300, 1), (5_000, 60, 2)])
def test_blocks_that_were_taken_over_are_in_every_ghost_that_has_room(
    blocks: int, first: int, rate: int
) -> None:
    """Up to the present size as if the server had not stopped; with a pool that is full, and one that is not.

    Larger ghosts cannot know more than the pool.
    """
    requests = workload_of(GENERATED["sessions"](np.random.default_rng(1))).requests[: first + 150]
    workload = Workload.of(requests)
    pool = PoolInstance(POLICIES["lru"](workload), blocks)
    for request in requests[:first]:
        pool.serve(request)
    with ghosts(workload, "lru", blocks) as begun, ghosts(workload, "lru", blocks) as always:
        begun.take_over(pool.pool)
        feed(always, map(settled, requests[:first]))
        before = always.estimates()
        for each in (begun, always):
            feed(each, map(settled, requests[first:]))
        assert (begun.rate, begun.dropped) == (rate, 0)
        missed = [each.missed_tokens for each in begun.estimates()]
        known = [
            now.missed_tokens - then.missed_tokens
            for now, then in zip(always.estimates(), before, strict=True)
        ]
    assert missed[:3] == known[:3]
    assert missed[2] >= missed[3] >= known[3]
    assert missed[4] >= known[4]
