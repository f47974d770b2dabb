"""Pool files of servers that were killed, to be changed and taken over."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.block import WHOLE, BlockRows
from kvstore.integrity import check_pool
from kvstore.spec import NamespaceSpec
from kvstore.table import Table
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import payload_checksum
from kvstore.tiers.pool_format import Geometry, decode_record
from tests.support.pool_processes import run
from tests.support.stores import FakeClock, make_chain, make_host, make_spec, pool_folder

EXTENTS = 8
GEOMETRY = Geometry(EXTENTS, 64 << 10)
SPEC, OTHER = make_spec(), make_spec("other", payload_bytes=4096, block_size=8)
NOW = 1100.0
CLIENT, SILENT = 77, 88
W, X = 6, 7
"""Rows of the first two blocks of wxyz: abcd and ef are in front of it."""

SERVE = """
class Clock:
    now = 1000.0
    def __call__(self):
        return self.now

clock = Clock()
store = TieredStore(Tiers(host), clock=clock)
shape = KVShape(2, 2, 2, 8)
spec = NamespaceSpec(Namespace("model", "0" * 40, "bfloat16", "test", 4, shape), 1024)
other = NamespaceSpec(Namespace("other", "0" * 40, "bfloat16", "test", 8, shape), 4096)
store.register(spec)
store.register(other)
space = host.pool.space(spec.root.digest, WHOLE)

def chain_of(letters, spec=spec):
    ids = np.array([ord(each) for each in letters], np.uint32)
    return Chain.of(spec.root, np.repeat(ids, spec.block_size))

def put(letters, time, spec=spec):
    '''Every payload is its block's hash, over and over.'''
    clock.now = time
    chain = chain_of(letters, spec)
    with store.write(chain) as write:
        for position, payload in zip(write.positions.tolist(), write.payloads):
            payload[:] = np.tile(np.frombuffer(write.rows.hash_at(position), np.uint8), len(payload) // 16)
    return chain
"""

LEAVE = f"""
put("abcd", 1000.0)
put("abef", 1010.0)
put("wxyz", 1020.0)
put("ab", 1030.0, other)
store.acquire("reader", chain_of("wxyz"))
store.acquire("another", chain_of("w"))
host.pool.open_space(b"nobody knows me.", WHOLE, 1024, 4)
host.pool.stage(space, 3)
host.pool.stage(space, 2, writer={CLIENT})
host.pool.quarantine(host.pool.stage(space, 1, writer={CLIENT}))
host.pool.stage(space, 1, writer={SILENT})
host.pool.quarantine(host.pool.stage(space, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


@cache
def left_behind() -> bytes:
    """The file of a server that was killed at its work."""
    with pool_folder() as folder:
        run(SERVE + LEAVE, folder / "pool", ends_by=signal.SIGKILL)
        return (folder / "pool").read_bytes()


class Scene:
    """A pool file that a server left, to be changed and taken over."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.folder = folder
        self.path = folder / "pool"
        self.path.touch(0o600)
        self.path.write_bytes(content)
        self.clock = FakeClock(NOW)
        self.hosts: list[HostTier] = []

    def flip(self, at: int, mask: int = 1) -> None:
        self.edit(lambda content: content.__setitem__(at, content[at] ^ mask))

    def edit(self, change: Callable[[NDArray[np.uint8]], Any]) -> None:
        content = np.fromfile(self.path, dtype=np.uint8)
        change(content)
        content.tofile(self.path)

    def edit_rows(self, change: Callable[[Table], Any]) -> None:
        """Change the table of the extent that has the small blocks."""
        self.edit(lambda content: change(table_in(content)))

    def epoch(self) -> int:
        """What the file says now."""
        return int.from_bytes(self.path.read_bytes()[32:40], "little")

    def adopt(self, *, extents: int = EXTENTS) -> HostTier:
        host = make_host(self.folder, self.clock, extents=extents)
        self.hosts.append(host)
        check_pool(host.pool)
        return host


def table_in(content: NDArray[np.uint8], extent: int = 0) -> Table:
    at = GEOMETRY.record_at(extent)
    record = decode_record(content[at : at + 64].tobytes())
    assert record is not None
    start = GEOMETRY.data_at + extent * GEOMETRY.extent_bytes
    return Table(content[start:], record.rows, record.block_size)


@contextmanager
def make_scene() -> Iterator[Scene]:
    """The file of ``left_behind`` in a folder of its own."""
    with pool_folder() as folder:
        made = Scene(folder, left_behind())
        yield made
        for host in made.hosts:
            host.close()


def rows_of(letters: str, spec: NamespaceSpec = SPEC) -> BlockRows:
    return make_chain(spec, letters).rows(WHOLE)


def found(host: HostTier, letters: str, spec: NamespaceSpec = SPEC) -> int:
    """Leading blocks of a prompt that are there, each with its own bytes and their checksum."""
    rows = rows_of(letters, spec)
    slots = host.pool.match(rows).slots
    payloads = host.views(slots, spec.payload_bytes_on())
    for block, (payload, checksum) in enumerate(zip(payloads, host.checksums(slots), strict=True)):
        assert payload.tobytes() == rows.hash_at(block) * (len(payload) // 16)
        assert checksum == payload_checksum(payload)
    return len(slots)


def found_of_all(host: HostTier) -> list[int]:
    small = [found(host, letters) for letters in ("abcd", "abef", "wxyz")]
    return [*small, found(host, "ab", OTHER)]
