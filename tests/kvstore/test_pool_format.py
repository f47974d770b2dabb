"""Golden bytes of the pool file: a change here breaks every process that maps one.

The parser knows the layout from here alone: none of the product's structures, only struct.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import xxhash

from kvstore.block import WHOLE
from tests.support.stores import FakeClock, make_chain, make_rig, make_spec

EXTENTS, EXTENT_BYTES = 4, 64 << 10
RECORDS_AT = 4096
NAMES_AT = RECORDS_AT + EXTENTS * 64
DATA_AT = 6 << 20

HEADER = (
    "504b56504f4f4c00"  # PKVPOOL
    "0200" "0000"  # version, zero
    "04000000"  # extents
    "0000010000000000"  # bytes of one
    "291c8ae6277601ed"  # xxh3_64 of all that precedes
)  # fmt: skip
EPOCH = slice(32, 40)

SMALL, LARGE = "3b69aa9272b0fec581c7180c75a2b8e8", "754b59e478832d149d3a09659c55e293"


def columns(block_size: int) -> Iterator[tuple[str, str]]:
    """Name and struct format of each column, in file order."""
    yield "generation", "Q"
    yield from (("hash", "16s"), ("parent", "16s"), ("tag", "16s"))
    yield from (("fingerprint", "Q"), ("shard", "Q"), ("checksum", "Q"), ("identity", "Q"))
    yield from (("stored_at", "d"), ("used_at", "d"), ("lease_until", "d"))
    yield from (("namespace", "I"), ("index", "I"), ("reads", "I"), ("writer", "I"))
    yield "tokens", f"{block_size}I"
    yield from (("state", "B"), ("checked", "B"))


def read_row(file: bytes, extent: int, rows: int, block_size: int, row: int) -> dict[str, Any]:
    """One row of an extent's table: every column starts at a multiple of 64 bytes."""
    at, found = DATA_AT + extent * EXTENT_BYTES, {}
    for name, layout in columns(block_size):
        size = struct.calcsize(f"<{layout}")
        values = struct.unpack_from(f"<{layout}", file, at + row * size)
        value = values if len(values) > 1 else values[0]
        found[name] = value.hex() if isinstance(value, bytes) else value
        at += -(-rows * size // 64) * 64
    return found


def read_record(file: bytes, extent: int) -> tuple[int, ...]:
    """Generation, slot bytes, offset of the first slot, block size and rows; checksum compared."""
    *fields, checksum = struct.unpack_from("<QQQIIQ", file, RECORDS_AT + extent * 64)
    at = RECORDS_AT + extent * 64
    assert checksum == xxhash.xxh3_64_intdigest(file[at : at + 32])
    return tuple(fields)


@pytest.fixture(scope="module")
def file() -> bytes:
    """Blocks a and b of one namespace at 1000 s, c of another one at 1005 s."""
    clock = FakeClock(1000.0)
    small, large = make_spec(), make_spec("other", block_size=8, payload_bytes=4096)
    with make_rig(clock, [(small, (WHOLE,)), (large, (WHOLE,))]) as rig:
        rig.write(make_chain(small, "ab"))
        clock.advance(5)
        rig.write(make_chain(large, "c"))
        return rig.host.file.path.read_bytes()


def test_header(file: bytes) -> None:
    assert file[: EPOCH.start].hex() == HEADER
    assert 0 < int.from_bytes(file[EPOCH], "little") < 1 << 63
    assert file[EPOCH.stop : RECORDS_AT] == bytes(RECORDS_AT - EPOCH.stop)
    assert len(file) == DATA_AT + EXTENTS * EXTENT_BYTES


def test_extent_records(file: bytes) -> None:
    assert read_record(file, 0) == (1, 1024, 8192, 4, 52)
    assert read_record(file, 1) == (1, 4096, EXTENT_BYTES + 4096, 8, 15)
    rest = RECORDS_AT + 2 * 64
    assert file[rest:NAMES_AT] == bytes(NAMES_AT - rest), "extents that are not laid out"


def test_names(file: bytes) -> None:
    at, names = NAMES_AT, []
    for _ in range(2):
        (size,) = struct.unpack_from("<I", file, at)
        packed = file[at + 4 : at + 4 + size]
        assert struct.unpack_from("<Q", file, at + 4 + size) == (xxhash.xxh3_64_intdigest(packed),)
        names.append(msgpack.unpackb(packed))
        at += 4 + size + 8
    shared = {
        "weights_id": "0" * 40,
        "kv_dtype": "bfloat16",
        "layout": "test",
        "kv_shape": [2, 2, 2, 8],
        "algorithm": "xxh3_128",
        "adapter": None,
    }
    small = {"namespace": bytes.fromhex(SMALL), "model": "model", "block_size": 4, "payload_bytes": 1024}
    large = {"namespace": bytes.fromhex(LARGE), "model": "other", "block_size": 8, "payload_bytes": 4096}
    assert names == [shared | small, shared | large]


def test_table_rows(file: bytes) -> None:
    published = {
        "generation": 1 << 32 | 2,
        "shard": 0x0001_0000_0001_0000,
        "writer": 0,
        "lease_until": 0.0,
        "reads": 0,
    }
    published |= {"state": 2, "checked": 1}
    second_of_small = {
        "hash": "e5c5ac11f6ef748e56b12f8ef250e7c0",
        "parent": "33c7952422871a4bceb527395881cdae",
        "tag": "33c7952422871a4bceb527395881cdae",
        "fingerprint": 2227394917428955180,
        "checksum": 4941151757341720985,
        "identity": 17913513658525228657,
        "stored_at": 1000.0,
        "used_at": 1000.0,
        "namespace": 1,
        "index": 1,
        "tokens": (98,) * 4,
    }
    first_of_large = {
        "hash": "e9b99d524cdb454132c6c7e884a5b26d",
        "parent": LARGE,
        "tag": "e9b99d524cdb454132c6c7e884a5b26d",
        "fingerprint": 2290039840671658896,
        "checksum": 5847135396267325032,
        "identity": 2471163672124940611,
        "stored_at": 1005.0,
        "used_at": 1005.0,
        "namespace": 2,
        "index": 0,
        "tokens": (99,) * 8,
    }
    assert read_row(file, 0, 52, 4, 1) == published | second_of_small
    assert read_row(file, 1, 15, 8, 0) == published | first_of_large
    assert read_row(file, 0, 52, 4, 2)["state"] == 0
    assert read_row(file, 0, 52, 4, 2)["generation"] == 1 << 32 | 1


def test_payloads(file: bytes) -> None:
    """Where the records say, and with the checksums of the rows."""
    for extent, row, checksum in ((0, 1, 4941151757341720985), (1, 0, 5847135396267325032)):
        _, slot_bytes, data_offset, _, _ = read_record(file, extent)
        at = DATA_AT + data_offset + row * slot_bytes
        assert xxhash.xxh3_64_intdigest(file[at : at + slot_bytes]) == checksum
