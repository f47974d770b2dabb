"""``size``: what the KV cache of a model takes in pools and in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hashing import KVShape
from kvstore.block import WHOLE, BlockRows
from kvstore.commands.model_options import ModelOptions
from kvstore.commands.model_shape import SHAPE_FLAGS, ModelCache, find_config, read_shape
from kvstore.commands.output import Answer, Grid, counted, format_bytes, format_count
from kvstore.errors import ConfigError
from kvstore.spec import DTYPE_BYTES, slot_bytes_for
from kvstore.table import table_bytes
from kvstore.tiers.redis_value import block_key, header_bytes

_ROWS = 1024


def size(options: ModelOptions, environ: Mapping[str, str]) -> Answer:
    """Bytes of a token, a block, ``tokens`` tokens, and a fleet. ConfigError where that cannot be told."""
    cache = _cache_of(options, environ)
    dtype, shape, block_size = options.kv_dtype or cache.dtype, cache.shape, options.block_size
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"the KV dtype is {dtype!r}, expected one of {', '.join(sorted(DTYPE_BYTES))}; say which with "
            "--kv-dtype"
        )
    token = shape.layers * shape.planes * shape.kv_heads * shape.head_size * DTYPE_BYTES[dtype]
    blocks = options.tokens // block_size
    # Beside its payload a block takes a row of the pool's table, and in Redis a header and a key.
    pool = blocks * (slot_bytes_for(token * block_size) + table_bytes(_ROWS, block_size) // _ROWS)
    facts = {
        "model": options.model,
        "layers": shape.layers,
        "planes": shape.planes,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "kv_dtype": dtype,
        "block_size": block_size,
        "token_bytes": token,
        "block_bytes": token * block_size,
        "tokens": options.tokens,
        "blocks": blocks,
        "pool_bytes": pool,
        "replicas": options.replicas,
        "fleet_pool_bytes": pool * options.replicas,
        "redis_bytes": blocks * (token * block_size + header_bytes(block_size) + _key_bytes()),
    }
    return Answer(facts, _parts(facts, cache.note))


def _cache_of(options: ModelOptions, environ: Mapping[str, str]) -> ModelCache:
    layers, kv_heads, head_size = options.layers, options.kv_heads, options.head_size
    if layers is not None and kv_heads is not None and head_size is not None:
        return ModelCache(KVShape(layers, options.planes, kv_heads, head_size))
    if options.model is None or not (layers is kv_heads is head_size is None):
        raise ConfigError(f"the model's shape is not known; give --model, or all of {SHAPE_FLAGS}")
    return read_shape(find_config(options.model, environ))


def _key_bytes() -> int:
    """Length of a block's key under the usual prefix."""
    name = bytes(16)
    rows = BlockRows(name, WHOLE, name, name, name, np.zeros(1, dtype=np.uint32), None, None)
    return len(block_key("kv", rows, 0))


def _parts(facts: Mapping[str, Any], note: str) -> list[Grid | str]:
    planes = "keys and values" if facts["planes"] == 2 else "one latent for keys and values"
    title = (
        f"{facts['model'] or 'this shape'}: {counted(facts['layers'], 'layer')}, "
        f"{counted(facts['kv_heads'], 'KV head')} of {facts['head_size']}, {planes}, {facts['kv_dtype']}"
    )
    sizes = [
        ("a token", facts["token_bytes"]),
        (f"a block of {facts['block_size']}", facts["block_bytes"]),
        (f"{format_count(facts['tokens'])} tokens in a pool", facts["pool_bytes"]),
        (f"in the pools of {counted(facts['replicas'], 'replica')}", facts["fleet_pool_bytes"]),
        ("in Redis, once for all", facts["redis_bytes"]),
    ]
    grid = Grid(("", "size", "bytes"), [(what, format_bytes(n), format_count(n)) for what, n in sizes])
    legend = (
        f"{counted(facts['blocks'], 'whole block')}, all ranks together. To each key come about 100 bytes of "
        "the server's own, and what its allocator rounds up (docs/redis.md)."
    )
    return [title, grid, *([note] if note else []), legend]
