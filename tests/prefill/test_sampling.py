"""How tokens are chosen: the distribution is the one asked for, and the seed decides all of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefill.errors import PromptError
from prefill.request import GREEDY, Sampling
from prefill.sampling import Draw, choose, keep_likely

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])


def chances(sampling: Sampling, logits: torch.Tensor = LOGITS) -> list[float]:
    values: list[float] = keep_likely(logits, sampling).softmax(dim=-1).tolist()
    return values


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def test_temperature_scales_the_logits() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = softmax([value / temperature for value in LOGITS.tolist()])
        assert chances(Sampling(temperature)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=1), [1, 3]),  # they tie
        (Sampling(1.0, top_k=3), [1, 2, 3]),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_p=1e-9), [1]),
        (Sampling(1.0, top_p=0.7), [1, 3]),
        (Sampling(1.0, top_p=0.9), [1, 2, 3]),
        (Sampling(1.0, top_p=0.5, top_k=4), [1, 3]),
        (Sampling(1e-30), [1, 3]),
    ],
)
def test_what_is_left_out_has_no_chance(sampling: Sampling, kept: list[int]) -> None:
    found = chances(sampling)
    assert [token for token, chance in enumerate(found) if chance > 0] == kept
    # Among those that are left the proportions stay.
    assert found[kept[0]] == pytest.approx(max(found)) or kept[0] == 0


def test_tokens_come_as_often_as_they_should() -> None:
    """4,000 positions of one seed, each drawn once: within four standard deviations of the distribution."""
    draws, sampling = 4000, Sampling(1.0, seed=11)
    drawn = choose(LOGITS.expand(draws, -1), [Draw(sampling, at) for at in range(draws)])
    for token, chance in enumerate(chances(sampling)):
        deviation = math.sqrt(draws * chance * (1 - chance))
        assert abs(drawn.count(token) - draws * chance) < 4 * deviation


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 10_000), st.integers(0, 3))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int, others: int) -> None:
    draw = Draw(Sampling(1.0, 0.99, 40, seed), position)
    logits = torch.linspace(-2, 2, 97).expand(others + 1, -1)
    batch = [Draw(Sampling(1.0, seed=at), at) for at in range(others)]
    alone = choose(logits[:1], [draw])
    assert choose(logits, [*batch, draw])[-1:] == alone == choose(logits[:1], [draw])


def test_seeds_and_positions_differ() -> None:
    logits = torch.zeros(1, 50_000)
    seen = {choose(logits, [Draw(Sampling(1.0, seed=seed), at)])[0] for seed in range(4) for at in range(4)}
    assert len(seen) == 16


@pytest.mark.parametrize(("seed", "position"), [(0, 114), (0, 169), (1, 11), (1, 119), (1, 262)])
def test_no_token_wins_against_its_chance(seed: int, position: int) -> None:
    """Draws in which one of 50,000 float32 race times is 0: the token that has all the chances comes."""
    logits = torch.zeros(1, 50_000)
    logits[0, 7] = 100.0
    for sampling in (Sampling(1.0, seed=seed), Sampling(1.0, top_k=1, seed=seed)):
        assert choose(logits, [Draw(sampling, position)]) == [7]


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    rows = LOGITS.expand(3, -1)
    sampled = Draw(Sampling(1.0, seed=3), 7)
    assert choose(rows, [Draw(GREEDY, 0), sampled, Draw(GREEDY, 5)]) == [
        1,
        *choose(LOGITS[None], [sampled]),
        1,
    ]
    assert choose(torch.zeros(0, 5), []) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 101.0}, "temperature is 101"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1, expected at least 0"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616, expected"),
    ],
)
def test_absurd_values_are_refused(given: dict[str, float], problem: str) -> None:
    with pytest.raises(PromptError) as caught:
        Sampling(**given)  # type: ignore[arg-type]
    assert problem in str(caught.value)
