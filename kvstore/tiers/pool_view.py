"""A client's view of the pool file: verify what was promised against the tables, and copy payloads.

The server goes on changing the file. A row's generation is made odd before anything in the row
changes, never repeats, and is written last; an extent's record is made void before its table is laid
out anew. So whatever is read in between is compared once more at the end, and what does not agree is
a block that is not verified, never an error.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import BlockRows, Uint64Array
from kvstore.errors import PoolError
from kvstore.extents import as_rows
from kvstore.table import Rows, Table, hash_words, pack_shard, same_rows
from kvstore.tiers.base import Payload
from kvstore.tiers.client_lock import MOST_CLIENTS, lock
from kvstore.tiers.pool_format import (
    EPOCH_AT,
    HEADER_BYTES,
    RECORD_BYTES,
    Geometry,
    Record,
    decode_header,
    decode_names,
    decode_record,
)

Offsets = NDArray[np.int64]

_MACHINE = platform.machine()
_ORDERED_MACHINES = ("x86_64", "AMD64")
"""Those on which stores become visible in the order in which they were made, and loads are in order too."""
_MADV_POPULATE_READ = 22  # Linux 5.14
_POPULATED_AT_ONCE_BYTES = 2 * 2**20
_POPULATE_PAUSE_SECONDS = 0.001
_MOST_POPULATED_BYTES = 8 * 2**30
"""Page tables take a 512th of what is populated."""


class ClientNumberTaken(PoolError):  # noqa: N818 - it names what happened, not a fault
    """Another client has this number; choose another one and register again."""


class _Layout(NamedTuple):
    """An extent as its record laid it out; ``source`` are the record's bytes."""

    source: bytes
    record: Record
    table: Table


class _Part(NamedTuple):
    """Blocks ``start`` … ``stop`` of a request, in one extent."""

    start: int
    stop: int
    extent: int
    layout: _Layout
    rows: Rows


