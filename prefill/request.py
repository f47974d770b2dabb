"""What is asked of the engine, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from hashing import Extras
from kvstore.block import TierName
from prefill.errors import PromptError

TEMPERATURE_MAX = 100.0
REQUEST_ID_MAX = 512
"""Characters of a request id that comes from outside."""
STOP_IDS_MAX = 256
"""Stop ids of a request that comes from outside: each token of its answer is compared with them."""
_SEED_BITS = 64


class FinishReason(StrEnum):
    """Why a request is over."""

    STOP = "stop"
    """Its last token ends an answer: one of ``stop_ids``, or of the model's own end tokens."""
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: the most likely one at temperature 0, else at random.

    ``top_k`` 0 keeps all tokens. The same seed gives the same tokens, whatever else runs; with None
    the engine chooses a seed. Raises PromptError when a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and 0 <= self.temperature <= TEMPERATURE_MAX):
            raise PromptError(
                f"temperature is {self.temperature}, expected 0 (greedy) to {TEMPERATURE_MAX:g}; "
                "use 1 for the model's own distribution"
            )
        if not 0 < self.top_p <= 1:
            raise PromptError(f"top_p is {self.top_p}, expected above 0 and at most 1; use 1 to keep all")
        if self.top_k < 0:
            raise PromptError(f"top_k is {self.top_k}, expected at least 0; use 0 to keep all")
        low, high = -(1 << _SEED_BITS - 1), (1 << _SEED_BITS) - 1
        if self.seed is not None and not low <= self.seed <= high:
            raise PromptError(f"seed is {self.seed}, expected {low} to {high}; choose one of 64 bits")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt to continue. ``reuse`` False computes everything and stores nothing.

    ``tokens`` is (prompt tokens,). ``arrived`` is when the request was accepted, on the engine's
    clock: TTFT counts from there. One of ``stop_ids`` ends the answer and is its last token, as do
    the model's end tokens unless ``ignore_eos``.
    """

    request_id: str
    tokens: NDArray[np.uint32]
    max_new_tokens: int
    arrived: float
    extras: Extras | None = None
    reuse: bool = True
    sampling: Sampling = GREEDY
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One finished request. TTFT = queue + execution; times are seconds, ``cached`` tokens by tier.

    ``computed_tokens`` are the prompt tokens that were prefilled here. With the cached ones they
    make up the prompt, but for an unfinished tail block that came with a handoff. What had to be
    computed once more after a preemption is ``recomputed_tokens``. ``inter_token_seconds`` are the
    times between one token and the next: one less than the tokens that were chosen here.
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    cached: dict[TierName, int]
    computed_tokens: int
    queue_seconds: float
    execution_seconds: float
    finished: FinishReason = FinishReason.LENGTH
    recomputed_tokens: int = 0
    inter_token_seconds: list[float] = field(default_factory=list)

    @property
    def ttft_seconds(self) -> float:
        return self.queue_seconds + self.execution_seconds

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())
