"""Bytes of the pool file, the same for the server that writes them and the clients that map them.

Layout, all integers little-endian:

    0      header    magic, version, zero, extents, extent bytes, their checksum; the epoch
    4096   extents   one record of 64 bytes each: how the extent is laid out now
    …      names     a msgpack map a namespace, length-prefixed, in order of their numbers
    …      extents   aligned to 2 MiB; each starts with its table (kvstore/table.py)

What changes while others look on or a server may die is ordered so that half of it is never taken
for the whole: the epoch and a record's checksum are single words, a name's length is written last.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from hashing import HashingError, KVShape, Namespace
from kvstore.errors import NamespaceError, PoolError
from kvstore.extents import SlotClass, inline_layout
from kvstore.spec import NamespaceSpec

MAGIC = b"PKVPOOL\0"
VERSION = 2
HEADER_BYTES = 4096
RECORD_BYTES = 64
NAMES_BYTES = 4 << 20
EXTENT_ALIGNMENT = 2 << 20
EPOCH_AT = 32
SEAL_AT = 32
"""Where a record's checksum is in it: 0 while its extent is being laid out."""

_HEADER = struct.Struct("<8sHHIQ")
_RECORD = struct.Struct("<QQQII")
_LENGTH = struct.Struct("<I")
_WORD = struct.Struct("<Q")

Bytes = NDArray[np.uint8]


class DamagedError(PoolError):
    """A pool file is not what a server left there."""


