from __future__ import annotations

import struct
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import xxhash

from kvstore.block import BlockRows, MissCause, Shard
from kvstore.errors import NamespaceError
from kvstore.tiers.redis_value import (
    MAX_HEADER_BYTES,
    Header,
    block_key,
    compare,
    header_bytes,
    pack_header,
    parse_header,
    verify_value,
)

PAYLOAD = np.arange(200, dtype=np.uint8)
CHECKSUM = xxhash.xxh3_64_intdigest(PAYLOAD.data)


def rows(block_size: int = 4) -> BlockRows:
    """Two blocks of a chain, of made-up identity."""
    tokens = np.arange(2 * block_size, dtype=np.uint32).reshape(2, block_size)
    return BlockRows(
        namespace=bytes(range(16)),
        shard=Shard(1, 2, 0, 1),
        hashes=b"h" * 16 + b"i" * 16,
        parents=b"p" * 16 + b"h" * 16,
        tags=b"t" * 32,
        indexes=np.array([7, 8], dtype=np.uint32),
        tokens=tokens,
        fingerprints=np.array([2**64 - 1, 5], dtype=np.uint64),
    )


def header_of_first() -> Header:
    header = parse_header(pack_header(rows(), 0, len(PAYLOAD), CHECKSUM))
    assert isinstance(header, Header)
    return header


def seal(version: int, body: bytes) -> bytes:
    """A header as a writer of any version makes it, written without the code under test."""
    body = body.ljust(-(-(16 + len(body)) // 64) * 64 - 16, b"\0")
    start = struct.pack("<4sHH", b"PKVB", version, 16 + len(body))
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + body)) + body


GOLDEN_KEY = (
    b"kv:000102030405060708090a0b0c0d0e0f:1.2.0.1:"
    b"{74747474747474747474747474747474}:68686868686868686868686868686868"
)
GOLDEN_HEADER = (
    "504b564201004001718df4b703bb46888aa96e616d657370616365c410000102030405060708090a0b0c0d0e0fa57368"
    "617264a7312e322e302e31a6706172656e74c41070707070707070707070707070707070ab7365676d656e745f746167"
    "c41074747474747474747474747474747474ab626c6f636b5f696e64657807a9746f6b656e5f696473c4100000000001"
    "0000000200000003000000ab66696e6765727072696e74cfffffffffffffffffad7061796c6f61645f6279746573ccc8"
    "af7061796c6f61645f787868335f3634cf0123456789abcdefa5636f646563a372617700000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000"
)


def test_golden_key() -> None:
    assert block_key("kv", rows(), 0) == GOLDEN_KEY


def test_golden_header() -> None:
    """These bytes are in every Redis in use: a change of them is a new format version."""
    assert pack_header(rows(), 0, 200, 0x0123456789ABCDEF).hex() == GOLDEN_HEADER


def test_the_map_is_plain_msgpack_in_the_documented_order() -> None:
    packed = pack_header(rows(), 1, 200, CHECKSUM)
    assert msgpack.unpackb(packed[16:].rstrip(b"\0")) == {
        "namespace": bytes(range(16)),
        "shard": "1.2.0.1",
        "parent": b"h" * 16,
        "segment_tag": b"t" * 16,
        "block_index": 8,
        "token_ids": struct.pack("<4I", 4, 5, 6, 7),
        "fingerprint": 5,
        "payload_bytes": 200,
        "payload_xxh3_64": CHECKSUM,
        "codec": "raw",
    }
    assert struct.unpack_from("<4sHH", packed) == (b"PKVB", 1, len(packed))


@pytest.mark.parametrize("block_size", [1, 16, 256, 4096])
def test_length_depends_on_the_block_size_alone(block_size: int) -> None:
    smallest = replace(
        rows(block_size),
        shard=Shard(),
        indexes=np.zeros(2, dtype=np.uint32),
        fingerprints=np.zeros(2, dtype=np.uint64),
    )
    largest = replace(
        rows(block_size),
        shard=Shard(65534, 65535, 65534, 65535),
        indexes=np.full(2, 2**32 - 1, dtype=np.uint32),
        tokens=np.full((2, block_size), 2**32 - 1, dtype=np.uint32),
    )
    lengths = {len(pack_header(smallest, 0, 0, 0)), len(pack_header(largest, 0, 2**40, 2**64 - 1))}
    assert lengths == {header_bytes(block_size)}
    assert header_bytes(block_size) % 64 == 0


def test_a_block_too_large_for_a_header_is_an_error_that_says_so() -> None:
    with pytest.raises(NamespaceError, match=f"20000 tokens .* at most {MAX_HEADER_BYTES}; use a smaller"):
        pack_header(rows(20000), 0, 0, 0)


