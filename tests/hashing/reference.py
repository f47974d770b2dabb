"""A second implementation of block hash and fingerprint, and the published vectors that it makes.

It shares no code with the package and is as plain as the format allows: bytes are put together one
field and one token at a time. Running this file writes golden.json anew; a change of what it holds
is a change of format and needs a new version.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

GOLDEN = Path(__file__).with_name("golden.json")
MASK = 2**64 - 1

Json = dict[str, Any]


def reference_digest(algorithm: str, data: bytes) -> bytes:
    if algorithm == "xxh3_128":
        return xxhash.xxh3_128_intdigest(data, seed=0).to_bytes(16, "big")
    return hashlib.sha256(data).digest()[:16]


def reference_field(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + len(value).to_bytes(4, "little") + value


def reference_namespace(namespace: Json) -> bytes:
    shape = namespace["kv_shape"]
    encoded = reference_field(1, namespace["format_version"].to_bytes(2, "little"))
    encoded += reference_field(2, namespace["algorithm"].encode("utf-8"))
    encoded += reference_field(3, namespace["model"].encode("utf-8"))
    encoded += reference_field(4, namespace["weights_id"].encode("utf-8"))
    encoded += reference_field(5, namespace["kv_dtype"].encode("utf-8"))
    encoded += reference_field(6, namespace["layout"].encode("utf-8"))
    encoded += reference_field(7, namespace["block_size"].to_bytes(4, "little"))
    encoded += reference_field(8, b"".join(number.to_bytes(4, "little") for number in shape))
    if namespace["adapter"] is not None:
        encoded += reference_field(9, namespace["adapter"].encode("utf-8"))
    if namespace["tenant_salt"] is not None:
        encoded += reference_field(10, bytes.fromhex(namespace["tenant_salt"]))
    return encoded


def reference_extras(extras: Json, block: int, block_size: int) -> bytes:
    encoded = b""
    if block == 0 and extras["request_salt"] is not None:
        encoded += reference_field(1, bytes.fromhex(extras["request_salt"]))
    first, last = block * block_size, (block + 1) * block_size - 1
    for item in sorted(extras["items"], key=lambda item: (item["start"], item["digest"])):
        if item["start"] <= last and item["start"] + item["length"] - 1 >= first:
            relative = (item["start"] - first).to_bytes(4, "little", signed=True)
            encoded += reference_field(2, bytes.fromhex(item["digest"]) + relative)
    if block < len(extras["embeddings"]) and extras["embeddings"][block] is not None:
        encoded += reference_field(3, bytes.fromhex(extras["embeddings"][block]))
    return encoded


def reference_hashes(
    root: bytes, algorithm: str, block_size: int, tokens: list[int], extras: Json
) -> list[str]:
    hashes, parent = [], root
    for block in range(len(tokens) // block_size):
        own = tokens[block * block_size : (block + 1) * block_size]
        extra = reference_extras(extras, block, block_size)
        packed = b"".join(token.to_bytes(4, "little") for token in own)
        parent = reference_digest(algorithm, parent + len(extra).to_bytes(4, "little") + extra + packed)
        hashes.append(parent.hex())
    return hashes


def reference_splitmix64(seed: int, count: int) -> list[int]:
    state, values = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        values.append(z ^ (z >> 31))
    return values


def reference_fingerprints(block_size: int, tokens: list[int], extras: Json) -> list[str]:
    blocks = len(tokens) // block_size
    token_keys = reference_splitmix64(0, blocks * block_size)
    block_keys = reference_splitmix64(1, blocks)
    fingerprints, total = [], 0
    for block in range(blocks):
        for position in range(block * block_size, (block + 1) * block_size):
            total += (tokens[position] + 1) * (token_keys[position] | 1)
        extra = reference_extras(extras, block, block_size)
        if extra:
            total += xxhash.xxh3_64_intdigest(extra) * (block_keys[block] | 1)
        fingerprints.append(f"{total & MASK:016x}")
    return fingerprints


def namespace_fields(**changes: object) -> Json:
    namespace: Json = {
        "format_version": 1,
        "algorithm": "xxh3_128",
        "model": "example/model-7b",
        "weights_id": "0123456789abcdef0123456789abcdef01234567",
        "kv_dtype": "bfloat16",
        "layout": "NHD",
        "block_size": 16,
        "kv_shape": [32, 2, 8, 128],
        "adapter": None,
        "tenant_salt": None,
    }
    return namespace | changes


def extras_fields(**changes: object) -> Json:
    return {"request_salt": None, "items": [], "embeddings": []} | changes


def _item(content: bytes, start: int, length: int) -> Json:
    return {"digest": hashlib.sha256(content).hexdigest(), "start": start, "length": length}


def _tokens(count: int) -> list[int]:
    """Any fixed ids will do, if they reach past 16 bits and hold both ends of the range."""
    return [0, 2**32 - 1, 1, *((7919 * index * index + 13) % 151_936 for index in range(3, count))]


def make_golden() -> list[Json]:
    """The vectors, made by the reference alone."""
    salt, digest = b"salt of a tenant".hex(), hashlib.sha256(b"embedding rows").hexdigest()
    items = [_item(b"late image", 40, 30), _item(b"first image", 5, 20), _item(b"within", 42, 1)]
    every_tag = extras_fields(request_salt=b"request".hex(), items=items, embeddings=[None, digest, digest])
    shapes = [
        ("default", namespace_fields(), 50, extras_fields()),
        ("sha256", namespace_fields(algorithm="sha256"), 50, extras_fields()),
        ("adapter", namespace_fields(adapter="sql-lora:3"), 33, extras_fields()),
        ("salt", namespace_fields(tenant_salt=salt), 33, extras_fields()),
        (
            "adapter-salt-sha256",
            namespace_fields(adapter="ü", tenant_salt=salt, algorithm="sha256"),
            33,
            extras_fields(),
        ),
        ("block-size-1", namespace_fields(block_size=1), 5, extras_fields()),
        (
            "block-size-256-mla",
            namespace_fields(block_size=256, kv_shape=[61, 1, 1, 576]),
            513,
            extras_fields(),
        ),
        ("no-whole-block", namespace_fields(), 15, extras_fields()),
        ("request-salt", namespace_fields(), 48, extras_fields(request_salt=b"request".hex())),
        ("content-items", namespace_fields(), 80, extras_fields(items=items)),
        ("embeddings", namespace_fields(), 64, extras_fields(embeddings=[digest, None, digest])),
        ("every-tag", namespace_fields(), 80, every_tag),
        ("every-tag-sha256-block-3", namespace_fields(algorithm="sha256", block_size=3), 80, every_tag),
    ]
    vectors = []
    for name, namespace, count, extras in shapes:
        tokens, block_size, algorithm = _tokens(count), namespace["block_size"], namespace["algorithm"]
        encoded = reference_namespace(namespace)
        root = reference_digest(algorithm, encoded)
        vectors.append(
            {
                "name": name,
                "namespace": namespace,
                "tokens": b"".join(token.to_bytes(4, "little") for token in tokens).hex(),
                "extras": extras,
                "encoded_namespace": encoded.hex(),
                "root": root.hex(),
                "hashes": reference_hashes(root, algorithm, block_size, tokens, extras),
                "fingerprints": reference_fingerprints(block_size, tokens, extras),
            }
        )
    return vectors


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(make_golden(), indent=1) + "\n")
