"""What vLLM asks of a connector and what ours has, as JSON: importing vLLM warns, which tests forbid."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.engine import groups_of, require_supported_version
from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.connectors.vllm.groups import NULL_BLOCK

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=100)
STATE = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
MODELS: dict[str, list[KVCacheSpec]] = {
    "plain": [FULL],
    "latent": [MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1})],
    "of several sizes": [UniformTypeKVCacheSpecs.from_specs({"layer": FULL, "other": FULL})],
    "windows": [FULL, WINDOW, SlidingWindowSpec(**SHAPE, sliding_window=70)],
    "windows alone": [WINDOW],
    "states": [FULL, STATE],
    "chunks": [FULL, ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)],
    "other blocks": [FULL, SlidingWindowSpec(**SHAPE | {"block_size": 64}, sliding_window=100)],
    "other heads": [FULL, SlidingWindowSpec(**SHAPE | {"num_kv_heads": 4}, sliding_window=100)],
    "nothing": [],
}


def refusal(version: str) -> str:
    try:
        require_supported_version(version)
    except UnsupportedError as error:
        return str(error)
    return ""


def groups(specs: list[KVCacheSpec]) -> list[Any] | str:
    """Width and window, or why not."""
    layers = [KVCacheGroupSpec([f"layer.{place}"], spec) for place, spec in enumerate(specs)]
    try:
        found = groups_of(KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=layers))
    except UnsupportedError as error:
        return str(error)
    return [found.width, found.window]


if __name__ == "__main__":
    found = {
        "ours": [name for name in vars(KVStoreConnector) if not name.startswith("_")],
        "theirs": dir(KVConnectorBase_V1),
        "abstract": sorted(KVStoreConnector.__abstractmethods__),
        "hma": supports_hma(KVStoreConnector),
        "refusals": {version: refusal(version) for version in ("0.31.4", "0.32.1+cpu", "0.33.0", "1.0")},
        "groups": {name: groups(specs) for name, specs in MODELS.items()},
        "null": (NULL_BLOCK_ID, NULL_BLOCK),
    }
    sys.stdout.write(json.dumps(found) + "\n")
