"""What the scheduler's side keeps of each request: how far it is, and the load that is under way for it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hashing import Extras
from kvstore.connectors.vllm.lookups import Answer, Pending
from kvstore.hints import NO_HINTS, Hints
from kvstore.spec import NamespaceSpec


class EngineRequest(Protocol):
    """vLLM's request, as far as it is read."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None
    skip_reading_prefix_cache: bool
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    resumable: bool


@dataclass(slots=True, eq=False)
class Tracked:
    """A request from its arrival to its end. ``spec`` is None until an adapter's name is known.

    ``token_ids`` are those that were packed for saves; ``stale`` is one that was computing when the
    weights changed, ``failed`` one whose load failed: it is not tried again, since nothing says that
    it would fare better.
    """

    request: EngineRequest
    spec: NamespaceSpec | None
    extras: Extras | None
    hints: Hints = NO_HINTS
    pending: Pending | None = None
    answer: Answer | None = None
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    local_blocks: int = 0
    saved_blocks: int = 0
    stale: bool = False
    failed: bool = False


@dataclass(slots=True, eq=False)
class Load:
    """A load under way; ``ranks`` are through with it. ``first_block`` counts in the answer's run."""

    answer: Answer
    first_block: int
    blocks: int
    good_blocks: int
    ranks: int = 0
