"""Tiny models with random weights, in Hugging Face folders like real ones.

Weights are spread wide, so that each model has favourite tokens: greedy outputs differ from prompt
to prompt, and rounding does not change them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 503
MAX_POSITIONS = 1024

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# Groups of three and of four query heads, and none; heads of 16, 24 and 12 dimensions.
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
    },
    "gpt2": {"n_embd": 60, "n_layer": 2, "n_head": 5},
}

ARCHITECTURES = tuple(_SHAPES)


def tiny_config(architecture: str, **changes: Any) -> PreTrainedConfig:
    """Config of a model of 2 to 4 layers, with ``changes`` to its fields."""
    fields = {**_COMMON, **_SHAPES.get(architecture, {}), **changes}
    config = AutoConfig.for_model(architecture, **fields)
    assert isinstance(config, PreTrainedConfig)
    return config


def save_tiny_model(config: PreTrainedConfig, folder: Path, seed: int = 2026) -> Path:
    """Write a random model of ``config`` to ``folder``, the same for the same seed; returns ``folder``."""
    loader: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loader.from_config(config).save_pretrained(folder)
    return folder


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in ``folder`` with transformers' own attention: what ours is compared with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    return model
