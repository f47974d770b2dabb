"""Attention over paged blocks for packed token batches, as a function that transformers calls.

One packed batch [1, T] holds spans of several sequences. In every layer the new keys and values
of all spans are written to their blocks first; then each span attends to its own sequence. So a
span may even read blocks that another span of the same step computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from prefill.errors import UnsupportedModelError
from prefill.paged import KVMemory
from prefill.spans import PackedSpan, SpanBySpan
from prefill.varlen import AllSpans, Varlen

PAGED = "prefix_kv_paged"
"""The name to give as ``attn_implementation``."""

# Arguments that models pass along without any effect on causal attention, and values without one.
# Whatever else has a value changes the result in a way that is not implemented here.
_HARMLESS = frozenset(
    (
        "position_ids",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    )
)
_PLAIN = {"dropout": 0.0, "is_causal": True}


class PagedStep:
    """What the attention of one step needs. ``varlen`` is for all spans in one call; None is one each."""

    def __init__(self, memory: KVMemory, spans: Sequence[PackedSpan], varlen: Varlen | None = None) -> None:
        self.memory = memory
        rows = [memory.rows(span.table, span.keys) for span in spans]
        written = [each[span.start :] for span, each in zip(spans, rows, strict=True)]
        self.written = memory.upload(np.concatenate(written))
        """The rows that receive the new tokens, in the order of the batch."""
        self.attention = (
            SpanBySpan(memory, spans, rows) if varlen is None else AllSpans(memory, spans, rows, varlen)
        )


def register() -> None:
    """Make ``PAGED`` known to transformers. Idempotent."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionMaskInterface.register(PAGED, _no_mask)


def _no_mask(*_arguments: object, **_named: object) -> None:
    """Each span is masked by itself; a mask over the packed batch would only cost time."""


def paged_attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep | None = None,
    scaling: float | None = None,
    **named: object,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values to their blocks and let each span attend to its sequence.

    ``query`` is (1, query_heads, T, head_size); the result is (1, T, query_heads, head_size).
    Raises UnsupportedModelError when the model asks for any other attention than plain causal.
    """
    layer = getattr(module, "layer_idx", None)
    if paged is None or not isinstance(layer, int):
        raise UnsupportedModelError(
            f"{type(module).__name__} keeps the step or its layer number from its attention, expected both; "
            "choose a model that passes keyword arguments on to transformers' AttentionInterface"
        )
    _require_plain(module, attention_mask, named)
    paged.memory.write(layer, paged.written, key, value)
    return paged.attention.attend(layer, query, key, value, scaling), None


def _require_plain(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, named: dict[str, object]
) -> None:
    asked = {**named, "attention_mask": attention_mask}
    unusual = [
        name
        for name, value in asked.items()
        if value is not None and name not in _HARMLESS and not (name in _PLAIN and value == _PLAIN[name])
    ]
    if unusual:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for attention with {', '.join(unusual)}, "
            "expected plain causal attention; choose a model without it"
        )
