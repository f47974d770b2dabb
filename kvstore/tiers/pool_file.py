"""The pool file: shared memory that describes itself.

Layout, all integers little-endian:

    0      header    magic, version, extent bytes, extents, epoch, namespaces, checksum
    4096   extents   one record of 64 bytes each: how the extent is laid out now
    …      names     a msgpack map a namespace, length-prefixed, in order of their numbers
    …      extents   aligned to 2 MiB; each starts with its table (kvstore/table.py)

The server writes all of it but payloads; clients map it, read tables and copy payloads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import struct
from pathlib import Path

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.errors import PoolError
from kvstore.extents import Extent, extents_in
from kvstore.spec import NamespaceSpec
from kvstore.tiers.memory_limit import check_memory, memory_limit
from kvstore.tiers.pool_place import check_room, make_way, open_unnamed, publish, remove, unlock

MAGIC = b"PKVPOOL\0"
VERSION = 1
HEADER = struct.Struct("<8sHHIQIIQ")
RECORD = struct.Struct("<QQQII")
RECORD_BYTES = 64
HEADER_BYTES = 4096
NAMES_BYTES = 1 << 20
EXTENT_ALIGNMENT = 2 << 20
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_MADV_POPULATE_WRITE = 23
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


class PoolFile:
    """One pool on tmpfs, locked against a second server. Implements ``extents.Memory``.

    Always a new file, which replaces that of a server that is gone: whoever maps that one keeps it.
    Raises PoolError where the path is in use or is something else than a pool file, or where the
    file system or the memory limit is too small; nothing of the new file is left behind then.
    """

    inline_tables = True

    def __init__(self, path: Path, pool_bytes: int, extent_bytes: int, epoch: int) -> None:
        self.path = path
        self.extent_bytes = extent_bytes
        self.extents = extents_in(pool_bytes, extent_bytes)
        self.epoch = epoch
        self._names: dict[bytes, int] = {}
        self._names_end = 0
        self._records_at = HEADER_BYTES
        self._names_at = HEADER_BYTES + self.extents * RECORD_BYTES
        head = self._names_at + NAMES_BYTES
        self._data_at = -(-head // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        if not path.parent.is_dir():
            raise PoolError(f"pool_path {path} is in {path.parent}, which is no directory; make it first")
        check_memory(pool_bytes, memory_limit())
        # A stale file's blocks are of no use to a new server, and its memory may be needed.
        make_way(path, MAGIC)
        check_room(path, pool_bytes)
        self._file = open_unnamed(path)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._map: mmap.mmap | None = self._reserve_head()
            self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
            """The whole file. Slot offsets count from ``data``."""
            self.data = self.bytes[self._data_at :]
            self._write_header()
            publish(self._file, path, MAGIC)
            undo.pop_all()

    def reserve(self, extent: int) -> bool:
        """Allocate and map an extent's pages now: a sparse tmpfs that fills up kills by SIGBUS.

        False where there is no memory for it; what was allocated is given back.
        """
        assert self._map is not None, "the pool file is closed"
        start = self._data_at + extent * self.extent_bytes
        try:
            os.posix_fallocate(self._file, start, self.extent_bytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            raise
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, start, self.extent_bytes)
        except OSError as error:
            # Kernels before 5.14 do not know it: pages are then mapped at first touch. Anything else
            # is memory that is not to be had: page tables, a control group's limit, a bad page.
            if error.errno != errno.EINVAL:
                with contextlib.suppress(OSError):  # then it stays allocated, and the next try finds it
                    self._map.madvise(mmap.MADV_REMOVE, start, self.extent_bytes)
                return False
        return True

    def table_buffer(self, extent: int, size: int) -> NDArray[np.uint8]:
        start = extent * self.extent_bytes
        return self.data[start : start + size]

    def assigned(self, extent: Extent) -> None:
        record = RECORD.pack(
            extent.generation,
            extent.slot_class.slot_bytes,
            extent.data_offset,
            extent.slot_class.block_size,
            extent.rows,
        )
        record += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(record))
        self._put(self._records_at + extent.number * RECORD_BYTES, record)

    def namespace_id(self, namespace: bytes) -> int:
        return self._describe(namespace, {"namespace": namespace})

    def describe(self, spec: NamespaceSpec) -> int:
        """Write a namespace's public fields into the file; its number.

        The tenant's salt is part of the digest and stays out of the file.
        """
        fields = {
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
        return self._describe(spec.root.digest, fields)

    def remove(self) -> None:
        """Take the file's name away, if the path still names it, for owners of a temporary pool.

        Call it before ``close``; afterwards the file may be another server's, and nothing happens.
        """
        if self._file >= 0:
            remove(self._file, self.path)

    def close(self) -> None:
        """Unlock, and let go of the memory; the file stays until the next server replaces it. Idempotent.

        Memory that somebody has a view of (a pool's tables, a payload) stays mapped, and readable,
        until the last view is gone.
        """
        if self._file >= 0:
            self.bytes = self.data = np.zeros(0, dtype=np.uint8)
            self._map = None
            unlock(self._file)
            self._file = -1

    def _reserve_head(self) -> mmap.mmap:
        """Size the file, allocate all that precedes the extents, and map the whole."""
        size = self._data_at + self.extents * self.extent_bytes
        try:
            os.ftruncate(self._file, size)
            os.posix_fallocate(self._file, 0, self._data_at)
            return mmap.mmap(self._file, size)
        except OSError as error:
            raise PoolError(
                f"cannot reserve {self._data_at} of {size} bytes for pool file {self.path}: "
                f"{error.strerror}; free memory on that file system or choose another pool_path"
            ) from error

    def _describe(self, namespace: bytes, fields: dict[str, object]) -> int:
        known = self._names.get(namespace)
        if known is not None:
            return known
        packed = msgpack.packb(fields)
        entry = _LENGTH.pack(len(packed)) + packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))
        if self._names_end + len(entry) > NAMES_BYTES:
            raise PoolError(
                f"pool file {self.path} describes {len(self._names)} namespaces and has room for no "
                "more; restart with a new pool file"
            )
        self._put(self._names_at + self._names_end, entry)
        self._names_end += len(entry)
        self._names[namespace] = len(self._names) + 1
        self._write_header()
        return self._names[namespace]

    def _write_header(self) -> None:
        header = HEADER.pack(
            MAGIC, VERSION, 0, self.extents, self.extent_bytes, len(self._names), 0, self.epoch
        )
        self._put(0, header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)))

    def _put(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
