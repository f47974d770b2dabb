"""What a namespace tells apart, what it refuses, and what it never shows."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashing import HashingError, KVShape, Namespace, Root, hash_blocks

BASE = Namespace(
    model="example/model-7b",
    weights_id="0123abcd",
    kv_dtype="bfloat16",
    layout="NHD",
    block_size=16,
    kv_shape=KVShape(layers=32, planes=2, kv_heads=8, head_size=128),
)

CHANGES: dict[str, dict[str, object]] = {
    "model": {"model": "example/model-8b"},
    "weights_id": {"weights_id": "0123abce"},
    "kv_dtype": {"kv_dtype": "float16"},
    "layout": {"layout": "HND"},
    "block_size": {"block_size": 32},
    "layers": {"kv_shape": KVShape(31, 2, 8, 128)},
    "planes": {"kv_shape": KVShape(32, 1, 8, 128)},
    "kv_heads": {"kv_shape": KVShape(32, 2, 4, 128)},
    "head_size": {"kv_shape": KVShape(32, 2, 8, 64)},
    "algorithm": {"algorithm": "sha256"},
    "engine_algorithm": {"algorithm": "vllm-sha256_cbor"},
    "adapter": {"adapter": "sql:1"},
    "tenant_salt": {"tenant_salt": b"tenant"},
    "format_version": {"format_version": 2},
}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
SHORT = st.sampled_from(["a", "b", "ab", "ba", "aab", "\t", "\x00"])


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES.keys())
def test_every_field_is_part_of_the_identity(changed: dict[str, object]) -> None:
    """dtype, revision, layout, block size and version each make another namespace.

    sglang #33268 #36420 (an fp8 reader got bf16 bytes), dynamo #1233 #659 (block sizes mixed),
    dynamo #14416 and LMCache #4463 #4247 (a packing changed).
    """
    assert replace(BASE, **changed).root().digest != BASE.root().digest  # type: ignore[arg-type]


def test_adapters_never_share_blocks() -> None:
    """LoRA id and version are part of the identity: vllm #44250, LMCache #2961."""
    adapters = (None, "sql:1", "sql:2", "chat:1")
    roots = [replace(BASE, adapter=adapter).root() for adapter in adapters]
    assert len({hash_blocks(root, range(32)) for root in roots}) == len(adapters)


@given(TEXT, TEXT)
def test_an_adapter_cannot_pass_for_a_salt(adapter: str, salt: str) -> None:
    """A LoRA name equal to a cache salt collided in an untyped list of keys: vllm #44701."""
    with_adapter = replace(BASE, adapter=adapter)
    with_salt = replace(BASE, tenant_salt=salt.encode())
    assert with_adapter.encode() != with_salt.encode()
    assert replace(BASE, adapter=adapter, tenant_salt=salt.encode()).encode() not in (
        with_adapter.encode(),
        with_salt.encode(),
    )


