"""The pool file: reserved for real, locked, private, and readable without the server that wrote it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.block import WHOLE
from kvstore.errors import PoolError
from kvstore.table import SlotState, Table
from kvstore.tiers.pool_file import PoolFile
from kvstore.tiers.pool_format import NAMES_BYTES, decode_header, decode_names, decode_record
from kvstore.tiers.pool_place import check_room
from tests.support.pool_processes import OPEN, REPOSITORY, run, start
from tests.support.stores import (
    FakeClock,
    RigOptions,
    make_chain,
    make_host,
    make_rig,
    make_spec,
    payload_of,
    pool_folder,
)

EXTENT_BYTES = 64 << 10
SPEC = make_spec()


@pytest.fixture
def folder() -> Iterator[Path]:
    with pool_folder() as made:
        yield made


FILL = """
store = TieredStore(Tiers(host), clock=lambda: 1.0)
spec = NamespaceSpec(Namespace("m", "w", "bfloat16", "l", 4, KVShape(2, 2, 2, 8)), 1024)
store.register(spec)
for number in range(20):
    with store.write(Chain.of(spec.root, np.arange(number * 100, number * 100 + 80))) as write:
        assert write.status == [BlockStatus.YOURS] * 20, write.status
        for payload in write.payloads:
            payload[:] = number
