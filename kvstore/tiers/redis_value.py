"""Format of one block in Redis: its key, and the header before its payload (docs/wire-format.md).

Pure functions, so that a reader of any other language or version can be checked against them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
from xxhash import xxh3_64_intdigest

from kvstore.block import BlockRows, MissCause, Shard
from kvstore.errors import NamespaceError
from kvstore.tiers.base import Payload

MAGIC = b"PKVB"
VERSION = 1
RAW_CODEC = "raw"
"""The payload is the block's bytes as the engine wrote them."""

HEADER_ALIGNMENT = 64
MAX_HEADER_BYTES = 65535 // HEADER_ALIGNMENT * HEADER_ALIGNMENT
"""Longest header, padding included, whose length fits its u16."""

# Magic, format version, header length, xxh3_64 of all other bytes of the header: the same in every
# version, so that a reader can tell a damaged value from one that a newer writer left.
_FIXED = struct.Struct("<4sHHQ")
_CHECKED_BEFORE = 8
_CHECKED_FROM = _FIXED.size

_WIDEST_RANK = 65535
_WIDEST_CODEC = "x" * 16


class Header(NamedTuple):
    """A header that checked out: its length with padding, and then its map, in the order on the wire.

    ``token_ids`` are u32 LE, packed.
    """

    length: int
    namespace: bytes
    shard: str
    parent: bytes
    segment_tag: bytes
    block_index: int
    token_ids: bytes
    fingerprint: int
    payload_bytes: int
    payload_xxh3_64: int
    codec: str


_NAMES = Header._fields[1:]
_TYPES = (bytes, str, bytes, bytes, int, bytes, int, int, int, str)


def block_key(prefix: str, rows: BlockRows, block: int) -> bytes:
    """Key of one block; the braces keep its whole segment in one Redis Cluster slot."""
    tag, block_hash = rows.tag_at(block).hex(), rows.hash_at(block).hex()
    return f"{prefix}:{rows.namespace.hex()}:{rows.shard}:{{{tag}}}:{block_hash}".encode()


