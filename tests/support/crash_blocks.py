"""Prompts by number, and payloads that anybody can recompute from a block's hash.

So every process, however it came to a block, knows which bytes its writer meant.
"""

from __future__ import annotations

import numpy as np

from hashing import KVShape, Namespace
from kvstore.block import HASH_BYTES, Chain, Uint32Array
from kvstore.spec import NamespaceSpec
from kvstore.tiers.base import Payload

BLOCK_SIZE = 16
PAYLOAD_BYTES = 16 << 10
SPEC = NamespaceSpec(
    Namespace(
        model="crash",
        weights_id="0" * 40,
        kv_dtype="bfloat16",
        layout="test",
        block_size=BLOCK_SIZE,
        kv_shape=KVShape(layers=2, planes=2, kv_heads=2, head_size=8),
    ),
    PAYLOAD_BYTES,
)

_WORDS = np.arange(PAYLOAD_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def prompt(number: int, blocks: int, shared: int = 0) -> Uint32Array:
    """Token ids of a prompt; its first ``shared`` blocks are those of all prompts of its hundred."""
    ids = np.arange(blocks * BLOCK_SIZE, dtype=np.uint32)
    own = ids + np.uint32((number + 1) << 12)
    own[: shared * BLOCK_SIZE] = ids[: shared * BLOCK_SIZE] + np.uint32((number // 100 % 250 + 1) << 24)
    return own


def chain(number: int, blocks: int, shared: int = 0) -> Chain:
    return Chain.of(SPEC.root, prompt(number, blocks, shared))


def payload_of(block_hash: bytes) -> Payload:
    """What the writer of that block writes: no two words of any two payloads are likely to be equal."""
    first, second = np.frombuffer(block_hash, dtype="<u8")
    payload: Payload = ((_WORDS ^ first) * np.uint64(0xBF58476D1CE4E5B9) + second).view(np.uint8)
    return payload


def payloads_of(hashed: Chain) -> list[Payload]:
    return [
        payload_of(hashed.hashes[at : at + HASH_BYTES]) for at in range(0, len(hashed.hashes), HASH_BYTES)
    ]
