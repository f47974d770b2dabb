"""Bytes of a block, whole and cut over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashing import KVShape, Namespace
from kvstore.block import WHOLE, Shard
from kvstore.errors import NamespaceError
from kvstore.spec import NamespaceSpec, slot_bytes_for

NAMESPACE = Namespace(
    model="llama",
    weights_id="0" * 40,
    kv_dtype="bfloat16",
    layout="layer, plane, token, head",
    block_size=16,
    kv_shape=KVShape(layers=5, planes=2, kv_heads=8, head_size=128),
)


def test_a_block_is_its_tokens_over_layers_planes_and_heads() -> None:
    assert NamespaceSpec(NAMESPACE).payload_bytes_on() == 16 * 5 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("dtype", "element"),
    [("float32", 4), ("float16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("int8", 1)],
)
def test_every_dtype_has_its_width(dtype: str, element: int) -> None:
    spec = NamespaceSpec(replace(NAMESPACE, kv_dtype=dtype))
    assert spec.payload_bytes_on(WHOLE) == 16 * 5 * 2 * 8 * 128 * element


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_divide_over_ranks_and_are_replicated_beyond(tp_size: int, heads: int) -> None:
    spec = NamespaceSpec(NAMESPACE)
    for rank in range(tp_size):
        assert spec.payload_bytes_on(Shard(rank, tp_size)) == 16 * 5 * 2 * heads * 128 * 2


def test_layers_divide_over_ranks() -> None:
    spec = NamespaceSpec(NAMESPACE)
    layer = 16 * 2 * 8 * 128 * 2
    assert [spec.payload_bytes_on(Shard(0, 1, rank, 2)) for rank in range(2)] == [3 * layer, 2 * layer]
    assert sum(spec.payload_bytes_on(Shard(0, 1, rank, 5)) for rank in range(5)) == spec.payload_bytes_on()


def test_a_size_that_is_given_counts_on_every_shard() -> None:
    spec = NamespaceSpec(replace(NAMESPACE, kv_dtype="packed with scales"), payload_bytes=4242)
    assert spec.payload_bytes_on(Shard(1, 3, 1, 2)) == 4242


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard(0, 1, 0, 6), "pp size 6 exceeds the 5 layers of llama; use at most one rank a layer"),
        (Shard(0, 3), "8 KV heads of llama do not divide over tp size 3; use one that divides them"),
        (Shard(2, 2), r"shard 2\.2\.0\.1 has a rank beyond its size"),
        (Shard(0, 1, 1, 1), r"shard 0\.1\.1\.1 has a rank beyond its size"),
    ],
)
def test_a_shard_that_cannot_be(shard: Shard, message: str) -> None:
    with pytest.raises(NamespaceError, match=message):
        NamespaceSpec(NAMESPACE).payload_bytes_on(shard)


def test_a_dtype_without_a_known_width() -> None:
    spec = NamespaceSpec(replace(NAMESPACE, kv_dtype="nvfp4"))
    with pytest.raises(NamespaceError, match="KV dtype 'nvfp4' has no known size; expected one of bfloat16"):
        spec.payload_bytes_on()


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_bytes(size: int) -> None:
    with pytest.raises(NamespaceError, match=f"payload_bytes is {size}, expected at least 1"):
        NamespaceSpec(NAMESPACE, payload_bytes=size)


@pytest.mark.parametrize(("payload", "slot"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_a_slot_is_the_payload_on_whole_cache_lines(payload: int, slot: int) -> None:
    assert slot_bytes_for(payload) == slot