class Geometry(NamedTuple):
    """How a pool file is divided; it never changes in the life of a file."""

    extents: int
    extent_bytes: int

    @property
    def names_at(self) -> int:
        return self.record_at(self.extents)

    @property
    def data_at(self) -> int:
        """Where the first extent starts."""
        head = self.names_at + NAMES_BYTES
        return -(-head // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT

    @property
    def file_bytes(self) -> int:
        return self.data_at + self.extents * self.extent_bytes

    @staticmethod
    def record_at(extent: int) -> int:
        return HEADER_BYTES + extent * RECORD_BYTES


class Record(NamedTuple):
    """How one extent is laid out. ``data_offset`` of its first slot counts from the first extent."""

    generation: int
    slot_bytes: int
    data_offset: int
    block_size: int
    rows: int

    @property
    def slot_class(self) -> SlotClass:
        return SlotClass(self.slot_bytes, self.block_size)

    def fits(self, geometry: Geometry, extent: int) -> bool:
        """Whether this is how an extent of that number is laid out for such slots."""
        rows, first = inline_layout(geometry.extent_bytes, self.slot_class)
        offset = extent * geometry.extent_bytes + first
        return rows > 0 and (rows, offset) == (self.rows, self.data_offset)


def checksum(data: bytes) -> int:
    """xxh3_64 of ``data``; never 0, which says that there is nothing to compare."""
    return xxhash.xxh3_64_intdigest(data) or 1


def encode_header(geometry: Geometry) -> bytes:
    """What precedes the epoch."""
    fields = _HEADER.pack(MAGIC, VERSION, 0, geometry.extents, geometry.extent_bytes)
    return fields + _WORD.pack(checksum(fields))


def decode_header(head: bytes) -> Geometry:
    """The geometry in a file's first bytes.

    Raises PoolError for another format version, DamagedError where the bytes do not check out.
    """
    size = _HEADER.size + _WORD.size
    if len(head) < size or not head.startswith(MAGIC):
        raise DamagedError(f"it starts with {head[:8]!r}, expected {MAGIC!r} and a header of {size} bytes")
    _, version, _, extents, extent_bytes = _HEADER.unpack_from(head)
    if version != VERSION:
        raise PoolError(f"its format version is {version}, expected {VERSION}")
    if _WORD.unpack_from(head, _HEADER.size)[0] != checksum(head[: _HEADER.size]):
        raise DamagedError("the checksum of its header does not agree")
    return Geometry(extents, extent_bytes)


def encode_record(record: Record) -> bytes:
    """The fields of a record, without their checksum, which is stored after them."""
    return _RECORD.pack(*record)


def decode_record(data: bytes) -> Record | None:
    """The record in ``data``; None where the extent is not laid out, or the bytes do not check out."""
    if len(data) < RECORD_BYTES or _WORD.unpack_from(data, SEAL_AT)[0] != checksum(data[:SEAL_AT]):
        return None
    return Record(*_RECORD.unpack_from(data))


def laid_out_generation(data: bytes) -> int | None:
    """The last generation of an extent that is not laid out now; None where the record says it is."""
    generation, seal = _WORD.unpack_from(data)[0], _WORD.unpack_from(data, SEAL_AT)[0]
    return None if seal else generation


def describe(spec: NamespaceSpec) -> dict[str, object]:
    """A namespace's public fields. The tenant's salt is part of the digest and is not among them."""
    return {
        "namespace": spec.root.digest,
        "model": spec.namespace.model,
        "weights_id": spec.namespace.weights_id,
        "kv_dtype": spec.namespace.kv_dtype,
        "layout": spec.namespace.layout,
        "block_size": spec.block_size,
        "kv_shape": [*dataclasses.astuple(spec.namespace.kv_shape)],
        "algorithm": spec.namespace.algorithm,
        "adapter": spec.namespace.adapter,
        "payload_bytes": spec.payload_bytes,
    }


def encode_name(fields: dict[str, object]) -> bytes:
    """One entry of the names section."""
    packed: bytes = msgpack.packb(fields)
    return _LENGTH.pack(len(packed)) + packed + _WORD.pack(checksum(packed))


def decode_names(section: Bytes) -> tuple[list[dict[str, Any]], int]:
    """Fields of each namespace, in order of their numbers (1, 2, …), and where the next entry goes.

    What does not check out ends the section.
    """
    names: list[dict[str, Any]] = []
    at = 0
    while (entry := _entry_at(section, at)) is not None:
        names.append(msgpack.unpackb(entry))
        at += _LENGTH.size + len(entry) + _WORD.size
    return names, at


def described(fields: dict[str, Any]) -> NamespaceSpec | None:
    """The spec that ``describe`` wrote, without its tenant's salt.

    None where the namespace was numbered and never described, or where this version cannot make sense
    of it.
    """
    try:
        namespace = Namespace(
            model=fields["model"],
            weights_id=fields["weights_id"],
            kv_dtype=fields["kv_dtype"],
            layout=fields["layout"],
            block_size=fields["block_size"],
            kv_shape=KVShape(*fields["kv_shape"]),
            algorithm=fields["algorithm"],
            adapter=fields["adapter"],
        )
        return NamespaceSpec(namespace, fields["payload_bytes"])
    except (KeyError, HashingError, NamespaceError):
        return None


def store(memory: Bytes, at: int, data: bytes) -> None:
    """Copy ``data`` into the mapped file."""
    memory[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)


def store_word(memory: Bytes, at: int, word: int) -> None:
    """Store an aligned u64 at once: who looks on sees the old one or the new one."""
    memory[at : at + 8].view(np.uint64)[0] = word


def store_entry(memory: Bytes, at: int, entry: bytes) -> None:
    """Store a name's entry, its length last, so that a reader finds all of it or none."""
    store(memory, at + _LENGTH.size, entry[_LENGTH.size :])
    store(memory, at, entry[: _LENGTH.size])


def _entry_at(section: Bytes, at: int) -> bytes | None:
    start = at + _LENGTH.size
    if start + _WORD.size > len(section):
        return None
    (length,) = _LENGTH.unpack(section[at:start].tobytes())
    stop = start + length
    if not length or stop + _WORD.size > len(section):
        return None
    packed = section[start:stop].tobytes()
    (stored,) = _WORD.unpack(section[stop : stop + _WORD.size].tobytes())
    return packed if stored == checksum(packed) else None