def test_what_was_packed_is_what_is_parsed() -> None:
    for block in (0, 1):
        packed = pack_header(rows(), block, len(PAYLOAD), CHECKSUM)
        header = parse_header(packed + b"what follows")
        assert isinstance(header, Header)
        assert header.length == len(packed)
        assert compare(header, rows(), block) is None
        assert compare(header, rows(), 1 - block) is MissCause.COLLISION


def test_any_flipped_bit_is_corrupt() -> None:
    packed = pack_header(rows(), 0, 200, CHECKSUM)
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert parse_header(bytes(damaged)) is MissCause.CORRUPT, f"bit {bit}"


def test_any_truncation_is_corrupt() -> None:
    packed = pack_header(rows(), 0, 200, CHECKSUM)
    for length in range(len(packed)):
        assert parse_header(packed[:length]) is MissCause.CORRUPT


@pytest.mark.parametrize("version", [0, 2, 65535])
@pytest.mark.parametrize("body", [b"", b"not msgpack", b"x" * 5000])
def test_an_intact_header_of_another_version_is_not_judged(version: int, body: bytes) -> None:
    assert parse_header(seal(version, body)) is MissCause.VERSION


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {},
        {"namespace": b""},
        dict(zip(Header._fields[1:], [None] * 10, strict=True)),
        {name: getattr(header_of_first(), name) for name in reversed(Header._fields[1:])},
        header_of_first()._asdict(),
    ],
    ids=["list", "empty", "one field", "wrong types", "wrong order", "extra field"],
)
def test_a_malformed_map_of_our_version_is_corrupt(fields: object) -> None:
    assert parse_header(seal(1, msgpack.packb(fields))) is MissCause.CORRUPT
    assert parse_header(seal(1, b"\xc1 is no msgpack")) is MissCause.CORRUPT


FIRST = header_of_first()


@pytest.mark.parametrize(
    "other",
    [
        FIRST._replace(namespace=b"n" * 16),
        FIRST._replace(shard="0.2.0.1"),
        FIRST._replace(parent=b"q" * 16),
        FIRST._replace(segment_tag=b"u" * 16),
        FIRST._replace(block_index=6),
        FIRST._replace(token_ids=struct.pack("<4I", 0, 1, 2, 4)),
        FIRST._replace(fingerprint=6),
    ],
)
def test_every_part_of_the_identity_is_compared(other: Header) -> None:
    assert compare(FIRST, rows(), 0) is None
    assert compare(other, rows(), 0) is MissCause.COLLISION


def test_what_the_reader_does_not_know_is_not_compared() -> None:
    other = header_of_first()._replace(token_ids=b"other", fingerprint=6)
    assert compare(other, replace(rows(), tokens=None, fingerprints=None), 0) is None
    assert compare(other, replace(rows(), tokens=None), 0) is MissCause.COLLISION
    assert compare(other, replace(rows(), fingerprints=None), 0) is MissCause.COLLISION


def test_another_codec_is_another_version() -> None:
    assert compare(FIRST._replace(codec="fp8"), rows(), 0) is MissCause.VERSION


def test_verified_values() -> None:
    head = pack_header(rows(), 0, len(PAYLOAD), CHECKSUM)
    assert verify_value(rows(), 0, head, PAYLOAD, CHECKSUM) == CHECKSUM
    assert verify_value(rows(), 0, head, PAYLOAD, CHECKSUM ^ 1) is MissCause.CORRUPT
    assert verify_value(rows(), 1, head, PAYLOAD, CHECKSUM) is MissCause.COLLISION


def test_sizes_that_do_not_add_up_are_corrupt_and_others_are_another_block() -> None:
    head = pack_header(rows(), 0, len(PAYLOAD), CHECKSUM)
    truncated = pack_header(rows(), 0, len(PAYLOAD) + 1, CHECKSUM)
    assert verify_value(rows(), 0, truncated, PAYLOAD, CHECKSUM) is MissCause.CORRUPT
    # 64 bytes of the payload end up in the head when its reader expects 64 fewer.
    longer = head + PAYLOAD[:64].tobytes()
    assert verify_value(rows(), 0, longer, PAYLOAD[64:], CHECKSUM) is MissCause.COLLISION


def test_another_versions_longer_header_is_recognised_where_it_reaches_into_the_payload() -> None:
    value = seal(2, b"a longer header of version 2" * 5) + bytes(500)
    head, payload = value[:64], np.frombuffer(value[64:], dtype=np.uint8)
    assert verify_value(rows(), 0, head, payload, 0) is MissCause.VERSION
