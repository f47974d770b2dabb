"""Decisions of the scheduler, on plain data: who gets in, who computes what, who gives way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill.scheduler import PROMPTS_MAX, Candidate, Job, Policy, Scheduler, SchedulerOptions, Share


def scheduler(policy: Policy, step_tokens: int = 100, *, chunked: bool = True) -> Scheduler:
    return Scheduler(SchedulerOptions(step_tokens, policy, chunked=chunked, aging_seconds=5.0))


def prompt(number: int, pending: int) -> Job:
    return Job(f"p{number}", number, pending, prefilling=True)


def decode(number: int) -> Job:
    return Job(f"d{number}", number, 1, prefilling=False)


DECODES = [decode(number) for number in range(4)]
RIDES = [Share(job.name, 1) for job in DECODES]


@pytest.mark.parametrize(
    ("policy", "prompts", "shares"),
    [
        (Policy.PREFILL_FIRST, [prompt(9, 500)], [Share("p9", 100)]),
        (Policy.DECODE_FIRST, [prompt(9, 500)], [Share("p9", 25)]),
        (Policy.CACHE_AWARE, [prompt(9, 500)], [Share("p9", 96)]),
        (Policy.FAIR, [prompt(9, 500)], [Share("p9", 96)]),
        (Policy.CACHE_AWARE, [prompt(8, 90), prompt(9, 500)], [Share("p8", 90), Share("p9", 6)]),
        (Policy.FAIR, [prompt(8, 500), prompt(9, 500)], [Share("p8", 48), Share("p9", 48)]),
        (Policy.FAIR, [prompt(8, 500), prompt(9, 10)], [Share("p9", 10), Share("p8", 86)]),
    ],
)
def test_decodes_ride_along_and_prompts_share_what_is_theirs(
    policy: Policy, prompts: list[Job], shares: list[Share]
) -> None:
    assert scheduler(policy).share([*DECODES, *prompts]) == RIDES + shares


def test_a_prompt_alone_gets_the_whole_step() -> None:
    for policy in Policy:
        assert scheduler(policy).share([prompt(0, 500)]) == [Share("p0", 100)]


def test_prompts_never_stand_still_beside_many_decodes() -> None:
    many = [decode(number) for number in range(200)]
    for policy in Policy:
        shares = scheduler(policy).share([*many, prompt(300, 500)])
        assert len(shares) == 201
        assert shares[-1].tokens >= 16


@pytest.mark.parametrize(
    ("pending", "taken"), [([500], [500]), ([60, 40, 1], [60, 40]), ([500, 3], [500]), ([60, 500], [60])]
)
def test_unchunked_prompts_are_computed_whole(pending: list[int], taken: list[int]) -> None:
    prompts = [prompt(number, tokens) for number, tokens in enumerate(pending)]
    for policy in (Policy.PREFILL_FIRST, Policy.FAIR):
        shares = scheduler(policy, chunked=False).share(prompts)
        assert shares == [Share(f"p{number}", tokens) for number, tokens in enumerate(taken)]


jobs = st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=20).map(
    lambda made: [
        prompt(number, pending) if prefilling else decode(number)
        for number, (pending, prefilling) in enumerate(made)
    ]
)


@given(jobs, st.sampled_from(Policy), st.integers(1, 600))
def test_a_step_has_room_for_its_shares_and_always_goes_on(
    jobs: list[Job], policy: Policy, step_tokens: int
) -> None:
    shares = {share.name: share.tokens for share in scheduler(policy, step_tokens).share(jobs)}
    decodes = [job for job in jobs if not job.prefilling]
    assert all(shares[job.name] == 1 for job in decodes)
    assert all(0 < shares[job.name] <= job.pending for job in jobs if job.name in shares)
    prompt_tokens = sum(shares.values()) - len(decodes)
    assert prompt_tokens <= step_tokens
    assert (prompt_tokens > 0) == (len(decodes) < len(jobs))


@pytest.mark.parametrize("policy", [Policy.PREFILL_FIRST, Policy.DECODE_FIRST, Policy.FAIR])
def test_who_came_first_gets_in_first(policy: Policy) -> None:
    waiting = [Candidate("late", 7, 0.0, 900), Candidate("early", 3, 1.0, 0)]
    assert scheduler(policy).order(waiting) == ["early", "late"]


def test_the_longest_cached_prefix_gets_in_first_until_somebody_has_waited_too_long() -> None:
    waiting = [
        Candidate("cold", 3, 4.9, 0),
        Candidate("warm", 5, 1.0, 64),
        Candidate("hot", 9, 0.1, 512),
        Candidate("hot, later", 10, 0.0, 512),
    ]
    policy = scheduler(Policy.CACHE_AWARE)
    assert policy.order(waiting) == ["hot", "hot, later", "warm", "cold"]
    waiting[0] = Candidate("cold", 3, 5.0, 0)
    assert policy.order(waiting) == ["cold", "hot", "hot, later", "warm"]


def test_more_prompts_are_taken_while_a_step_has_tokens_for_them() -> None:
    in_turn = scheduler(Policy.CACHE_AWARE)
    assert in_turn.takes_more([])
    assert in_turn.takes_more([prompt(0, 99)])
    assert not in_turn.takes_more([prompt(0, 60), prompt(1, 40)])
    assert not in_turn.takes_more([*DECODES, prompt(0, 96)])
    side_by_side = scheduler(Policy.FAIR)
    assert side_by_side.takes_more([prompt(number, 500) for number in range(PROMPTS_MAX - 1)])
    assert not side_by_side.takes_more([prompt(number, 500) for number in range(PROMPTS_MAX)])
    full = Scheduler(SchedulerOptions(running_max=4))
    assert not full.takes_more(DECODES)


def test_the_newest_gives_way() -> None:
    assert Scheduler.victim([decode(3), prompt(9, 5), decode(5)]) == "p9"


def test_room_is_left_for_those_who_grow() -> None:
    assert scheduler(Policy.FAIR).spare_blocks(3) == 3
    assert scheduler(Policy.PREFILL_FIRST).spare_blocks(3) == 0