store.check()
"""
"""Writes twenty prompts into the host tier ``host``: none may fail, however little room there is."""


class Reader:
    """What the file says to somebody who has only a copy of it."""

    def __init__(self, path: Path) -> None:
        self.bytes = np.fromfile(path, dtype=np.uint8)
        self.geometry = decode_header(self.bytes[:64].tobytes())
        assert len(self.bytes) == self.geometry.file_bytes

    def names(self) -> list[dict[str, object]]:
        return decode_names(self.bytes[self.geometry.names_at : self.geometry.data_at])[0]

    def tables(self) -> list[tuple[Table, int, int]]:
        """(table, first slot's offset, slot bytes) of every extent that is laid out."""
        tables = []
        for extent in range(self.geometry.extents):
            at = self.geometry.record_at(extent)
            record = decode_record(self.bytes[at : at + 64].tobytes())
            if record is not None:
                assert record.fits(self.geometry, extent)
                start = self.geometry.data_at + extent * self.geometry.extent_bytes
                table = Table(self.bytes[start:], record.rows, record.block_size)
                tables.append((table, self.geometry.data_at + record.data_offset, record.slot_bytes))
        return tables


class TestSelfDescription:
    def test_blocks_can_be_read_from_the_file_alone(self) -> None:
        chain = make_chain(SPEC, "abc")
        with make_rig(FakeClock(), [(SPEC, (WHOLE,))], RigOptions(2)) as rig:
            rig.write(chain)
            reader = Reader(rig.host.file.path)
            ((table, first, slot_bytes),) = reader.tables()
            rows = np.flatnonzero(table.state == SlotState.READY)
            assert len(rows) == 3
            assert (table.generation[rows] % 2 == 0).all()
            assert table.hash[rows].tobytes() == chain.hashes
            assert chain.tokens is not None
            assert (table.tokens[rows] == chain.tokens).all()
            assert (table.identity_of(rows) == table.identity[rows]).all()
            for block, row in enumerate(rows.tolist()):
                start = first + row * slot_bytes
                payload = reader.bytes[start : start + 1024].tobytes()
                assert payload == payload_of(chain.rows(WHOLE), block).tobytes()
                assert xxhash.xxh3_64_intdigest(payload) == table.checksum[row]

    def test_namespaces_can_be_read_and_salts_cannot(self) -> None:
        secret = b"a tenant's own salt, 32 bytes...."
        salted = make_spec("salted", tenant_salt=secret)
        with make_rig(FakeClock(), [(SPEC, (WHOLE,)), (salted, (WHOLE,))], RigOptions(2)) as rig:
            reader = Reader(rig.host.file.path)
            assert [each["model"] for each in reader.names()] == ["model", "salted"]
            assert [each["namespace"] for each in reader.names()] == [SPEC.root.digest, salted.root.digest]
            assert reader.names()[0]["kv_shape"] == [2, 2, 2, 8]
            assert secret not in reader.bytes.tobytes()

    def test_a_server_that_dies_in_a_write_leaves_nothing_visible(self, folder: Path) -> None:
        """LMCache #4991: between stage and commit, in another process, without a goodbye."""
        script = """
import numpy as np, os
from hashing import KVShape, Namespace
from kvstore.block import Chain
from kvstore.spec import NamespaceSpec
store = TieredStore(Tiers(host), clock=lambda: 1.0)
spec = NamespaceSpec(Namespace("m", "w", "bfloat16", "l", 4, KVShape(2, 2, 2, 8)), 1024)
store.register(spec)
with store.write(Chain.of(spec.root, np.arange(8))) as write:
    for payload in write.payloads:
        payload[:] = 1
write = store.write(Chain.of(spec.root, np.arange(100, 120)))
for payload in write.payloads:
    payload[:] = 2
os._exit(0)
"""
        run(script, folder / "pool")
        ((table, _, _),) = Reader(folder / "pool").tables()
        readable = np.flatnonzero(table.generation % 2 == 0)
        assert len(readable) == 2
        assert (table.state[readable] == SlotState.READY).all()
        assert np.count_nonzero(table.state == SlotState.STAGED) == 5


class TestOwnership:
    def test_nobody_else_may_read_it(self, folder: Path) -> None:
        host = make_host(folder, FakeClock())
        assert stat.S_IMODE(host.file.path.stat().st_mode) == 0o600
        host.close()

    def test_a_second_server_is_told_so(self, folder: Path) -> None:
        process = start("print('open', flush=True); sys.stdin.read()", folder / "pool")
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(
            PoolError, match=r"pool file .*pool is in use by another server; stop it, or give"
        ):
            make_host(folder, FakeClock())
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
        make_host(folder, FakeClock()).close()

    def test_also_in_the_same_process(self, folder: Path) -> None:
        first = make_host(folder, FakeClock())
        with pytest.raises(PoolError, match="in use by another server"):
            make_host(folder, FakeClock())
        first.close()
        first.close()
        make_host(folder, FakeClock()).close()


class TestRoom:
    def test_memory_is_reserved_when_it_is_first_used(self) -> None:
        with make_rig(FakeClock(), [(SPEC, (WHOLE,))], RigOptions(4)) as rig:
            path = rig.host.file.path
            before = path.stat().st_blocks * 512
            rig.write(make_chain(SPEC, "a"))
            assert path.stat().st_blocks * 512 - before == EXTENT_BYTES

    def test_a_file_system_that_is_too_small_is_named_with_both_numbers(self, folder: Path) -> None:
        """The exact number and the fix, before anything is started."""
        system = os.statvfs(folder)
        free = system.f_bavail * system.f_frsize
        asked = (free // EXTENT_BYTES + 1000) * EXTENT_BYTES
        with pytest.raises(
            PoolError, match=rf"pool_bytes is {asked}, but .* has \d+ bytes free; lower"
        ) as caught:
            check_room(folder / "pool", asked)
        assert "--shm-size" in str(caught.value)
        # Where the tmpfs is larger than the memory, that is the first that does not suffice.
        with pytest.raises(PoolError, match=rf"pool_bytes is {asked}, but .* \d+ bytes( free)?; lower"):
            make_host(folder, FakeClock(), extents=asked // EXTENT_BYTES)
        assert list(folder.iterdir()) == []

    def test_more_than_any_machine_has(self, tmp_path: Path) -> None:
        with pytest.raises(PoolError, match=rf"pool_bytes is {1 << 60}, but the .* is \d+ bytes; lower"):
            make_host(tmp_path, FakeClock(), extents=1 << 40, extent_bytes=1 << 20)
        assert list(tmp_path.iterdir()) == []

    def test_a_pool_smaller_than_an_extent(self, folder: Path) -> None:
        with pytest.raises(PoolError, match="pool of 0 bytes holds no extent of 65536 bytes; raise its size"):
            make_host(folder, FakeClock(), extents=0)
        assert list(folder.iterdir()) == []

    def test_a_pool_that_cannot_grow_goes_on_with_what_it_has(self, folder: Path) -> None:
        """What a sparse tmpfs does when it fills up is kill by SIGBUS; what is reserved cannot."""
        script = """
import numpy as np, resource
from hashing import KVShape, Namespace
from kvstore.block import Chain
from kvstore.spec import NamespaceSpec
# The system refuses every byte beyond the third extent from now on.
limit = path.stat().st_size - 5 * (1 << 16)
import os
os.truncate(path, limit)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
"""
        script += FILL + "print(host.pool.usage().reserved)"
        assert run(script, folder / "pool") == str(3 * EXTENT_BYTES)

    def test_a_file_system_that_is_full_costs_the_pool_its_growth_and_nothing_else(
        self, folder: Path
    ) -> None:
        """On a tmpfs of its own, which others fill up after the server has started. Nobody dies of SIGBUS."""
        script = (
            OPEN
            + """
store = TieredStore(Tiers(host), clock=lambda: 1.0)
spec = NamespaceSpec(Namespace("m", "w", "bfloat16", "l", 4, KVShape(2, 2, 2, 8)), 1024)
store.register(spec)
with store.write(Chain.of(spec.root, np.arange(9000, 9080))) as write:
    pass
filler = os.open(path.with_name("filler"), os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(filler, bytes(4096))
except OSError:
    pass
print(host.file.allocate(1), host.file.reserve(1))
"""
            + FILL
            + """
os.ftruncate(filler, 0)
before = host.pool.usage().reserved
with store.write(Chain.of(spec.root, np.arange(2000, 2400))) as write:
    pass
print(before, host.pool.usage().reserved > before)
"""
        )
        mount = (
            f"mount -t tmpfs -o size=8m tmpfs {folder} && exec {sys.executable} -c '{script}' {folder}/pool"
        )
        alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "sh", "-c"]
        if subprocess.run([*alone, f"mount -t tmpfs tmpfs {folder}"], capture_output=True).returncode:
            pytest.skip("this user may not mount a tmpfs, not even in a namespace of its own")
        output = subprocess.run(
            [*alone, mount], capture_output=True, text=True, cwd=REPOSITORY, check=True
        ).stdout
        assert output.split() == ["False", "False", str(EXTENT_BYTES), "True"]

    def test_a_thread_may_allocate_ahead_while_the_owner_works(self) -> None:
        with make_rig(FakeClock(), [(SPEC, (WHOLE,))], RigOptions(8)) as rig:
            file, extents = rig.host.file, rig.host.pool.extents
            rig.write(make_chain(SPEC, "a"))
            ahead = extents.unreserved()
            assert ahead == [1, 2, 3, 4, 5, 6, 7]
            before = file.path.stat().st_blocks * 512
            thread = threading.Thread(target=lambda: [file.allocate(number) for number in ahead])
            thread.start()
            for number in range(20):
                rig.write(make_chain(SPEC, chr(0x4E00 + number) + "bcdefghijklmnop"))
            thread.join()
            assert file.path.stat().st_blocks * 512 - before == 7 * EXTENT_BYTES
            assert all(file.reserve(number) for number in extents.unreserved())
            assert len(extents.unreserved()) < 7
            rig.store.check()

    def test_nothing_is_allocated_after_the_end(self, folder: Path) -> None:
        """A descriptor that is closed may be somebody else's next."""
        file = PoolFile(folder / "pool", 2 * EXTENT_BYTES, EXTENT_BYTES)
        file.close()
        assert not file.allocate(0)

    def test_memory_that_cannot_be_mapped_is_given_back(self, folder: Path) -> None:
        """The kernel answers ENOMEM for a hole in the mapping, as for page tables it has no memory for."""
        script = """
import ctypes
import numpy as np
from hashing import KVShape, Namespace
from kvstore.block import Chain
from kvstore.spec import NamespaceSpec
hole = host.file.data.ctypes.data + 2 * (1 << 16) + 4096
assert ctypes.CDLL(None).munmap(ctypes.c_void_p(hole), ctypes.c_size_t(4096)) == 0
before = path.stat().st_blocks * 512
"""
        script += FILL + "print(host.pool.usage().reserved, path.stat().st_blocks * 512 - before)"
        reserved, allocated = run(script, folder / "pool").split()
        assert int(reserved) == 2 * EXTENT_BYTES
        assert int(allocated) - int(reserved) <= 4096, "only the hole itself may stay allocated"

    def test_a_file_that_the_system_refuses_leaves_nothing_behind(self, folder: Path) -> None:
        script = """
import resource
from kvstore.errors import PoolError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    HostTier(path.with_name("other"), pool_bytes=8 << 16, extent_bytes=1 << 16, make_evictor=LRU, clock=None)
except PoolError as error:
    print(error, path.with_name("other").exists())
"""
        output = run(script, folder / "pool")
        assert "for pool file" in output
        assert "File too large; free memory on that file system or choose another pool_path" in output
        assert output.endswith("False")

    def test_there_is_room_for_thousands_of_namespaces_and_no_more(self, folder: Path) -> None:
        file = PoolFile(folder / "pool", EXTENT_BYTES, EXTENT_BYTES)
        name_many(file, range(10_000))
        with pytest.raises(PoolError, match=r"describes \d+ namespaces and has room for no more; stop the"):
            name_many(file, range(10_000, NAMES_BYTES))
        assert file.namespace_id((7).to_bytes(16, "big")) == 8
        assert Reader(folder / "pool").names()[7] == {"namespace": (7).to_bytes(16, "big")}
        file.close()


def name_many(file: PoolFile, numbers: range) -> None:
    for number in numbers:
        assert file.namespace_id(number.to_bytes(16, "big")) == number + 1


def is_mapped(inode: int) -> bool:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return str(inode) in {line.split()[4] for line in lines}


class TestEnd:
    def test_memory_goes_with_the_last_view_of_it(self, folder: Path) -> None:
        file = PoolFile(folder / "pool", EXTENT_BYTES, EXTENT_BYTES)
        inode = file.path.stat().st_ino
        assert file.reserve(0)
        view = file.data[:10]
        view[:] = 7
        file.close()
        assert is_mapped(inode)
        assert (view == 7).all()
        del view
        assert not is_mapped(inode)
        assert file.path.exists()

    def test_a_temporary_pool_can_be_removed(self, folder: Path) -> None:
        host = make_host(folder, FakeClock())
        host.file.remove()
        assert list(folder.iterdir()) == []
        host.file.remove()
        next_one = make_host(folder, FakeClock())
        host.file.remove()
        host.close()
        assert next_one.file.path.exists(), "what another server put there is not ours"
        next_one.close()

    def test_after_the_close_the_file_belongs_to_whoever_is_next(self, folder: Path) -> None:
        host = make_host(folder, FakeClock())
        host.close()
        host.file.remove()
        assert host.file.path.exists()
