"""The shape of a model's KV cache, from the ``config.json`` that lies beside its weights. No network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashing import KVShape
from kvstore.errors import ConfigError

SHAPE_FLAGS = "--layers, --kv-heads and --head-size"
USUAL_DTYPE = "bfloat16"

# Names that one figure has in the configurations of several families of models.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZES = ("head_dim", "kv_channels")
_DTYPES = ("dtype", "torch_dtype")
_PARTS = ("text_config", "llm_config", "language_config")
_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The KV cache of one model. ``note`` says what of the model is not in it."""

    shape: KVShape
    dtype: str = USUAL_DTYPE
    note: str = ""


def find_config(model: str, environ: Mapping[str, str]) -> Path:
    """The configuration of that name, in a folder of that name, or of a model in the Hugging Face cache."""
    path = Path(model)
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    home = Path(environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(environ.get("HF_HUB_CACHE", home / "hub"))
    cached = hub / f"models--{model.replace('/', '--')}"
    for snapshot in sorted(cached.glob("snapshots/*/config.json")):
        return snapshot
    raise ConfigError(
        f"--model is {model!r}, which is no folder with a config.json, and {hub} has no such model; download "
        f"it first, or say what a token takes: {SHAPE_FLAGS} of `kvstore size`, --bytes-per-token of "
        "`kvstore simulate`"
    )


def read_shape(path: Path) -> ModelCache:
    """What a model's configuration says of its cache; ConfigError where it does not."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; give {SHAPE_FLAGS} instead") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; give the folder of a model, or {SHAPE_FLAGS}")
    text = next((config[part] for part in _PARTS if isinstance(config.get(part), dict)), config)
    layers, note = _full_layers(text, _whole(path, text, _LAYERS))
    dtype = next((found for part in (text, config) if (found := _first(part, _DTYPES))), USUAL_DTYPE)
    return ModelCache(_shape(path, text, layers), str(dtype).removeprefix("torch."), note)


def _shape(path: Path, text: Mapping[str, Any], layers: int) -> KVShape:
    if text.get("kv_lora_rank"):
        # Multi-head latent attention keeps one compressed vector a token, and a rotary key beside it.
        latent = _whole(path, text, ("kv_lora_rank",))
        return KVShape(layers, 1, 1, latent + _whole(path, text, ("qk_rope_head_dim",)))
    heads = _whole(path, text, _HEADS)
    told = _first(text, _HEAD_SIZES) is not None
    size = _whole(path, text, _HEAD_SIZES) if told else _whole(path, text, _WIDTHS) // heads
    if _first(text, _KV_HEADS) is not None:
        kv_heads = _whole(path, text, _KV_HEADS)
    else:
        kv_heads = 1 if text.get("multi_query") else heads
    return KVShape(layers, 2, kv_heads, size)


def _full_layers(text: Mapping[str, Any], layers: int) -> tuple[int, str]:
    """The layers whose cache grows with the prompt, and what to say of the others."""
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or _FULL not in kinds:
        return layers, ""
    full = kinds.count(_FULL)
    if full == len(kinds):
        return full, ""
    others = ", ".join(sorted({str(kind) for kind in kinds} - {_FULL}))
    return full, f"{len(kinds) - full} layers of {len(kinds)} are not counted: {others}"


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> object:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _whole(path: Path, text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _first(text, names)
    if not isinstance(value, int) or value < 1:
        said = "is not there" if value is None else f"is {value!r}"
        raise ConfigError(
            f"{path}: {names[0]} {said}, expected a number above 0; give {SHAPE_FLAGS} instead of --model"
        )
    return value
