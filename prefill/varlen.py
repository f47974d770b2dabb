"""Attention of all spans of a step in one call a layer: torch's variable-length kernel, on CUDA.

The kernel (FlashAttention 2 in torch) takes queries and keys of many sequences one after the other and the
places where each begins; or the keys in pages, with a table of the pages of each sequence. It knows half
precision only, and pages of a multiple of 256 tokens. So blocks of 256 tokens are read in place, through any
stride; of smaller ones keys and values are gathered first, for all spans at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from prefill.paged import KVMemory
from prefill.spans import PackedSpan
from prefill.spec import ModelSpec

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

_DTYPES = (torch.float16, torch.bfloat16)
_CAPABILITY_MIN = (8, 0)
_HEAD_UNIT, _HEAD_MAX = 8, 256
_PAGE_TOKENS = 256
_PAGES_MAX = 2**31 - 1
_CAUSAL, _FULL = (-1, 0), (-1, -1)


class Way(Enum):
    """How a step's spans attend."""

    SPANS = auto()
    """Each by itself: the kernel does not apply."""
    GATHERED = auto()
    """All in one call, over keys and values that were gathered for it."""
    PAGED = auto()
    """All in one call, over the blocks where they are."""


def way_for(spec: ModelSpec, block_size: int, pages: int, capability: tuple[int, int] | None) -> Way:
    """What the kernel can do for a model whose memory counts ``pages``.

    ``capability`` is the GPU's compute capability; None where there is no GPU, or torch has no such kernel.
    """
    if capability is None or capability < _CAPABILITY_MIN or spec.dtype not in _DTYPES:
        return Way.SPANS
    if spec.head_size % _HEAD_UNIT or spec.head_size > _HEAD_MAX or spec.query_heads % spec.kv_heads:
        return Way.SPANS
    # Page numbers are 32 bits wide.
    return Way.GATHERED if block_size % _PAGE_TOKENS or pages > _PAGES_MAX else Way.PAGED


class Kernel(Protocol):
    """What is used of ``torch.nn.attention.varlen.varlen_attn``.

    Queries are (tokens, heads, head_size), keys too, or (pages, page size, heads, head_size) with
    ``block_table``. With the window (-1, 0) the last query of a sequence sees all of its keys, and each
    one before sees one key less; with (-1, -1) all see all.
    """

    def __call__(  # noqa: PLR0913 - the signature is torch's
        self,
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
    ) -> Any: ...  # noqa: ANN401 - torch's gives a tensor, or a pair when asked for one


@dataclass(frozen=True, slots=True)
class Varlen:
    """A kernel, and which way it reads keys: GATHERED or PAGED.

    ``gathered_bytes`` is how many bytes of keys, and of values, are gathered at a time, one span's at least.
    """

    kernel: Kernel
    way: Way
    gathered_bytes: int = 256 * 2**20


def varlen_on(memory: KVMemory) -> Varlen | None:
    """Torch's kernel where it serves this memory."""
    capability = None
    if memory.device.type == "cuda" and _torch_has_it():
        capability = torch.cuda.get_device_capability(memory.device)
    way = way_for(memory.spec, memory.block_size, memory.page_count, capability)
    return None if way is Way.SPANS else Varlen(varlen_attn, way)


def _torch_has_it() -> bool:
    if varlen_attn is None or "block_table" not in signature(varlen_attn).parameters:
        return False
    return torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of a call that are the same in all layers. With neither rows nor table keys are fresh.

    ``rows`` are those to gather; ``table`` is (spans, pages) with ``used`` tokens of each span's pages.
    """

    queries: slice
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    queries_max: int
    keys_max: int
    rows: torch.Tensor | None = None
    table: torch.Tensor | None = None
    used: torch.Tensor | None = None


class AllSpans:
    """One step's attention with one call a layer, or a few where gathered keys would take much memory."""

    def __init__(
        self,
        memory: KVMemory,
        spans: Sequence[PackedSpan],
        rows: Sequence[NDArray[np.int64]],
        varlen: Varlen,
    ) -> None:
        """``rows`` are the memory rows of each span's keys."""
        self._memory = memory
        self._kernel = varlen.kernel
        room = varlen.gathered_bytes // memory.spec.row_bytes
        if not any(span.start for span in spans):
            self._calls = [self._call(spans)]
        elif varlen.way is Way.PAGED:
            self._calls = [self._paged(spans)]
        else:
            self._calls = [
                self._call(spans[first:stop], memory.upload(np.concatenate(rows[first:stop])))
                for first, stop in _batches(spans, room)
            ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """(1, T, query_heads, head_size) of a layer whose keys and values are in their blocks already."""
        outputs = []
        for call in self._calls:
            if call.table is not None:
                keys, values = self._memory.pages(layer)
            else:
                # Of what was computed in this step, or of scratch: token-major views either way.
                fresh = (key, value) if call.rows is None else self._memory.gather(layer, call.rows)
                keys, values = (each[0].transpose(0, 1) for each in fresh)
            output: torch.Tensor = self._kernel(
                query[0, :, call.queries].transpose(0, 1),
                keys,
                values,
                call.query_starts,
                call.key_starts,
                call.queries_max,
                call.keys_max,
                scale=scaling,
                # The same for single queries, and there the kernel reads a group's keys once.
                window_size=_CAUSAL if call.queries_max > 1 else _FULL,
                enable_gqa=key.shape[1] != query.shape[1],
                seqused_k=call.used,
                block_table=call.table,
            )
            outputs.append(output)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def _call(self, spans: Sequence[PackedSpan], rows: torch.Tensor | None = None) -> _Call:
        queries = [span.end - span.begin for span in spans]
        keys = [span.keys for span in spans]
        return _Call(
            slice(spans[0].begin, spans[-1].end),
            self._starts(queries),
            self._starts(keys),
            max(queries),
            max(keys),
            rows,
        )

    def _paged(self, spans: Sequence[PackedSpan]) -> _Call:
        pages = [self._memory.page_numbers(span.table, span.keys) for span in spans]
        table = np.zeros((len(spans), max(map(len, pages))), dtype=np.int32)
        for line, numbers in zip(table, pages, strict=True):
            line[: len(numbers)] = numbers
        used = np.array([span.keys for span in spans], dtype=np.int32)
        plain = self._call(spans)
        return _Call(
            plain.queries,
            plain.query_starts,
            plain.key_starts,
            plain.queries_max,
            plain.keys_max,
            table=self._memory.upload(table),
            used=self._memory.upload(used),
        )

    def _starts(self, lengths: list[int]) -> torch.Tensor:
        return self._memory.upload(np.cumsum([0, *lengths], dtype=np.int32))


def _batches(spans: Sequence[PackedSpan], room: int) -> Iterator[tuple[int, int]]:
    """Runs of spans, as (first, stop), that have ``room`` keys together at most; one span at least."""
    first, keys = 0, 0
    for at, span in enumerate(spans):
        if at > first and keys + span.keys > room:
            yield first, at
            first, keys = at, 0
        keys += span.keys
    yield first, len(spans)
