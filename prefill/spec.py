"""What a model is, as far as its cache is concerned, and which models a block can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from prefill.errors import UnsupportedModelError

LAYOUT = "LPNHD"
"""Axes of a block's payload, outermost first: layer, plane (key, value), token, KV head, head dimension."""

SUPPORTED = (
    "decoder-only models with one full-attention key and value head set per layer (Llama, Qwen, GPT-2, …)"
)

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and identity of one model's KV cache.

    ``weights_id`` changes whenever the weights do and never depends on where they lie.
    ``kv_dtype`` is a torch dtype's name without the ``torch.`` prefix.
    """

    name: str
    weights_id: str
    layers: int
    kv_heads: int
    head_size: int
    query_heads: int
    max_positions: int
    kv_dtype: str
    vocab_size: int
    eos_ids: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.kv_dtype)
        assert isinstance(dtype, torch.dtype), self.kv_dtype
        return dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.kv_heads * self.head_size * self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block's payload: both planes of all layers."""
        return self.layers * 2 * block_size * self.row_bytes


def require_supported(name: str, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError when ``config`` says that blocks cannot hold this model's cache.

    A config cannot prove that they can: that is what ``model.verify_paged_attention`` is for.
    """
    for reason in filter(None, (check(config.get_text_config(decoder=True)) for check in _CHECKS)):
        raise UnsupportedModelError(
            f"model {name!r} ({config.model_type}) has {reason}; supported are {SUPPORTED}; "
            "choose such a model"
        )


def read_spec(name: str, weights_id: str, config: PreTrainedConfig, dtype: torch.dtype) -> ModelSpec:
    """The spec of a model that ``require_supported`` has let pass; without its end tokens."""
    text = config.get_text_config(decoder=True)
    heads = int(text.num_attention_heads)
    return ModelSpec(
        name=name,
        weights_id=weights_id,
        layers=int(text.num_hidden_layers),
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_size=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        query_heads=heads,
        max_positions=int(text.max_position_embeddings),
        kv_dtype=str(dtype).removeprefix("torch."),
        vocab_size=int(text.vocab_size),
        eos_ids=(),
    )


def _encoder(config: PreTrainedConfig) -> str | None:
    return (
        "an encoder whose keys and values are not a prefix of anything" if config.is_encoder_decoder else None
    )


def _no_attention(config: PreTrainedConfig) -> str | None:
    missing = [
        field
        for field in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
        if not isinstance(getattr(config, field, None), int)
    ]
    return (
        f"no attention of known shape and length (its config lacks {', '.join(missing)})" if missing else None
    )


def _other_layers(config: PreTrainedConfig) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return f"layers of type {', '.join(sorted(kinds))}" if kinds else None


def _sliding_window(config: PreTrainedConfig) -> str | None:
    window = getattr(config, "sliding_window", None)
    # With layer types present they decide, and a left-over window size means nothing.
    return (
        f"a sliding window of {window} tokens"
        if window and not getattr(config, "layer_types", None)
        else None
    )


def _softcap(config: PreTrainedConfig) -> str | None:
    cap = getattr(config, "attn_logit_softcapping", None)
    return f"attention scores capped at {cap}" if cap else None


def _latent(config: PreTrainedConfig) -> str | None:
    rank = getattr(config, "kv_lora_rank", None)
    return f"latent attention (kv_lora_rank {rank})" if rank else None


def _shared_layers(config: PreTrainedConfig) -> str | None:
    shared = getattr(config, "num_kv_shared_layers", None)
    return f"{shared} layers that borrow another layer's keys and values" if shared else None


def _moving_rope(config: PreTrainedConfig) -> str | None:
    """Rotations that change with a sequence's length make its earlier keys wrong as it grows."""
    for kind in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if kind in _LENGTH_DEPENDENT_ROPE:
            return f"rotary positions of type {kind!r}, which depend on the length of the whole sequence"
    return None


def _rope_types(parameters: Mapping[str, Any]) -> list[str]:
    nested = [
        kind for value in parameters.values() if isinstance(value, Mapping) for kind in _rope_types(value)
    ]
    return [str(parameters["rope_type"]), *nested] if "rope_type" in parameters else nested


_CHECKS: tuple[Callable[[PreTrainedConfig], str | None], ...] = (
    _encoder,
    _no_attention,
    _other_layers,
    _sliding_window,
    _softcap,
    _latent,
    _shared_layers,
    _moving_rope,
)
