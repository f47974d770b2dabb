"""Attention span by span with torch's own scaled_dot_product_attention: on the CPU, and in float32.

Every chunk of a prompt gathers its history anew. For 6,144 tokens of the packaged model in float32
that is 28 ms of one core, beside 4,100 ms for a chunk of 512 tokens and 610 ms for one of 64: to keep
what was gathered would save less than it costs in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from prefill.paged import BlockTable, KVMemory

_TILE_QUERIES_MAX = 512
_MASK_ELEMENTS_MAX = 1 << 23


@dataclass(frozen=True, slots=True)
class PackedSpan:
    """Tokens [begin, end) of the packed batch: positions from ``start`` on of the sequence in ``table``."""

    begin: int
    end: int
    start: int
    table: BlockTable

    @property
    def keys(self) -> int:
        """Tokens that the last one attends to, itself included."""
        return self.start + self.end - self.begin


class SpanBySpan:
    """One step's attention with a call, or a few, for each span."""

    def __init__(
        self, memory: KVMemory, spans: Sequence[PackedSpan], rows: Sequence[NDArray[np.int64]]
    ) -> None:
        """``rows`` are the memory rows of each span's keys."""
        self._memory = memory
        self._spans = spans
        history = [each for span, each in zip(spans, rows, strict=True) if span.start]
        lengths = [len(each) if span.start else 0 for span, each in zip(spans, rows, strict=True)]
        uploaded = memory.upload(np.concatenate([np.empty(0, dtype=np.int64), *history]))
        self._rows = torch.split(uploaded, lengths)
        tiled = [
            (span.end - span.begin, span.keys) for span in spans if span.start and span.end > span.begin + 1
        ]
        keys = max((keys for _, keys in tiled), default=0)
        # Long histories get fewer queries a tile, so that the mask stays within 32 MiB in float32.
        self.tile = min(_TILE_QUERIES_MAX, max(1, _MASK_ELEMENTS_MAX // max(1, keys)))
        self._mask = _lower_right(min(self.tile, max((n for n, _ in tiled), default=0)), keys, memory)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """(1, T, query_heads, head_size) of a layer whose keys and values are in their blocks already."""
        outputs = []
        for span, rows in zip(self._spans, self._rows, strict=True):
            cut = slice(span.begin, span.end)
            queries = query[:, :, cut]
            if span.start:
                outputs += self._over_history(queries, *self._memory.gather(layer, rows), scaling)
            else:
                outputs.append(_over_itself(queries, key[:, :, cut], value[:, :, cut], scaling))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def mask(self, queries: int, keys: int) -> torch.Tensor:
        """Additive mask (queries, keys) of the last ``queries`` of ``keys`` tokens.

        Masks of all tile sizes are windows of one: each is zeros with the same triangle at the right.
        """
        rows, columns = self._mask.shape
        right = columns - rows + queries
        window = self._mask[:queries, right - keys : right]
        # torch's memory-efficient kernel reads 16 bytes at a time, and does not look where a mask begins.
        return window.clone(memory_format=torch.contiguous_format) if window.is_cuda else window

    def _over_history(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> list[torch.Tensor]:
        _, heads, queries, head_size = query.shape
        if queries == 1:
            # The query heads of a group become rows of one KV head: one read of the keys serves them all.
            grouped = query.reshape(1, key.shape[1], -1, head_size)
            output = scaled_dot_product_attention(grouped, key, value, scale=scaling)
            return [output.reshape(1, 1, heads, head_size)]
        start = key.shape[2] - queries
        outputs = []
        for first in range(0, queries, self.tile):
            last = min(first + self.tile, queries)
            output = scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, : start + last],
                value[:, :, : start + last],
                attn_mask=self.mask(last - first, start + last),
                scale=scaling,
                enable_gqa=key.shape[1] != heads,
            )
            outputs.append(output.transpose(1, 2))
        return outputs


def _over_itself(
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


def _lower_right(rows: int, keys: int, memory: KVMemory) -> torch.Tensor:
    mask = torch.zeros(rows, keys + rows, dtype=memory.spec.dtype, device=memory.device)
    mask[:, keys:] = torch.full((rows, rows), float("-inf"), dtype=mask.dtype, device=mask.device).triu(1)
    return mask
