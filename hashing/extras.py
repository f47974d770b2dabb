"""What may differ between requests of one namespace although their token ids are equal."""

import struct
from dataclasses import dataclass, field

from hashing.errors import HashingError
from hashing.fields import encode_field, require_digest, require_int, require_salt

CONTENT_DIGEST_BYTES = 32
MAX_POSITION = 2**31 - 1
"""Positions relative to a block are coded as i32."""

_SALT_TAG = 1
_ITEM_TAG = 2
_EMBEDDINGS_TAG = 3


@dataclass(frozen=True, slots=True)
class ContentItem:
    """An image, audio clip or the like that stands at tokens [start, start + length) of the prompt.

    ``digest`` is 32 bytes (SHA-256, for example) over the content as the model sees it: processor
    settings included, since they change the embeddings.
    """

    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        fix = "hash the whole content with SHA-256, without cutting the digest"
        require_digest("content digest", self.digest, CONTENT_DIGEST_BYTES, fix)
        require_int("item start", self.start, 0, MAX_POSITION, "count tokens from the start of the prompt")
        longest = MAX_POSITION - self.start
        require_int("item length", self.length, 1, longest, "count the placeholder tokens of the item")


@dataclass(frozen=True, slots=True)
class Extras:
    """A request's part of its blocks' identity. Empty extras hash like none at all.

    ``items`` may come in any order and may overlap. ``embeddings[i]`` is a 32-byte digest of the
    prompt embeddings that replace tokens of block i and of which tokens they replace; it is None
    where block i has tokens only, and blocks past the end have none. One digest a block lets
    prompts that share leading embeddings share blocks.
    """

    request_salt: bytes | None = field(default=None, repr=False)
    items: tuple[ContentItem, ...] = ()
    embeddings: tuple[bytes | None, ...] = ()

    def __post_init__(self) -> None:
        if self.request_salt is not None:
            require_salt("request_salt", self.request_salt)
        for name, value in (("items", self.items), ("embeddings", self.embeddings)):
            if not isinstance(value, tuple):
                raise HashingError(f"{name} is a {type(value).__name__}, expected a tuple; pass tuple(...)")
        for index, item in enumerate(self.items):
            if not isinstance(item, ContentItem):
                raise HashingError(
                    f"items[{index}] is a {type(item).__name__}, expected a ContentItem; "
                    "pass ContentItem(digest, start, length)"
                )
        for block, digest in enumerate(self.embeddings):
            if digest is not None:
                fix = f"hash the embedding rows of block {block} with SHA-256, or pass None"
                require_digest(f"embeddings[{block}]", digest, CONTENT_DIGEST_BYTES, fix)

    def encode_block(self, block: int, block_size: int) -> bytes:
        """The extras of one block of a chain, counted from 0; empty where it has none."""
        return self.encode_run(block, 1, block_size).get(block, b"")

    def encode_run(self, first_block: int, blocks: int, block_size: int) -> dict[int, bytes]:
        """Block index → encoded extras, for those of ``blocks`` blocks from ``first_block`` that have any.

        Costs in proportion to those blocks, however long the run is.
        """
        end_block = first_block + blocks
        fields: dict[int, list[bytes]] = {}
        if self.request_salt is not None and first_block == 0 < blocks:
            fields[0] = [encode_field(_SALT_TAG, self.request_salt)]
        for item in sorted(self.items, key=lambda item: (item.start, item.digest)):
            last_block = (item.start + item.length - 1) // block_size
            for block in range(max(first_block, item.start // block_size), min(end_block, last_block + 1)):
                relative = struct.pack("<i", item.start - block * block_size)
                fields.setdefault(block, []).append(encode_field(_ITEM_TAG, item.digest + relative))
        for block in range(first_block, min(end_block, len(self.embeddings))):
            digest = self.embeddings[block]
            if digest is not None:
                fields.setdefault(block, []).append(encode_field(_EMBEDDINGS_TAG, digest))
        return {block: b"".join(parts) for block, parts in fields.items()}
