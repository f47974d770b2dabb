"""What vLLM's own objects say, in this package's words: the only reader of its configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from hashing import KVShape
from kvstore.block import Shard
from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.connectors.vllm.groups import CacheGroups
from kvstore.connectors.vllm.identity import EngineIdentity, weights_revision
from kvstore.connectors.vllm.options import ConnectorOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SUPPORTED = "0.32"
"""The minor version whose interface and tensors this package knows."""
_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC")
_GROUPED = (KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.SLIDING_WINDOW)
"""What layers may keep where groups of them have tables of blocks of their own."""


def require_supported_version(version: str = vllm.__version__) -> None:
    """UnsupportedError for another minor version: layouts and hooks change between them."""
    if version.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise UnsupportedError(
            f"this is vLLM {version}, and the connector knows {SUPPORTED}.x; install one that fits the other"
        )


def cut_of(vllm_config: VllmConfig) -> tuple[int, int]:
    """Tensor- and pipeline-parallel sizes; UnsupportedError for other ways of cutting a context."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name} is {getattr(parallel, name)}, expected 1; leave it out")
    return parallel.tensor_parallel_size, parallel.pipeline_parallel_size


def shard_of(vllm_config: VllmConfig) -> Shard:
    """Of the worker whose process this is."""
    tp_size, pp_size = cut_of(vllm_config)
    rank = vllm_config.parallel_config.rank
    return Shard(rank % tp_size, tp_size, rank // tp_size % pp_size, pp_size)


def groups_of(kv_cache_config: KVCacheConfig) -> CacheGroups:
    """The engine's groups of layers; UnsupportedError where a prefix is more than blocks of one size.

    What vLLM takes from a connector is one number of tokens for all layers, so all are served or none.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [_spec_of(group.kv_cache_spec) for group in groups]
    if len(specs) == 1 and isinstance(specs[0], FullAttentionSpec):
        return CacheGroups(int(specs[0].block_size), (tuple(groups[0].layer_names),))
    if not specs or any(get_kv_cache_spec_kind(spec) not in _GROUPED for spec in specs):
        kinds = dict.fromkeys(type(spec).__name__ for spec in specs)
        raise UnsupportedError(
            f"the model keeps {' and '.join(kinds) or 'no KV cache'}, expected full attention and sliding "
            "windows; its prefixes stay with the engine, except that chunked attention is kept whole, and "
            "served, with --disable-hybrid-kv-cache-manager"
        )
    _require_one_size(specs)
    windows = [int(spec.sliding_window) for spec in specs if isinstance(spec, SlidingWindowSpec)]
    layers = tuple(tuple(group.layer_names) for group in groups)
    return CacheGroups(int(specs[0].block_size), layers, min(windows, default=None))


def _spec_of(spec: KVCacheSpec) -> KVCacheSpec:
    """That of any of the layers, as vLLM's scheduler has it."""
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _require_one_size(specs: list[KVCacheSpec]) -> None:
    names = ("block_size", "page_size_bytes", "num_kv_heads", "head_size", "dtype")
    for name in names:
        sizes = sorted({str(getattr(spec, name)) for spec in specs})
        if len(sizes) > 1:
            raise UnsupportedError(
                f"the model's groups of layers have {name} {' and '.join(sizes)}, expected one for all; its "
                "prefixes stay with the engine"
            )


def identity_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions
) -> EngineIdentity:
    """The engine's account of its blocks; UnsupportedError where they cannot be kept."""
    groups = groups_of(kv_cache_config)
    speculative = vllm_config.speculative_config
    if groups.hybrid and speculative is not None and speculative.uses_draft_kv_cache():
        raise UnsupportedError(
            "the drafter has layers of its own beside those with sliding windows, which is untried; start "
            "the engine without --speculative-config, or with --disable-hybrid-kv-cache-manager"
        )
    hashed = kv_cache_config.hash_block_size
    if groups.hybrid and hashed not in (None, groups.block_size):
        raise UnsupportedError(
            f"prefixes are hashed every {hashed} tokens, in blocks of {groups.block_size}; leave out "
            "--prefix-match-unit"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError(
            "the scales of the KV cache are measured when the engine starts, so its blocks are its own; "
            "start it without --calculate-kv-scales"
        )
    model = vllm_config.model_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    _, pp_size = cut_of(vllm_config)
    layers = model.get_total_num_hidden_layers()
    on_rank = max(sum(map(len, groups.layers)), -(-layers // pp_size))
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = vllm_config.cache_config.cache_dtype
    return EngineIdentity(
        model=options.model or _name_of(vllm_config),
        weights_id=weights_revision(model.model, model.revision, options.weights_id),
        dtype=dtype,
        kv_dtype=str(spec.dtype).removeprefix("torch.") if cache_dtype == "auto" else str(cache_dtype),
        layout=_layout_of(vllm_config, kv_cache_config) + _grouping(groups),
        block_size=groups.block_size,
        kv_shape=KVShape(
            layers=layers,
            planes=1 if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MLA_ATTENTION else 2,
            kv_heads=model.get_total_num_kv_heads(),
            head_size=spec.head_size,
        ),
        payload_bytes=on_rank * spec.page_size_bytes,
        settings=_settings_of(vllm_config),
    )


def _grouping(groups: CacheGroups) -> str:
    """The order of layers in a block, where it is not simply the model's."""
    if not groups.hybrid:
        return ""
    return f"/groups-{hashlib.sha256(json.dumps(groups.layers).encode()).hexdigest()[:8]}"


def _name_of(vllm_config: VllmConfig) -> str:
    served = vllm_config.model_config.served_model_name
    name: str = served[0] if isinstance(served, list) else served
    return Path(name).name if Path(name).is_absolute() else name


def _layout_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    layout = kv_cache_config.kv_cache_layout
    if layout not in _LAYOUTS:
        raise UnsupportedError(
            f"the KV cache has layout {layout}, of which a block is not one run of bytes; start the engine "
            f"with VLLM_KV_CACHE_LAYOUT set to one of {', '.join(_LAYOUTS)}"
        )
    if current_platform.is_cpu():
        return f"vllm{SUPPORTED}/{layout}/cpu-{_cpu_packing(vllm_config, kv_cache_config)}"
    backend = getattr(vllm_config.attention_config, "backend", None)
    return f"vllm{SUPPORTED}/{layout}/{current_platform.device_name}-{getattr(backend, 'name', 'auto')}"


def _cpu_packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The instruction set, by which CPU kernels pack a block."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MLA_ATTENTION:
        return "mla"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - only where there is a CPU

    isa: str = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return isa


def _settings_of(vllm_config: VllmConfig) -> dict[str, Any]:
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    return {
        "config": model.hf_config.to_dict(),
        "quantization": model.quantization,
        "draft": None if speculative is None else str(speculative),
    }
