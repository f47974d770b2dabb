"""The prompts of the tests, by what is special about them. Token ids are below 1,000."""

from __future__ import annotations

import random

from tests.vllm.engines import BLOCK_SIZE


def tokens(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(count)]


LONG = tokens(1, 1000)
"""31 whole blocks and 8 tokens; two steps of prefill."""
EXACT = tokens(2, 8 * BLOCK_SIZE)
BRANCH = LONG[: 15 * BLOCK_SIZE + 7] + tokens(3, 200)
"""Shares 15 whole blocks with LONG."""
UNSEEN = tokens(4, 300)
SHORT = tokens(5, BLOCK_SIZE - 1)
DAMAGED = [tokens(100 + block, 4 * BLOCK_SIZE + 9) for block in range(4)]
"""In the n-th one the n-th block is damaged; each has four."""
GROWN = [
    prompt[: 4 * BLOCK_SIZE] + tokens(200 + place, 5 * BLOCK_SIZE) for place, prompt in enumerate(DAMAGED)
]
"""They begin with the damaged ones' blocks and go on for five more."""
CROWD = [tokens(300 + place, 5 * BLOCK_SIZE + 3) for place in range(8)]
"""Too many at once for a small cache."""
CROWD_TOKENS = 96
WARMUP = tokens(6, 40)

PROMPTS = {
    "long": LONG,
    "exact": EXACT,
    "branch": BRANCH,
    "unseen": UNSEEN,
    "short": SHORT,
    **{f"damaged{place}": prompt for place, prompt in enumerate(DAMAGED)},
    **{f"grown{place}": prompt for place, prompt in enumerate(GROWN)},
}
