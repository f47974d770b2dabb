"""What remains to compute of a prompt, once its cached prefix is known."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.block import TierName


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Most blocks of a prompt that a prefill may take from a cache.

    The last prompt token is always computed, since its logits choose the first output token.
    """
    return (prompt_tokens - 1) // block_size


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens, the last one perhaps in part."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class Plan:
    """Positions [0, start) are in place, the suffix [start, prompt_tokens) is to be computed.

    ``cached`` says which tier the tokens in place came from.
    """

    prompt_tokens: int
    start: int
    cached: dict[TierName, int]

    @property
    def suffix(self) -> int:
        """Tokens to compute."""
        return self.prompt_tokens - self.start
