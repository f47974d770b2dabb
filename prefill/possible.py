"""What no waiting would help: requests that can never run here."""

from __future__ import annotations

from kvstore.errors import PoolError
from kvstore.spec import slot_bytes_for
from prefill.errors import PromptError
from prefill.paged import KVMemory
from prefill.plan import blocks_for
from prefill.request import Request
from prefill.runner import require_fitting


def require_possible(request: Request, memory: KVMemory, room: int, *, answered: bool) -> None:
    """PromptError or PoolError for a request that does not fit the model, or ``room`` blocks of memory.

    ``answered`` False: another engine gives the answer, and this one needs room for the prompt alone.
    """
    new = request.max_new_tokens
    if new < 1:
        raise PromptError(f"max_new_tokens is {new}, expected at least 1; ask for a token")
    # The last output token's KV is never computed.
    length = len(request.tokens) + new - 1
    require_fitting(memory.spec, request.tokens, length)
    needed = blocks_for(length if answered else len(request.tokens), memory.block_size)
    if needed > room:
        least = needed * slot_bytes_for(memory.block_bytes)
        also = f" and {new} new ones" if answered else ""
        raise PoolError(
            f"{len(request.tokens)} prompt tokens{also} need {needed} blocks, expected at "
            f"most {room}, the device pool's; raise device_bytes to at least {least}"
        )
