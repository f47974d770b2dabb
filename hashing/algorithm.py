"""The hash functions a chain may use, each cut to 16 bytes."""

import hashlib
from collections.abc import Callable

import xxhash

from hashing.errors import HashingError

Digest = Callable[[bytes], bytes]
"""Any bytes to exactly ``DIGEST_BYTES`` bytes."""

DIGEST_BYTES = 16
ENGINE_PREFIX = "vllm-"
"""Algorithms of this family name a serving engine's own chain, which the engine computes."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


_DIGESTS: dict[str, Digest] = {
    # Canonical (big-endian) form, seed 0.
    "xxh3_128": xxhash.xxh3_128_digest,
    "sha256": _sha256,
}


def require_algorithm(algorithm: object) -> str:
    """``algorithm`` as a name that a namespace may carry."""
    known = isinstance(algorithm, str) and (
        algorithm in _DIGESTS or (algorithm.startswith(ENGINE_PREFIX) and algorithm != ENGINE_PREFIX)
    )
    if not known:
        raise HashingError(
            f"algorithm is {algorithm!r}, expected one of {sorted(_DIGESTS)} or an engine's own chain "
            f"('{ENGINE_PREFIX}<name>'); use 'xxh3_128' unless tenants do not trust each other"
        )
    return str(algorithm)


def root_digest(algorithm: str) -> Digest:
    """What hashes a namespace: its own algorithm, or SHA-256 where an engine makes the chain."""
    return _DIGESTS.get(algorithm, _sha256)


def block_digest(algorithm: str) -> Digest:
    """What hashes the blocks of a chain; an engine's own chain cannot be computed here."""
    if algorithm not in _DIGESTS:
        raise HashingError(
            f"blocks of algorithm {algorithm!r} are hashed by the engine, expected one of "
            f"{sorted(_DIGESTS)}; pass the first {DIGEST_BYTES} bytes of the engine's own hashes instead"
        )
    return _DIGESTS[algorithm]