class PoolView:
    """One client's mapping of the pool file, with the lock that says that the client lives.

    Offsets count from the start of the file. Any thread may use it; once it is closed nothing is
    verified any more. A forked child shares mapping and lock.
    """

    def __init__(self, path: Path, epoch: int, client: int) -> None:
        """Open, lock and map the file of the server that has this ``epoch``.

        Raises ClientNumberTaken when another client has the number, PoolError when the file is
        missing, not permitted, another user's, damaged, of another format version or of another
        epoch, and on machines where what is read while the server writes could not be trusted.
        """
        if _MACHINE not in _ORDERED_MACHINES:
            raise PoolError(
                f"this machine is {_MACHINE}, expected {' or '.join(_ORDERED_MACHINES)}: elsewhere changes "
                "of the tables may be seen in another order than they were made; stream"
            )
        if not 1 <= client <= MOST_CLIENTS:
            raise PoolError(f"client number is {client}, expected 1 … {MOST_CLIENTS}")
        self.path = path
        descriptor = _open(path)
        try:
            _require_owner(path, descriptor)
            self._geometry = _read_geometry(path, descriptor)
            if not _lock(path, descriptor, client):
                raise ClientNumberTaken(
                    f"client number {client} is in use on pool file {path}; choose another and register again"
                )
            self._map: mmap.mmap | None = mmap.mmap(descriptor, self._geometry.file_bytes)
        finally:
            os.close(descriptor)  # the mapping has a descriptor of its own, which holds the lock
        self.memory: Payload = np.frombuffer(self._map, dtype=np.uint8)
        """The whole file."""
        self._epoch = self.memory[EPOCH_AT : EPOCH_AT + 8].view("<u8")
        self._layouts: dict[int, _Layout] = {}
        self._numbers: dict[bytes, int] = {}
        self._closed = threading.Event()
        if self.epoch != epoch:
            found = self.epoch
            self.close()
            raise PoolError(
                f"pool file {path} has epoch {found}, expected {epoch}: its server restarted; register again"
            )

    @property
    def epoch(self) -> int:
        """Of the server that has the file now: a restarted one changes it before anything else."""
        return int(self._epoch[0])

    def verify(self, rows: BlockRows, offsets: Offsets, generations: Uint64Array) -> int:
        """How many leading blocks are at these generations and agree with all that ``rows`` knows."""
        number = self._number_of(rows.namespace)
        if number is None:
            return 0
        agreed = 0
        for part in self._parts(offsets):
            same = _agreement(part, rows.slice(part.start, part.stop), number)
            agreed = part.start + same
            if agreed < part.stop:
                break
        return self.unchanged(offsets[:agreed], generations[:agreed])

    def unchanged(self, offsets: Offsets, generations: Uint64Array) -> int:
        """How many leading blocks are still what they were at these generations."""
        agreed = 0
        for part in self._parts(offsets):
            found = part.layout.table.generation[part.rows]
            expected = generations[part.start : part.stop]
            # Odd is a slot that was not readable when it was promised: that is no promise.
            same = same_rows(found + (expected & np.uint64(1)), expected)
            if self._record_bytes(part.extent) != part.layout.source:
                break
            agreed = part.start + same
            if agreed < part.stop:
                break
        return agreed

    def unverified(self, offsets: Offsets) -> Offsets:
        """Positions of blocks whose payload nobody has read since a restart: compare ``checksums``.

        Blocks that are no longer there count among them.
        """
        unread = np.ones(len(offsets), dtype=np.bool_)
        for part in self._parts(offsets):
            unread[part.start : part.stop] = part.layout.table.checked[part.rows] == 0
        return np.flatnonzero(unread)

    def checksums(self, offsets: Offsets) -> Uint64Array:
        """xxh3_64 of each payload, as its writer gave it; 0 for blocks that are no longer there."""
        sums = np.zeros(len(offsets), dtype=np.uint64)
        for part in self._parts(offsets):
            sums[part.start : part.stop] = part.layout.table.checksum[part.rows]
        return sums

    def views(self, offsets: Offsets, size: int, *, writable: bool = False) -> list[Payload]:
        """The first ``size`` bytes of each block, in place; to be written only by who was given the slots."""
        memory = self.memory
        if not writable:
            memory = memory.view()
            memory.setflags(write=False)  # what is cut from it is read-only too
        return [memory[at : at + size] for at in offsets.tolist()]

    def populate(self) -> None:
        """Map the pages of the blocks that are there, so that their first reader need not wait for it.

        For a thread of its own: it takes a while, holds the interpreter's lock for moments only, and
        ends early when the view is closed, at 8 GiB, and where the kernel cannot.
        """
        left = _MOST_POPULATED_BYTES
        for extent in range(self._geometry.extents):
            if not left:
                return
            start, stop = self._written(extent)
            stop = min(stop, start + left)
            left -= stop - start
            for at in range(start, stop, _POPULATED_AT_ONCE_BYTES):
                mapped = self._map
                if mapped is None:
                    return
                try:
                    mapped.madvise(_MADV_POPULATE_READ, at, min(_POPULATED_AT_ONCE_BYTES, stop - at))
                except OSError:
                    return
                del mapped  # it would keep the client's number locked
                if self._closed.wait(_POPULATE_PAUSE_SECONDS):
                    return

    def _written(self, extent: int) -> tuple[int, int]:
        """From where to where in the file an extent has blocks, its table included; whole pages."""
        start = self._geometry.data_at + extent * self._geometry.extent_bytes
        layout = self._layout(extent)
        if layout is None:
            return start, start
        used = np.flatnonzero(layout.table.generation & np.uint64(1) == 0)
        if not len(used):
            return start, start
        record = layout.record
        end = self._geometry.data_at + record.data_offset + (int(used[-1]) + 1) * record.slot_bytes
        return start, min(start + self._geometry.extent_bytes, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)

    def close(self) -> None:
        """Let go of the mapping. Idempotent.

        Memory that somebody has a view of stays mapped, and the client's number locked, until the
        last view is gone: it can still be written to.
        """
        self._closed.set()
        self.memory = np.zeros(0, dtype=np.uint8)
        self._epoch = np.zeros(1, dtype=np.uint64)
        self._layouts.clear()
        self._map = None

    def _parts(self, offsets: Offsets) -> Iterator[_Part]:
        """Cut the request where the extent changes; ends at the first block that is in no slot."""
        if not len(offsets):
            return
        numbers = (offsets - self._geometry.data_at) // self._geometry.extent_bytes
        cuts = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
        for start, stop in zip([0, *cuts], [*cuts, len(offsets)], strict=True):
            extent = int(numbers[start])
            layout = self._layout(extent)
            if layout is None:
                return
            record = layout.record
            first = self._geometry.data_at + record.data_offset
            rows, rest = np.divmod(offsets[start:stop] - first, record.slot_bytes)
            strange = (rest != 0) | (rows < 0) | (rows >= record.rows)
            slots = int(strange.argmax()) if strange.any() else stop - start
            if slots:
                yield _Part(start, start + slots, extent, layout, as_rows(rows[:slots]))
            if slots < stop - start:
                return

    def _layout(self, extent: int) -> _Layout | None:
        """How an extent is laid out now; None where it is not, or is being laid out anew."""
        memory = self.memory  # which another thread may close
        if not 0 <= extent < self._geometry.extents or not len(memory):
            return None
        source = self._record_bytes(extent)
        known = self._layouts.get(extent)
        if known is not None and known.source == source:
            return known
        record = decode_record(source)
        if record is None:
            # The server may be at it: a record is written in no time, and a table takes longer.
            source = self._record_bytes(extent)
            record = decode_record(source)
        if record is None or not record.fits(self._geometry, extent):
            return None
        start = self._geometry.data_at + extent * self._geometry.extent_bytes
        buffer = memory[start : start + self._geometry.extent_bytes]
        layout = _Layout(source, record, Table(buffer, record.rows, record.block_size))
        self._layouts[extent] = layout
        return layout

    def _record_bytes(self, extent: int) -> bytes:
        at = self._geometry.record_at(extent)
        return self.memory[at : at + RECORD_BYTES].tobytes()

    def _number_of(self, namespace: bytes) -> int | None:
        """The number by which rows name a namespace."""
        number = self._numbers.get(namespace)
        if number is None and len(self.memory):
            names, _ = decode_names(self.memory[self._geometry.names_at : self._geometry.data_at])
            self._numbers = {fields["namespace"]: place for place, fields in enumerate(names, start=1)}
            number = self._numbers.get(namespace)
        return number


