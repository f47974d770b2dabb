"""What a replay asked for and hit: in blocks and in tokens, from a cold start and after warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.simulate.workload import Workload


class Traffic(NamedTuple):
    """An amount of prompt. ``full_tokens`` leaves out the tokens of a partly filled last block."""

    blocks: int
    tokens: int
    full_tokens: int


class Shares(NamedTuple):
    """Hit shares of what was asked for, by what is counted."""

    blocks: float
    tokens: float
    full_tokens: float


@dataclass(frozen=True, slots=True)
class HitCounts:
    """What a replay asked for and hit.

    Blocks count a partly filled last one as one, where the trace names it; tokens are those of the
    prompts. Hits are leading runs. ``…_warm`` counts only the second half of the requests,
    ``requests // 2`` and on, when the cache is no longer empty.
    """

    requests: int
    asked: Traffic
    hit: Traffic
    asked_warm: Traffic
    hit_warm: Traffic

    @property
    def hit_blocks(self) -> int:
        return self.hit.blocks

    @property
    def block_rate(self) -> float:
        """Hit share of all blocks asked for."""
        return self.shares.blocks

    @property
    def token_rate(self) -> float:
        """Hit share of all tokens asked for."""
        return self.shares.tokens

    @property
    def token_rate_warm(self) -> float:
        """Hit share of the tokens that the second half of the requests asked for."""
        return self.shares_warm.tokens

    @property
    def shares(self) -> Shares:
        """Over the whole trace, from a cold start."""
        return _shares(self.hit, self.asked)

    @property
    def shares_warm(self) -> Shares:
        """Over the second half of the requests."""
        return _shares(self.hit_warm, self.asked_warm)


def count_hits(workload: Workload, hit_blocks: Sequence[int]) -> HitCounts:
    """Add up a replay's hit blocks, one number a request."""
    asked_blocks = np.array([len(ids) for ids in workload.blocks], dtype=np.int64)
    size, half = workload.block_tokens, len(workload.requests) // 2
    full = workload.tokens - workload.tokens % size
    hit = np.array(hit_blocks, dtype=np.int64)
    asked = np.stack((asked_blocks, workload.tokens, full))
    found = np.stack((hit, np.minimum(workload.tokens, hit * size), np.minimum(full, hit * size)))
    return HitCounts(
        len(workload.requests),
        Traffic(*asked.sum(axis=1).tolist()),
        Traffic(*found.sum(axis=1).tolist()),
        Traffic(*asked[:, half:].sum(axis=1).tolist()),
        Traffic(*found[:, half:].sum(axis=1).tolist()),
    )


def _shares(hit: Traffic, asked: Traffic) -> Shares:
    return Shares(*(part / whole if whole else 0.0 for part, whole in zip(hit, asked, strict=True)))
