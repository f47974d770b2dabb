"""A second, independent name for a prefix, to notice that a hash has lied.

A block hash names the whole prefix, but only as long as nothing collides. Comparing a block's own
tokens finds a collision in that block alone: when an ancestor was replaced by a colliding block
after its descendants had been computed, hash, parent and tokens of a descendant still agree, and
its KV was computed over another prompt. A fingerprint over all tokens so far travels with each
block and is compared too; being of another construction, it does not collide where the hash does.

It is a multilinear hash modulo 2^64 (Carter and Wegman, "Universal classes of hash functions",
1979; Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Its keys are splitmix64
streams (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), forced odd,
so that a change of any one token always shows. The keys are public: this finds accidents and
collisions made for the block hash, it does not authenticate.
"""

from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from hashing.extras import Extras
from hashing.fields import U32_MAX, require_int
from hashing.namespace import require_block_size
from hashing.tokens import TokenInput, pack_tokens

_TOKEN_SEED = 0
_EXTRAS_SEED = 1

_SHORTEST_CACHED_BITS = 12
_LONGEST_CACHED_BITS = 20

# splitmix64: the step of the state, and the two multipliers of its finalizer.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)


def fingerprint_blocks(
    tokens: TokenInput,
    block_size: int,
    extras: Extras | None = None,
    *,
    first_block: int = 0,
    previous: int | np.uint64 = 0,
) -> NDArray[np.uint64]:
    """F of each whole block in ``tokens``: shape (blocks,), over the prompt up to the block's end.

    F = Σ (token_t + 1) · K_t + Σ xxh3_64(extras_b) · K'_b mod 2^64, over all positions t and all
    blocks b with extras up to there. To continue a chain, pass the tokens from ``first_block`` on
    and as ``previous`` the F of the block before; ``extras`` stay those of the whole prompt.
    """
    require_block_size(block_size)
    require_int("first_block", first_block, 0, U32_MAX, "pass the index of the first block in tokens")
    before = int(previous) if isinstance(previous, np.uint64) else previous
    require_int("previous", before, 0, 2**64 - 1, "pass the fingerprint of the block before")
    ids = np.frombuffer(pack_tokens(tokens), dtype="<u4")
    blocks = len(ids) // block_size
    if blocks == 0:
        return np.empty(0, dtype=np.uint64)
    words = ids[: blocks * block_size].astype(np.uint64)
    words += _ONE
    keys = _token_keys(first_block * block_size, len(words))
    shape = (blocks, block_size)
    # einsum multiplies and adds in one pass, without an array of products.
    sums: NDArray[np.uint64] = np.einsum("bt,bt->b", words.reshape(shape), keys.reshape(shape))
    encoded = {} if extras is None else extras.encode_run(first_block, blocks, block_size)
    if encoded:
        touched = np.fromiter(encoded, dtype=np.uint64, count=len(encoded))
        values = np.array([xxhash.xxh3_64_intdigest(data) for data in encoded.values()], dtype=np.uint64)
        sums[touched - np.uint64(first_block)] += values * _keys_at(_EXTRAS_SEED, touched)
    np.cumsum(sums, out=sums)
    sums += np.uint64(before)
    return sums


def key_stream(count: int) -> NDArray[np.uint64]:
    """The first ``count`` keys of the token stream: odd, read-only, for other multilinear sums."""
    keys = _token_keys(0, count)
    keys.setflags(write=False)
    return keys


def _token_keys(start: int, count: int) -> NDArray[np.uint64]:
    """K of token positions [start, start + count)."""
    stop = start + count
    bits = max(_SHORTEST_CACHED_BITS, (stop - 1).bit_length())
    if bits > _LONGEST_CACHED_BITS:
        return _keys_at(_TOKEN_SEED, np.arange(start, stop, dtype=np.uint64))
    return _leading_token_keys(bits)[start:stop]


@lru_cache(maxsize=_LONGEST_CACHED_BITS - _SHORTEST_CACHED_BITS + 1)
def _leading_token_keys(bits: int) -> NDArray[np.uint64]:
    """K of the first 2^bits positions, read-only. All lengths together hold 16 MiB at most."""
    keys = _keys_at(_TOKEN_SEED, np.arange(1 << bits, dtype=np.uint64))
    keys.setflags(write=False)
    return keys


def _keys_at(seed: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Value ``position`` (counted from 0) of the splitmix64 stream of ``seed``, forced odd."""
    z = (positions + _ONE) * _STEP + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return (z ^ (z >> np.uint64(31))) | _ONE
