"""The pool file: shared memory that describes itself (see ``pool_format``), as its server has it.

The server writes all of it but payloads; clients map it (``pool_view``), read tables and copy payloads.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import PoolError
from kvstore.extents import Extent, Found, extents_in
from kvstore.failpoints import Failpoint, Step, no_failpoint
from kvstore.spec import NamespaceSpec
from kvstore.table import Table
from kvstore.tiers.client_lock import SERVER, is_locked, lock
from kvstore.tiers.memory_limit import check_memory, memory_limit
from kvstore.tiers.pool_format import (
    EPOCH_AT,
    HEADER_BYTES,
    MAGIC,
    NAMES_BYTES,
    RECORD_BYTES,
    SEAL_AT,
    DamagedError,
    Geometry,
    Record,
    checksum,
    decode_header,
    decode_names,
    decode_record,
    describe,
    described,
    encode_header,
    encode_name,
    encode_record,
    laid_out_generation,
    store,
    store_entry,
    store_word,
)
from kvstore.tiers.pool_place import (
    FILE_MODE,
    check_room,
    discard_stale,
    open_unnamed,
    publish,
    remove,
    take_stale,
    unlock,
)

_EPOCHS = 1 << 63
_MADV_POPULATE_WRITE = 23
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class Inheritance:
    """What the server before this one left in the file.

    ``generations`` are of extents that are not laid out. ``names`` has (digest, spec) of the
    namespaces by number less one; the spec, without its tenant's salt, is None where there is none.
    """

    extents: list[Found] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)
    names: list[tuple[bytes, NamespaceSpec | None]] = field(default_factory=list)


class PoolFile:
    """One pool on tmpfs, locked against a second server. Implements ``extents.Memory``.

    The file of a server that is gone is taken over where it fits: same inode, so that whoever maps it
    goes on with it, and the next epoch. ``inherited`` is what is in it. Otherwise a new file replaces
    it, and ``refused`` says why. Raises PoolError where the path is in use or is something else than a
    pool file, or where the file system or the memory limit is too small; nothing of a new file is left
    behind then.
    """

    inline_tables = True

    def __init__(
        self, path: Path, pool_bytes: int, extent_bytes: int, failpoint: Failpoint = no_failpoint
    ) -> None:
        self.path = path
        self.extent_bytes = extent_bytes
        self.extents = extents_in(pool_bytes, extent_bytes)
        self.inherited: Inheritance | None = None
        self.refused: PoolError | None = None
        self._geometry = Geometry(self.extents, extent_bytes)
        self._names: dict[bytes, int] = {}
        self._names_end = 0
        self._allocated: set[int] = set()
        # Held while a thread allocates: a descriptor that is closed may be somebody else's next.
        self._opened = threading.Lock()
        if not path.parent.is_dir():
            raise PoolError(f"pool_path {path} is in {path.parent}, which is no directory; make it first")
        check_memory(pool_bytes, memory_limit())
        self._file = -1
        self._map: mmap.mmap | None = None
        self.bytes: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """The whole file."""
        self.data = self.bytes
        """The extents: slot offsets count from here."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            stale = take_stale(path, MAGIC)
            if stale is None or not self._take_over(stale, failpoint):
                check_room(path, pool_bytes)
                self._make()
            undo.pop_all()

    @property
    def data_at(self) -> int:
        """Where ``data`` starts in the file."""
        return self._geometry.data_at

    @property
    def epoch(self) -> int:
        """Changes whenever a server starts on the file; another file has quite another one."""
        return int(self.bytes[EPOCH_AT : EPOCH_AT + 8].view("<u8")[0])

    def reserve(self, extent: int) -> bool:
        """Allocate and map an extent's pages now: a sparse tmpfs that fills up kills by SIGBUS.

        False where there is no memory for it; what was allocated is given back. Costs nothing where
        ``allocate`` was there before: the pages are then mapped when they are first touched.
        """
        assert self._map is not None, "the pool file is closed"
        if extent in self._allocated:
            return True
        if not self.allocate(extent):
            return False
        start = self.data_at + extent * self.extent_bytes
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, start, self.extent_bytes)
        except OSError as error:
            # Kernels before 5.14 do not know it: pages are then mapped at first touch. Anything else
            # is memory that is not to be had: page tables, a control group's limit, a bad page.
            if error.errno != errno.EINVAL:
                self._allocated.discard(extent)
                with contextlib.suppress(OSError):  # then it stays allocated, and the next try finds it
                    self._map.madvise(mmap.MADV_REMOVE, start, self.extent_bytes)
                return False
        return True

    def allocate(self, extent: int) -> bool:
        """Back an extent with memory ahead of ``reserve``; False where there is none, or after the end.

        For a thread beside the owner: the kernel clears the pages meanwhile, without the interpreter's
        lock, which mapping them would hold.
        """
        with self._opened:
            if self._file < 0:
                return False
            start = self.data_at + extent * self.extent_bytes
            try:
                os.posix_fallocate(self._file, start, self.extent_bytes)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    return False
                raise
        self._allocated.add(extent)
        return True

    def table_buffer(self, extent: int, size: int) -> NDArray[np.uint8]:
        # The record is void while the table changes: whoever reads it meanwhile compares it again.
        store_word(self.bytes, self._geometry.record_at(extent) + SEAL_AT, 0)
        start = extent * self.extent_bytes
        return self.data[start : start + size]

    def assigned(self, extent: Extent) -> None:
        size, block_size = extent.slot_class
        record = encode_record(Record(extent.generation, size, extent.data_offset, block_size, extent.rows))
        at = self._geometry.record_at(extent.number)
        store(self.bytes, at, record)
        store_word(self.bytes, at + SEAL_AT, checksum(record))

    def namespace_id(self, namespace: bytes) -> int:
        return self._describe(namespace, {"namespace": namespace})

    def describe(self, spec: NamespaceSpec) -> int:
        """Write a namespace's public fields into the file; its number.

        The tenant's salt is part of the digest and stays out of the file.
        """
        return self._describe(spec.root.digest, describe(spec))

    def client_alive(self, number: int) -> bool:
        """Whether the client of that number, or a child that it forked, still maps the file."""
        return is_locked(self._file, number)

    def remove(self) -> None:
        """Take the file's name away, if the path still names it, for owners of a temporary pool.

        Call it before ``close``; afterwards the file may be another server's, and nothing happens.
        """
        if self._file >= 0:
            remove(self._file, self.path)

    def close(self) -> None:
        """Unlock, and let go of the memory; the file stays for the next server. Idempotent.

        Memory that somebody has a view of (a pool's tables, a payload) stays mapped, and readable,
        until the last view is gone; a server that starts before then makes a file of its own.
        """
        self.inherited = None
        self.bytes = self.data = np.zeros(0, dtype=np.uint8)
        self._map = None
        with self._opened:
            if self._file >= 0:
                unlock(self._file)
                self._file = -1

    # -- a new file -----------------------------------------------------------------------------

    def _make(self) -> None:
        self._file = open_unnamed(self.path)
        lock(self._file, SERVER)
        self._map_all(self._reserve_head())
        store(self.bytes, 0, encode_header(self._geometry))
        self._set_epoch(int.from_bytes(os.urandom(8)))
        publish(self._file, self.path, MAGIC)

    def _reserve_head(self) -> mmap.mmap:
        """Size the file, allocate all that precedes the extents, and map the whole."""
        size = self._geometry.file_bytes
        try:
            os.ftruncate(self._file, size)
            os.posix_fallocate(self._file, 0, self.data_at)
            return mmap.mmap(self._file, size)
        except OSError as error:
            raise PoolError(
                f"cannot reserve {self.data_at} of {size} bytes for pool file {self.path}: "
                f"{error.strerror}; free memory on that file system or choose another pool_path"
            ) from error

    # -- the file of a server that is gone ------------------------------------------------------

    def _take_over(self, descriptor: int, failpoint: Failpoint) -> bool:
        """Make a locked stale file this server's; False where that cannot be, and it is removed."""
        self._file = descriptor
        try:
            self._require_usable(descriptor)
            self._map_all(mmap.mmap(descriptor, self._geometry.file_bytes))
            inherited = self._read_inheritance()
        except PoolError as error:
            self.refused = error.with_traceback(None)  # whose frames hold views of the memory
            self.bytes = self.data = np.zeros(0, dtype=np.uint8)
            self._map, self._file = None, -1
            discard_stale(descriptor, self.path)
            return False
        failpoint(Step.ADOPTION_LOCKED)
        # Before anything else changes: who still sees the old epoch sees what the old server left.
        self._set_epoch(self.epoch + 1)
        self._names_section()[self._names_end :] = 0  # half an entry, if anything
        self._names = {digest: number for number, (digest, _) in enumerate(inherited.names, start=1)}
        self.inherited = inherited
        return True

    def _require_usable(self, descriptor: int) -> None:
        """PoolError where the file is not one that this server would have made, DamagedError if broken."""
        found = os.fstat(descriptor)
        if not found.st_size:
            raise PoolError("it is empty")
        geometry = decode_header(os.pread(descriptor, HEADER_BYTES, 0))
        if geometry != self._geometry:
            raise PoolError(
                f"it has {geometry.extents} extents of {geometry.extent_bytes} bytes, and the settings ask "
                f"for {self.extents} of {self.extent_bytes}"
            )
        if found.st_size != geometry.file_bytes:
            raise DamagedError(f"it has {found.st_size} bytes, expected {geometry.file_bytes}")
        mode = stat.S_IMODE(found.st_mode)
        if mode != FILE_MODE:
            raise DamagedError(f"its mode is {mode:#o}, expected {FILE_MODE:#o}: others may have it open")
        if not lock(descriptor, SERVER):
            raise PoolError("a process that served it, or a child of it, still maps its memory")

    def _read_inheritance(self) -> Inheritance:
        """What is laid out, checked as far as it can be without looking at rows one by one."""
        found = Inheritance()
        for number in range(self.extents):
            at = self._geometry.record_at(number)
            source = self.bytes[at : at + RECORD_BYTES].tobytes()
            generation = laid_out_generation(source)
            if generation is not None:
                found.generations[number] = generation
                continue
            record = decode_record(source)
            if record is None or not record.fits(self._geometry, number):
                raise DamagedError(f"the record of its extent {number} does not check out")
            start = number * self.extent_bytes
            table = Table(self.data[start : start + self.extent_bytes], record.rows, record.block_size)
            if (table.generation >> np.uint64(32) != record.generation).any():
                raise DamagedError(f"the table of its extent {number} does not check out")
            found.extents.append(Found(number, record.generation, record.slot_class, table))
        allocated = os.fstat(self._file).st_blocks * 512
        if allocated < self.data_at + len(found.extents) * self.extent_bytes:
            raise DamagedError(f"only {allocated} of its bytes are in memory: it is a sparse copy")
        names, self._names_end = decode_names(self._names_section())
        found.names = [(fields["namespace"], described(fields)) for fields in names]
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _map_all(self, mapping: mmap.mmap) -> None:
        self._map = mapping
        self.bytes = np.frombuffer(mapping, dtype=np.uint8)
        self.data = self.bytes[self.data_at :]

    def _names_section(self) -> NDArray[np.uint8]:
        return self.bytes[self._geometry.names_at :][:NAMES_BYTES]

    def _set_epoch(self, epoch: int) -> None:
        store_word(self.bytes, EPOCH_AT, epoch % _EPOCHS or 1)

    def _describe(self, namespace: bytes, fields: dict[str, object]) -> int:
        known = self._names.get(namespace)
        if known is not None:
            return known
        entry = encode_name(fields)
        if self._names_end + len(entry) > NAMES_BYTES:
            raise PoolError(
                f"pool file {self.path} describes {len(self._names)} namespaces and has room for no "
                "more; stop the server, remove the file, and start it again"
            )
        store_entry(self.bytes, self._geometry.names_at + self._names_end, entry)
        self._names_end += len(entry)
        self._names[namespace] = len(self._names) + 1
        return self._names[namespace]
