"""What is asked of the engine, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hashing import Extras
from kvstore.block import TierName


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt to continue greedily. ``reuse`` False computes everything and stores nothing.

    ``tokens`` is (prompt tokens,). ``arrived`` is when the request was accepted, on the engine's
    clock: TTFT counts from there.
    """

    request_id: str
    tokens: NDArray[np.uint32]
    max_new_tokens: int
    arrived: float
    extras: Extras | None = None
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """One finished request. TTFT = queue + execution; times are seconds, ``cached`` tokens by tier.

    ``computed_tokens`` are the prompt tokens that were prefilled here. With the cached ones they
    make up the prompt, but for an unfinished tail block that came with a handoff.
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    cached: dict[TierName, int]
    computed_tokens: int
    queue_seconds: float
    execution_seconds: float

    @property
    def ttft_seconds(self) -> float:
        return self.queue_seconds + self.execution_seconds

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())