def _agreement(part: _Part, rows: BlockRows, namespace_id: int) -> int:
    """How many leading blocks of a part are, by their rows, what the caller knows them to be."""
    table = part.layout.table
    if rows.tokens is not None and rows.tokens.shape[1] != table.block_size:
        return 0
    agreed = table.agreement(part.rows, rows)
    agreed = min(agreed, same_rows(table.hash[part.rows], hash_words(rows.hashes)))
    for column, value in ((table.namespace, namespace_id), (table.shard, pack_shard(rows.shard))):
        differs = column[part.rows] != value
        agreed = min(agreed, int(differs.argmax()) if differs.any() else agreed)
    return agreed


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PoolError(
            f"cannot open pool file {path}: {error.strerror}; run as the server's user and on its machine, "
            "with the same /dev/shm, or stream"
        ) from error


def _require_owner(path: Path, descriptor: int) -> None:
    """PoolError where somebody else could change what is read, and read what is written."""
    owner, ours = os.fstat(descriptor).st_uid, os.geteuid()
    if owner not in (0, ours):
        raise PoolError(
            f"pool file {path} belongs to user {owner}, expected {ours}, who runs this, or root; run the "
            "server as this user, with a pool_path in a folder that only this user may write to"
        )


def _read_geometry(path: Path, descriptor: int) -> Geometry:
    try:
        geometry = decode_header(os.pread(descriptor, HEADER_BYTES, 0))
    except PoolError as error:
        raise PoolError(f"pool file {path} cannot be used: {error}; use the server's version") from error
    size = os.fstat(descriptor).st_size
    if size != geometry.file_bytes:
        raise PoolError(
            f"pool file {path} has {size} bytes, expected {geometry.file_bytes}; restart its server"
        )
    return geometry


def _lock(path: Path, descriptor: int, client: int) -> bool:
    try:
        return lock(descriptor, client)
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "?")
        raise PoolError(
            f"cannot lock pool file {path}: {error.strerror} ({reason}); put it on a tmpfs"
        ) from error
