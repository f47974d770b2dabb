"""One step of a model over paged blocks: spans of several sequences, packed into one token batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from prefill.attention import PagedStep
from prefill.errors import PromptError
from prefill.flops import FlopsModel
from prefill.paged import BlockTable, KVMemory
from prefill.spans import PackedSpan
from prefill.spec import ModelSpec
from prefill.varlen import Varlen, varlen_on

TokenArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Span:
    """Compute positions [start, start + len(tokens)) of a sequence whose earlier ones are in its blocks.

    ``table`` must have blocks for all of these positions; theirs are written. Earlier positions
    may also be computed by another span of the same step.
    """

    table: BlockTable
    start: int
    tokens: TokenArray


class Runner:
    """Runs a model that was loaded with the paged attention; holds no state of any sequence."""

    def __init__(self, model: PreTrainedModel, memory: KVMemory, varlen: Varlen | None = None) -> None:
        """``varlen`` is None for what suits the memory: on CUDA one call a layer where it can be."""
        self._model = model
        self._memory = memory
        self._varlen = varlen or varlen_on(memory)
        self._flops = FlopsModel.of(model, memory.spec)

    @torch.inference_mode()
    def step(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits after the last token of each span: float32, (len(spans), vocab).

        Raises PromptError, before anything is written, when a span does not fit the model.
        """
        assert spans
        memory = self._memory
        for span in spans:
            require_fitting(memory.spec, span.tokens, span.start + len(span.tokens))
        lengths = [len(span.tokens) for span in spans]
        ends = np.cumsum(lengths)
        packed = [
            PackedSpan(end - length, end, span.start, span.table)
            for span, length, end in zip(spans, lengths, ends.tolist(), strict=True)
        ]
        positions = np.concatenate([np.arange(s.start, s.start + len(s.tokens)) for s in spans])
        output = self._model(
            input_ids=self._batch(np.concatenate([span.tokens for span in spans])),
            position_ids=self._batch(positions),
            use_cache=False,
            logits_to_keep=memory.upload(ends - 1),
            paged=PagedStep(memory, packed, self._varlen),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def flops(self, spans: Sequence[Span]) -> int:
        """Floating point operations of a step over ``spans``."""
        return self._flops.step((span.start, len(span.tokens)) for span in spans)

    def _batch(self, values: TokenArray) -> torch.Tensor:
        return self._memory.upload(values.astype(np.int64)).unsqueeze(0)


def require_fitting(spec: ModelSpec, tokens: TokenArray, stop: int) -> None:
    """Raise PromptError when a model cannot compute ``tokens`` at positions that end at ``stop``."""
    if not len(tokens):
        raise PromptError("0 tokens to compute, expected at least 1; give a prompt that is not empty")
    if stop > spec.max_positions:
        raise PromptError(
            f"{stop} tokens, expected at most {spec.max_positions} for {spec.name!r}; "
            "shorten the prompt or the output, or choose a model with a longer context"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= spec.vocab_size:
        raise PromptError(
            f"token id {low if low < 0 else high}, expected 0 to {spec.vocab_size - 1} "
            f"for {spec.name!r}; tokenize the prompt with this model's tokenizer"
        )
