"""Choosing the next token of each sequence from its logits.

The randomness of a token is a function of the request's seed and the token's position in the answer
alone: nothing is carried from step to step, so an answer is the same in any batch, after a preemption,
and when another process goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefill.request import Sampling

_KEY_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: the ``position``-th of an answer whose ``sampling`` has a seed, or is greedy."""

    sampling: Sampling
    position: int


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """A token for each row of ``logits``, float32 (draws, vocab)."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if not draw.sampling.greedy:
            tokens[row] = _sample(logits[row].cpu(), draw)
    return tokens


def _sample(logits: torch.Tensor, draw: Draw) -> int:
    """Gumbel's trick in the form of exponential races: argmin of e / p with e ~ Exp(1) has distribution p.

    Every token of the vocabulary has a race time of its own, so rounding in another batch can change
    the outcome only where the two fastest are a rounding apart.
    """
    kept = keep_likely(logits, draw.sampling)
    times = torch.from_numpy(_race_times(draw, len(logits)))
    # log(e / p) without the constant of the softmax, which is the same for all.
    return int((times.log() - kept).argmin())


def keep_likely(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits (vocab,) at the temperature, -inf for what top-k and then top-p leave out.

    Tokens that tie with the last one kept by top-k stay too; top-p keeps the fewest tokens whose
    probabilities add up to it, and always one.
    """
    # Shifted first: at a tiny temperature the others become -inf, and nothing becomes NaN.
    scaled = (logits - logits.max()) / sampling.temperature
    nothing = float("-inf")
    if 0 < sampling.top_k < len(scaled):
        least = torch.topk(scaled, sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, nothing)
    if sampling.top_p < 1:
        values, order = scaled.sort(descending=True, stable=True)
        chances = values.softmax(dim=-1)
        before = chances.cumsum(dim=-1) - chances
        scaled = scaled.index_fill(0, order[before >= sampling.top_p], nothing)
    return scaled


def _race_times(draw: Draw, vocab: int) -> np.ndarray:
    assert draw.sampling.seed is not None
    # Philox is a keyed permutation of a counter: positions of one seed are independent streams.
    bits = np.random.Philox(key=draw.sampling.seed & _KEY_MASK, counter=[0, 0, 0, draw.position])
    # In float32 one in 8 million is exactly 0, and would win the race for a token without any chance.
    times = np.random.Generator(bits).standard_exponential(vocab)
    return np.maximum(times, np.finfo(times.dtype).tiny)