@lru_cache
def header_bytes(block_size: int) -> int:
    """Length of every header of a namespace with this block size, padding included.

    Integers and names vary in length; room for the longest makes the header's end known before
    its beginning has been read. May exceed ``MAX_HEADER_BYTES``: such blocks cannot be stored.
    """
    widest = Header(
        length=0,
        namespace=bytes(16),
        shard=str(Shard(*[_WIDEST_RANK] * 4)),
        parent=bytes(16),
        segment_tag=bytes(16),
        block_index=2**32 - 1,
        token_ids=bytes(4 * block_size),
        fingerprint=2**64 - 1,
        payload_bytes=2**64 - 1,
        payload_xxh3_64=2**64 - 1,
        codec=_WIDEST_CODEC,
    )
    used = _FIXED.size + len(_pack_fields(widest))
    return -(-used // HEADER_ALIGNMENT) * HEADER_ALIGNMENT


class Headers:
    """The headers of some rows' values. ``rows`` must carry tokens and fingerprints. Not thread-safe."""

    def __init__(self, rows: BlockRows) -> None:
        assert rows.tokens is not None, "a value holds its tokens, so that readers can compare them"
        assert rows.fingerprints is not None, "a value holds its fingerprint, so that readers can compare it"
        block_size = rows.tokens.shape[1]
        self._length = header_bytes(block_size)
        if self._length > MAX_HEADER_BYTES:
            raise NamespaceError(
                f"a header for {block_size} tokens takes {self._length} bytes, expected at most "
                f"{MAX_HEADER_BYTES}; use a smaller block size"
            )
        self._rows = rows
        self._shard = str(rows.shard)
        self._token_bytes = 4 * block_size
        self._tokens = rows.tokens.astype("<u4", copy=False).tobytes()
        self._indexes = rows.indexes.tolist()
        self._fingerprints = rows.fingerprints.tolist()
        self._pack = msgpack.Packer().pack
        self._start = _FIXED.pack(MAGIC, VERSION, self._length, 0)[:_CHECKED_BEFORE]

    def header(self, block: int, payload_bytes: int, checksum: int) -> bytes:
        """Header of one block, to go right before its payload, whose xxh3_64 is ``checksum``."""
        rows, token = self._rows, block * self._token_bytes
        fields: bytes = self._pack(
            {
                "namespace": rows.namespace,
                "shard": self._shard,
                "parent": rows.parent_at(block),
                "segment_tag": rows.tag_at(block),
                "block_index": self._indexes[block],
                "token_ids": self._tokens[token : token + self._token_bytes],
                "fingerprint": self._fingerprints[block],
                "payload_bytes": payload_bytes,
                "payload_xxh3_64": checksum,
                "codec": RAW_CODEC,
            }
        )
        body = fields.ljust(self._length - _CHECKED_FROM, b"\0")
        assert len(body) == self._length - _CHECKED_FROM, (
            f"shard {self._shard} is wider than there is room for"
        )
        return self._start + xxh3_64_intdigest(self._start + body).to_bytes(8, "little") + body


def pack_header(rows: BlockRows, block: int, payload_bytes: int, checksum: int) -> bytes:
    """One of ``Headers``."""
    return Headers(rows).header(block, payload_bytes, checksum)


def parse_header(buffer: bytes | memoryview) -> Header | MissCause:
    """The header at the start of ``buffer``, which may be longer.

    CORRUPT means that nobody can read it; VERSION, that it is intact but not ours to judge.
    """
    if len(buffer) < _FIXED.size:
        return MissCause.CORRUPT
    magic, version, length, checksum = _FIXED.unpack_from(buffer)
    if magic != MAGIC or not _FIXED.size <= length <= len(buffer):
        return MissCause.CORRUPT
    checked = bytes(buffer[:_CHECKED_BEFORE]) + bytes(buffer[_CHECKED_FROM:length])
    if xxh3_64_intdigest(checked) != checksum:
        return MissCause.CORRUPT
    if version != VERSION:
        return MissCause.VERSION
    fields = _unpack_fields(checked[_CHECKED_BEFORE:])
    return MissCause.CORRUPT if fields is None else Header(length, *fields)


def compare(header: Header, rows: BlockRows, block: int) -> MissCause | None:
    """Whether the header names the block that was asked for, by all that ``rows`` knows of it."""
    if header.codec != RAW_CODEC:
        return MissCause.VERSION
    same = (
        header.namespace == rows.namespace
        and header.shard == str(rows.shard)
        and header.parent == rows.parent_at(block)
        and header.segment_tag == rows.tag_at(block)
        and header.block_index == rows.indexes[block]
        and (rows.tokens is None or header.token_ids == _packed_tokens(rows, block))
        and (rows.fingerprints is None or header.fingerprint == int(rows.fingerprints[block]))
    )
    return None if same else MissCause.COLLISION


def verify_value(
    rows: BlockRows, block: int, head: bytes, payload: Payload, checksum: int
) -> int | MissCause:
    """``checksum``, the payload's xxh3_64, when value and payload are the block's; else why they are not.

    ``head`` is all of the value that comes before its last ``len(payload)`` bytes.
    """
    header = parse_header(head)
    if header is MissCause.CORRUPT and _claimed_length(head) > len(head):
        # Not ours by length; another version's may reach into what was read as the payload.
        header = parse_header(head + payload[:MAX_HEADER_BYTES].tobytes())
    if isinstance(header, MissCause):
        return header
    if header.length != len(head) or header.payload_bytes != len(payload):
        return wrong_size(header, len(head) + len(payload))
    cause = compare(header, rows, block)
    if cause is not None:
        return cause
    return checksum if checksum == header.payload_xxh3_64 else MissCause.CORRUPT


def wrong_size(header: Header | MissCause, value_bytes: int) -> MissCause:
    """Cause of a miss on a value of ``value_bytes`` that cannot hold the payload asked for."""
    if isinstance(header, MissCause):
        return header
    whole = header.length + header.payload_bytes == value_bytes
    return MissCause.COLLISION if whole else MissCause.CORRUPT


def _packed_tokens(rows: BlockRows, block: int) -> bytes:
    assert rows.tokens is not None
    packed: bytes = rows.tokens[block].astype("<u4", copy=False).tobytes()
    return packed


def _pack_fields(header: Header) -> bytes:
    packed: bytes = msgpack.packb(dict(zip(_NAMES, header[1:], strict=True)))
    return packed


def _unpack_fields(body: bytes) -> Iterable[Any] | None:
    try:
        # The codec's name comes last and holds no zero: what is stripped is the padding.
        fields = msgpack.unpackb(body.rstrip(b"\0"))
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(fields, dict) or tuple(fields) != _NAMES:
        return None
    return fields.values() if tuple(map(type, fields.values())) == _TYPES else None


def _claimed_length(head: bytes) -> int:
    if len(head) < _FIXED.size:
        return 0
    length: int = _FIXED.unpack_from(head)[2]
    return length
