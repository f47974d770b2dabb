"""Loading a model for paged attention, or refusing it with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from prefill.attention import PAGED, register
from prefill.errors import ModelError, UnsupportedModelError
from prefill.paged import SLOT_ALIGN_BYTES, BlockTable, KVMemory
from prefill.runner import Runner, Span
from prefill.spec import SUPPORTED, ModelSpec, read_spec, require_supported
from prefill.weights import Weights, find_weights

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Whatever a config says is computed with before it is checked.
_CONFIG_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    StrictDataclassError,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

_CHECK_TOKENS = 24
_CHECK_CUT = 11
_CHECK_BLOCK = 4
_CHECK_SEED = 20_26
# Relative to the size of all logits. Reordered sums stay well below, another attention well above.
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, with paged attention switched on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    spec: ModelSpec


def load_model(
    name: str | None, *, dtype: torch.dtype, device: torch.device | str, cache_dir: Path
) -> LoadedModel:
    """Load what ``find_weights`` finds and check that its cache can live in blocks.

    Raises ModelError when it cannot be found or read, UnsupportedModelError when its attention is
    another one.
    """
    if dtype not in KV_DTYPES:
        raise ModelError(
            f"dtype {dtype}, expected one of {', '.join(map(str, KV_DTYPES))}; choose one of these"
        )
    register()
    weights = find_weights(name, cache_dir)
    config = _read_config(weights)
    _require_causal_interface(weights.name, config)
    model = _read_weights(weights, dtype, torch.device(device))
    spec = read_spec(weights.name, weights.weights_id, config, dtype)
    spec = replace(spec, eos_ids=_eos_ids(model))
    verify_paged_attention(model, spec)
    return LoadedModel(model, _read_tokenizer(weights), spec)


def verify_paged_attention(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Compare the model's own attention with the paged one on a short prompt, cut in two.

    Raises UnsupportedModelError when they disagree or the paged one does not run: configs do not
    tell everything, and a cache that is almost right is worse than none.
    """
    tokens = np.random.default_rng(_CHECK_SEED).integers(0, spec.vocab_size, _CHECK_TOKENS)
    tokens = tokens[: spec.max_positions]
    try:
        own = _own_logits(model, tokens)
        paged = _paged_logits(model, spec, tokens)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"model {spec.name!r} does not run with paged attention ({error}); supported are {SUPPORTED}; "
            "choose such a model"
        ) from error
    error_size = float((own - paged).norm() / own.norm())
    if not error_size <= _CHECK_TOLERANCE[spec.dtype]:
        raise UnsupportedModelError(
            f"model {spec.name!r} gives logits {error_size:.2g} away from its own with paged attention, "
            f"expected at most {_CHECK_TOLERANCE[spec.dtype]:g}; supported are {SUPPORTED}; "
            "choose such a model"
        )


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, tokens: NDArray[np.int64]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    try:
        output = model(input_ids=torch.from_numpy(tokens).to(model.device).unsqueeze(0), use_cache=False)
    finally:
        model.set_attn_implementation(PAGED)
    logits: torch.Tensor = output.logits[0, [_CHECK_CUT - 1, -1]].float()
    return logits


def _paged_logits(model: PreTrainedModel, spec: ModelSpec, tokens: NDArray[np.int64]) -> torch.Tensor:
    blocks = -(-len(tokens) // _CHECK_BLOCK)
    slot = -(-spec.block_bytes(_CHECK_BLOCK) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    flat = torch.zeros(blocks * slot, dtype=torch.uint8, device=model.device)
    table = BlockTable(slot * block for block in reversed(range(blocks)))
    runner = Runner(model, KVMemory(flat, spec, _CHECK_BLOCK))
    head = runner.step([Span(table, 0, tokens[:_CHECK_CUT])])
    tail = runner.step([Span(table, _CHECK_CUT, tokens[_CHECK_CUT:])])
    return torch.cat([head, tail])


def _read_config(weights: Weights) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(weights.folder, local_files_only=True)
    except _CONFIG_ERRORS as error:
        raise _unreadable(weights, error) from error
    return config


def _require_causal_interface(name: str, config: PreTrainedConfig) -> None:
    require_supported(name, config)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or not model_class.is_backend_compatible():
        raise UnsupportedModelError(
            f"model {name!r} ({config.model_type}) is no causal language model whose attention goes through "
            f"transformers' AttentionInterface; supported are {SUPPORTED}; choose such a model"
        )


def _read_weights(weights: Weights, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        # Untyped: with output_loading_info the call returns a pair, which its annotation leaves out.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            weights.folder,
            dtype=dtype,
            device_map={"": device},
            attn_implementation=PAGED,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise _unreadable(weights, error) from error
    model, report = loaded
    absent = sorted(report["missing_keys"])
    if absent:
        raise ModelError(
            f"model folder {str(weights.folder)!r} lacks {len(absent)} of the model's tensors (first: "
            f"{absent[0]!r}), expected all; download or save the model again"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _read_tokenizer(weights: Weights) -> PreTrainedTokenizerBase | None:
    if not any((weights.folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            weights.folder, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(weights, error) from error
    return tokenizer


def _unreadable(weights: Weights, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"model {weights.name!r} in {str(weights.folder)!r} cannot be read ({reason}); "
        "expected a folder as save_pretrained() writes it; download or save the model again"
    )


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = model.generation_config
    ids = None if generation is None else generation.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
