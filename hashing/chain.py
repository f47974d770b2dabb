"""Token ids to block hashes: each names the whole prefix that it ends."""

import struct

from hashing.algorithm import DIGEST_BYTES, Digest, block_digest
from hashing.errors import HashingError
from hashing.extras import Extras
from hashing.fields import U32_MAX, require_digest, require_int
from hashing.namespace import Root
from hashing.tokens import TOKEN_BYTES, TokenInput, pack_tokens

_LENGTH = struct.Struct("<I")
_NO_EXTRAS = _LENGTH.pack(0)


def hash_blocks(
    root: Root,
    tokens: TokenInput,
    extras: Extras | None = None,
    *,
    parent: bytes | None = None,
    first_block: int = 0,
    digest: Digest | None = None,
) -> bytes:
    """The hashes of the whole blocks in ``tokens``: blocks × 16 packed bytes.

    hash[i] = H(parent ‖ u32 LE length of extras ‖ extras ‖ tokens of block i), where the parent of
    block 0 is the root. The tail that does not fill a block has no hash. To continue a chain, pass
    the tokens from ``first_block`` on and as ``parent`` the hash of the block before; ``extras``
    stay those of the whole prompt. ``digest`` replaces the root's algorithm.
    """
    block_bytes = root.block_size * TOKEN_BYTES
    packed = memoryview(pack_tokens(tokens))
    blocks = len(packed) // block_bytes
    link = _first_parent(root, parent, first_block)
    hash_of = block_digest(root.algorithm) if digest is None else digest
    encoded = {} if extras is None else extras.encode_run(first_block, blocks, root.block_size)
    contents = struct.iter_unpack(f"{block_bytes}s", packed[: blocks * block_bytes])
    if encoded:
        sized = {block: _LENGTH.pack(len(data)) + data for block, data in encoded.items()}
        hashes = [
            link := hash_of(link + sized.get(block, _NO_EXTRAS) + content)
            for block, (content,) in enumerate(contents, first_block)
        ]
    else:
        hashes = [link := hash_of(link + _NO_EXTRAS + content) for (content,) in contents]
    joined = b"".join(hashes)
    if len(joined) != blocks * DIGEST_BYTES:
        raise HashingError(
            f"digest {digest!r} made {len(joined)} bytes for {blocks} blocks, expected {DIGEST_BYTES} "
            f"a block; return exactly {DIGEST_BYTES} bytes"
        )
    return joined


def _first_parent(root: Root, parent: bytes | None, first_block: int) -> bytes:
    require_int("first_block", first_block, 0, U32_MAX, "pass the index of the first block in tokens")
    if (parent is None) != (first_block == 0):
        given = "no parent" if parent is None else "a parent"
        raise HashingError(
            f"first_block is {first_block} with {given}, expected a parent exactly where first_block is "
            "not 0, since the parent of block 0 is the root; pass both to continue a chain, or neither"
        )
    if parent is None:
        return root.digest
    return require_digest("parent", parent, DIGEST_BYTES, "pass one block hash")
