"""Floating point operations of a step, and how many this machine does in a second at best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from prefill.spec import ModelSpec

# A GPU is not busy with less.
_PEAK_SIZES = {"cpu": 1024, "cuda": 8192}
_PEAK_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """Multiply-adds count twice; only matrix products count.

    ``weights`` are those that every token meets, ``head_weights`` those of the output layer, which
    only the last token of a span meets. ``pair`` is what one query and one key cost in all layers.
    """

    weights: int
    head_weights: int
    pair: int

    @classmethod
    def of(cls, model: PreTrainedModel, spec: ModelSpec) -> FlopsModel:
        """From the matrices of a model; embeddings are looked up, not multiplied."""
        untyped: Any = model
        head: torch.nn.Linear | None = untyped.get_output_embeddings()
        looked_up = {
            id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
        }
        head_weights = 0 if head is None else int(head.weight.numel())
        if head is not None:
            looked_up.add(id(head.weight))
        weights = sum(
            each.numel() for each in model.parameters() if each.dim() == 2 and id(each) not in looked_up
        )
        # Scores and the weighted sum: two products of head_size each.
        return cls(weights, head_weights, 4 * spec.layers * spec.query_heads * spec.head_size)

    def step(self, spans: Iterable[tuple[int, int]]) -> int:
        """Operations of a step whose spans are (start, tokens): positions [start, start + tokens)."""
        total = 0
        for start, tokens in spans:
            pairs = tokens * start + tokens * (tokens + 1) // 2
            total += 2 * (self.weights * tokens + self.head_weights) + self.pair * pairs
        return total


def matmul_peak(device: torch.device | str, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Operations a second of a square matrix product, the best of a few: a fraction of a second on a CPU."""
    size = _PEAK_SIZES[torch.device(device).type]
    left = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_PEAK_ROUNDS):
        began = clock()
        (left @ left)[0, 0].item()
        best = min(best, clock() - began)
    return 2 * size**3 / best
