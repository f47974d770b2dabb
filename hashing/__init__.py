"""Tokens to block identities: a pure function of its arguments, the same in every process.

A ``Namespace`` says what makes blocks interchangeable and yields a ``Root``; ``hash_blocks`` chains
a prompt's blocks from it, and ``fingerprint_blocks`` checks the chain independently.
"""

from hashing.chain import hash_blocks
from hashing.errors import HashingError, TokenError
from hashing.extras import ContentItem, Extras
from hashing.fingerprint import fingerprint_blocks, key_stream
from hashing.namespace import FORMAT_VERSION, KVShape, Namespace, Root
from hashing.tokens import TokenInput, pack_tokens

__all__ = [
    "FORMAT_VERSION",
    "ContentItem",
    "Extras",
    "HashingError",
    "KVShape",
    "Namespace",
    "Root",
    "TokenError",
    "TokenInput",
    "fingerprint_blocks",
    "hash_blocks",
    "key_stream",
    "pack_tokens",
]
