"""Time to first token by a model of prefill: what is computed, and what is loaded instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.simulate.workload import Workload


class PrefillRates(NamedTuple):
    """How fast prompts are computed and cached blocks loaded.

    A token takes ``1 / tokens_per_second`` seconds, and ``pair_seconds`` for each token before it, which
    is what attention costs. Hits are loaded at ``load_bytes_per_second`` (None: at once).
    """

    tokens_per_second: float
    pair_seconds: float = 0.0
    load_bytes_per_second: float | None = None
    token_bytes: int = 0


class TimesToFirstToken(NamedTuple):
    """Seconds of prefill and loading of each request; requests do not wait for each other."""

    mean: float
    p50: float
    p90: float
    p99: float


def times_to_first_token(
    workload: Workload, hit_blocks: Sequence[int], rates: PrefillRates
) -> TimesToFirstToken:
    """What a replay's hits, one number a request, make of the times to first token.

    A prompt that is hit as a whole computes its last token all the same.
    """
    tokens = workload.tokens
    hit = np.minimum(np.array(hit_blocks, dtype=np.int64) * workload.block_tokens, tokens - 1)
    seconds = (tokens - hit) / rates.tokens_per_second
    seconds = seconds + rates.pair_seconds * (tokens * (tokens - 1.0) - hit * (hit - 1.0)) / 2
    if rates.load_bytes_per_second is not None:
        seconds = seconds + hit * rates.token_bytes / rates.load_bytes_per_second
    half, most, nearly_all = np.percentile(seconds, (50, 90, 99)).tolist()
    return TimesToFirstToken(float(seconds.mean()), half, most, nearly_all)