@given(st.tuples(SHORT, SHORT, SHORT, SHORT, SHORT), st.tuples(SHORT, SHORT, SHORT, SHORT, SHORT))
def test_bytes_cannot_move_across_a_field_boundary(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Model "a" with adapter "b" is not model "ab": equal encodings mean equal fields."""
    encodings = [
        replace(
            BASE, model=model, weights_id=weights, kv_dtype=dtype, layout=layout, adapter=adapter
        ).encode()
        for model, weights, dtype, layout, adapter in (one, other)
    ]
    assert (encodings[0] == encodings[1]) == (one == other)


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_a_tenant_salt_separates_tenants_and_is_never_shown(salt: bytes, other: bytes) -> None:
    """A salt must be honoured, and cannot be dropped by the way: LMCache #4825, sglang #37160."""
    salted = replace(BASE, tenant_salt=salt)
    assert salted.root().digest != BASE.root().digest
    assert (salted.root() == replace(BASE, tenant_salt=other).root()) == (salt == other)
    assert "tenant_salt" not in repr(salted)


def test_absent_fields_are_left_out_and_tags_ascend() -> None:
    def tags(encoded: bytes) -> list[int]:
        found, offset = [], 0
        while offset < len(encoded):
            tag, length = struct.unpack_from("<BI", encoded, offset)
            found.append(tag)
            offset += 5 + length
        assert offset == len(encoded)
        return found

    assert tags(BASE.encode()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tags(replace(BASE, tenant_salt=b"s").encode()) == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert tags(replace(BASE, adapter="a", tenant_salt=b"s").encode()) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_an_engine_chain_has_a_root_but_no_blocks_of_ours() -> None:
    root = replace(BASE, algorithm="vllm-sha256_cbor").root()
    assert len(root.digest) == 16
    with pytest.raises(HashingError, match=r"'vllm-sha256_cbor' are hashed by the engine.*pass the first 16"):
        hash_blocks(root, range(32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": ""}, r"model is '', expected a non-empty string; pass the name"),
        ({"weights_id": None}, r"weights_id is None, expected a non-empty string; pass the hub revision"),
        ({"kv_dtype": 7}, r"kv_dtype is 7, expected a non-empty string; pass the cache's dtype"),
        ({"layout": "\ud800"}, r"layout is '\\ud800', expected text that UTF-8 can encode; pass"),
        ({"block_size": 0}, r"block_size is 0, expected an int from 1 to 65536; pass the engine's"),
        ({"block_size": 65537}, r"block_size is 65537, expected an int from 1 to 65536; pass"),
        ({"block_size": True}, r"block_size is True, expected an int from 1 to 65536; pass"),
        ({"kv_shape": (32, 2, 8, 128)}, r"kv_shape is \(32, 2, 8, 128\), expected a KVShape; pass KVShape\("),
        ({"algorithm": "md5"}, r"algorithm is 'md5', expected one of \['sha256', 'xxh3_128'\] or .*; use"),
        ({"algorithm": "vllm-"}, r"algorithm is 'vllm-', expected one of"),
        ({"algorithm": None}, r"algorithm is None, expected one of"),
        ({"adapter": ""}, r"adapter is '', expected a non-empty string; pass LoRA id and version, or None"),
        ({"tenant_salt": b""}, r"tenant_salt is empty, expected non-empty bytes; pass None for no salt"),
        ({"tenant_salt": "secret"}, r"tenant_salt is a str, expected non-empty bytes; pass None"),
        (
            {"format_version": 65536},
            r"format_version is 65536, expected an int from 1 to 65535; leave it out",
        ),
    ],
    ids=str,
)
def test_a_bad_field_is_named_with_its_fix(changed: dict[str, object], message: str) -> None:
    with pytest.raises(HashingError, match=message) as caught:
        replace(BASE, **changed)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 2, 8, 128), r"layers is 0, expected an int from 1 to 4294967295; take it from"),
        ((32, 3, 8, 128), r"planes is 3, expected an int from 1 to 2; 2 for keys and values, 1 for"),
        ((32, 2, -1, 128), r"kv_heads is -1, expected"),
        ((32, 2, 8, 2**32), r"head_size is 4294967296, expected"),
        ((32, 2, 8, 64.0), r"head_size is 64.0, expected an int"),
    ],
)
def test_a_bad_shape_is_named_with_its_fix(shape: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(HashingError, match=message):
        KVShape(*shape)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((b"short", 16, "sha256"), r"root digest has 5 bytes, expected 16; pass Namespace.root\(\)"),
        ((bytearray(16), 16, "sha256"), r"root digest is a bytearray, expected 16 bytes"),
        ((bytes(16), 0, "sha256"), r"block_size is 0, expected"),
        ((bytes(16), 16, "blake3"), r"algorithm is 'blake3', expected"),
    ],
)
def test_a_bad_root_is_named_with_its_fix(fields: tuple[bytes, int, str], message: str) -> None:
    with pytest.raises(HashingError, match=message):
        Root(*fields)


def test_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="block_size"):
        replace(BASE, block_size=-1)
