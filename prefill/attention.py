"""Attention over paged blocks for packed token batches, as a function that transformers calls.

One packed batch [1, T] holds spans of several sequences. In every layer the new keys and values
of all spans are written to their blocks first; then each span attends to its own sequence. So a
span may even read blocks that another span of the same step computes.

Every chunk of a prompt gathers its history anew. For 6,144 tokens of the packaged model in float32
that is 28 ms of one core, beside 4,100 ms for a chunk of 512 tokens and 610 ms for one of 64: to keep
what was gathered would save less than it costs in memory.

A GPU kernel that reads blocks through a table (variable-length, paged) would take the place of the
loop over spans in ``paged_attention``: all that it needs is in ``PagedStep``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from prefill.errors import UnsupportedModelError
from prefill.paged import KVMemory

PAGED = "prefix_kv_paged"
"""The name to give as ``attn_implementation``."""

_TILE_QUERIES_MAX = 512
_MASK_ELEMENTS_MAX = 1 << 23

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


@dataclass(frozen=True, slots=True)
class PackedSpan:
    """Tokens [begin, end) of the packed batch: the last ones of a sequence.

    ``rows`` are the memory rows of the whole sequence up to its last token here, or None when it
    has no history.
    """

    begin: int
    end: int
    rows: torch.Tensor | None


class PagedStep:
    """What the attention of one step needs: ``rows`` receive the new tokens of all ``spans``."""

    def __init__(self, memory: KVMemory, rows: torch.Tensor, spans: list[PackedSpan]) -> None:
        self.memory = memory
        self.rows = rows
        self.spans = spans
        tiled = [(span.end - span.begin, len(span.rows)) for span in spans if span.rows is not None]
        tiled = [(queries, keys) for queries, keys in tiled if queries > 1]
        keys = max((keys for _, keys in tiled), default=0)
        # Long histories get fewer queries a tile, so that the mask stays within 32 MiB in float32.
        self.tile = min(_TILE_QUERIES_MAX, max(1, _MASK_ELEMENTS_MAX // max(1, keys)))
        self._mask = _lower_right(min(self.tile, max((n for n, _ in tiled), default=0)), keys, memory)

    def mask(self, queries: int, keys: int) -> torch.Tensor:
        """Additive mask (queries, keys) of the last ``queries`` of ``keys`` tokens, as a view.

        Masks of all tile sizes are windows of one: each is zeros with the same triangle at the right.
        """
        rows, columns = self._mask.shape
        right = columns - rows + queries
        return self._mask[:queries, right - keys : right]


def _lower_right(rows: int, keys: int, memory: KVMemory) -> torch.Tensor:
    mask = torch.zeros(rows, keys + rows, dtype=memory.spec.dtype, device=memory.device)
    mask[:, keys:] = torch.full((rows, rows), float("-inf"), dtype=mask.dtype, device=mask.device).triu(1)
    return mask


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
    """Write the new keys and values to their blocks and attend span by span.

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
    paged.memory.write(layer, paged.rows, key, value)
    outputs = []
    for span in paged.spans:
        cut = slice(span.begin, span.end)
        queries = query[:, :, cut]
        if span.rows is None:
            outputs.append(_attend_fresh(queries, key[:, :, cut], value[:, :, cut], scaling))
        else:
            outputs += _attend_history(queries, *paged.memory.gather(layer, span.rows), paged, scaling)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


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


def _attend_fresh(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=query.shape[2] > 1,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output.transpose(1, 2)


def _attend_history(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: PagedStep, scaling: float | None
) -> list[torch.Tensor]:
    _, heads, queries, head_size = query.shape
    if queries == 1:
        # The query heads of a group become rows of one KV head: one read of the keys serves them all.
        grouped = query.reshape(1, key.shape[1], -1, head_size)
        output = scaled_dot_product_attention(grouped, key, value, scale=scaling)
        return [output.reshape(1, 1, heads, head_size)]
    start = key.shape[2] - queries
    outputs = []
    for first in range(0, queries, step.tile):
        last = min(first + step.tile, queries)
        output = scaled_dot_product_attention(
            query[:, :, first:last],
            key[:, :, : start + last],
            value[:, :, : start + last],
            attn_mask=step.mask(last - first, start + last),
            scale=scaling,
            enable_gqa=key.shape[1] != heads,
        )
        outputs.append(output.transpose(1, 2))
    return outputs
