"""Packed batches over blocks without a model, and a plain variable-length attention to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefill.paged import SLOT_ALIGN_BYTES, BlockTable, KVMemory
from prefill.spans import PackedSpan, SpanBySpan
from prefill.spec import ModelSpec
from prefill.varlen import AllSpans, Varlen

_LAYERS, _LAYER = 3, 1


def shape_of(kv_heads: int, group: int, head_size: int, dtype: torch.dtype) -> ModelSpec:
    """A model of which nothing but the attention matters; ``group`` query heads share a KV head."""
    return ModelSpec(
        name="shape",
        weights_id="none",
        layers=_LAYERS,
        kv_heads=kv_heads,
        head_size=head_size,
        query_heads=kv_heads * group,
        max_positions=1 << 20,
        kv_dtype=str(dtype).removeprefix("torch."),
        vocab_size=1,
        eos_ids=(),
    )


@dataclass(frozen=True)
class PackedBatch:
    """Spans whose keys and values are in their blocks, and the queries, keys and values of one layer."""

    memory: KVMemory
    spans: list[PackedSpan]
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def attend(self, varlen: Varlen | None) -> torch.Tensor:
        """(1, tokens, query_heads, head_size): in one call where a kernel is given, else span by span."""
        rows = [self.memory.rows(span.table, span.keys) for span in self.spans]
        if varlen is None:
            return SpanBySpan(self.memory, self.spans, rows).attend(_LAYER, *self.states, None)
        return AllSpans(self.memory, self.spans, rows, varlen).attend(_LAYER, *self.states, None)


def packed_batch(
    spec: ModelSpec, block_size: int, parts: Sequence[tuple[int, int]], *, seed: int = 0, device: str = "cpu"
) -> PackedBatch:
    """``parts`` are (history, new tokens) of each span. Blocks lie in no order, unevenly far apart.

    What is in no block of a span is NaN.
    """
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    counts = [-(-(start + tokens) // block_size) for start, tokens in parts]
    slot = -(-spec.block_bytes(block_size) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    places = np.cumsum(random.integers(0, 3, sum(counts)) * SLOT_ALIGN_BYTES + slot) - slot
    flat = torch.full((int(places[-1]) + slot,), 0xFF, dtype=torch.uint8, device=device)
    memory = KVMemory(flat, spec, block_size)
    tables = [BlockTable(part) for part in np.split(random.permutation(places), np.cumsum(counts)[:-1])]

    def states(heads: int, tokens: int) -> torch.Tensor:
        drawn = torch.randn(1, heads, tokens, spec.head_size, generator=generator)
        return drawn.to(device=device, dtype=spec.dtype)

    keys, values = [], []
    for (start, tokens), table in zip(parts, tables, strict=True):
        key, value = states(spec.kv_heads, start + tokens), states(spec.kv_heads, start + tokens)
        memory.write(_LAYER, memory.upload(memory.rows(table, start + tokens)), key, value)
        keys.append(key[:, :, start:])
        values.append(value[:, :, start:])
    ends = np.cumsum([tokens for _, tokens in parts]).tolist()
    spans = [
        PackedSpan(end - tokens, end, start, table)
        for (start, tokens), end, table in zip(parts, ends, tables, strict=True)
    ]
    return PackedBatch(
        memory, spans, (states(spec.query_heads, ends[-1]), torch.cat(keys, 2), torch.cat(values, 2))
    )


def plain_varlen(  # noqa: PLR0913 - the signature is torch's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in float32, sequence by sequence, after the checks that torch's kernel makes."""
    count = len(cu_seq_q) - 1
    integers = [each for each in (cu_seq_q, cu_seq_k, seqused_k, block_table) if each is not None]
    assert all(each.dtype is torch.int32 and each.is_contiguous() for each in integers)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert len(cu_seq_k) == count + 1
    assert (seqused_k is None) == (block_table is None)
    assert enable_gqa == (query.shape[1] != key.shape[-2])
    assert window_size == ((-1, 0) if max_q > 1 else (-1, -1))
    query_ends, key_ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (query_ends[0], query_ends[-1]) == (0, len(query))
    assert (max_q, max_k) == (max(np.diff(query_ends)), max(np.diff(key_ends)))
    outputs = []
    for at in range(count):
        queries = query[query_ends[at] : query_ends[at + 1]].float()
        if block_table is None or seqused_k is None:
            ours = slice(key_ends[at], key_ends[at + 1])
            keys, values = key[ours], value[ours]
        else:
            pages, used = block_table[at].long(), int(seqused_k[at])
            keys, values = (each[pages].flatten(0, 1)[:used] for each in (key, value))
        group = query.shape[1] // keys.shape[1]
        keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (scale or query.shape[-1] ** -0.5)
        if window_size[1] == 0:
            seen = torch.ones(scores.shape[1:], device=query.device).tril(len(keys) - len(queries))
            scores = scores.masked_fill(seen == 0, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outputs).to(query.dtype)
