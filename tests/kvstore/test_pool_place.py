"""Who gets the path of a pool file, and what is left alone there."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import PoolError
from kvstore.tiers.pool_file import PoolFile
from kvstore.tiers.pool_format import MAGIC
from tests.support.pool_processes import run, start
from tests.support.stores import FakeClock, make_host, pool_folder

EXTENT_BYTES = 64 << 10
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    with pool_folder() as made:
        yield made


def open_pool(path: Path) -> PoolFile:
    return PoolFile(path, EXTENT_BYTES, EXTENT_BYTES)


class TestNextServer:
    def test_a_writer_of_the_one_before_reaches_only_its_own_memory(self, folder: Path) -> None:
        """It still maps the file, which was larger: no SIGBUS for it, no change for the new server."""
        script = """
data = host.file.bytes
host.close()
print("closed", flush=True)
sys.stdin.readline()
data[:] = 0xFF
print(int(data.min()))
"""
        late = start(script, folder / "pool")
        assert late.stdout is not None
        assert late.stdout.readline() == "closed\n"
        host = make_host(folder, FakeClock(), extents=2)
        assert host.file.reserve(0)
        host.file.data[:EXTENT_BYTES] = 1
        before = np.fromfile(folder / "pool", dtype=np.uint8)
        output, _ = late.communicate("go on\n", timeout=60)
        assert (late.returncode, output) == (0, "255\n")
        assert (np.fromfile(folder / "pool", dtype=np.uint8) == before).all()
        host.close()

    def test_of_several_that_start_at_once_exactly_one_gets_the_path(self, folder: Path) -> None:
        """On an empty path and on a stale file in turns."""
        servers, rounds = 4, 40
        together = threading.Barrier(servers)
        opened: list[PoolFile] = []
        refusals: list[str] = []

        def serve() -> None:
            together.wait(10)
            try:
                opened.append(open_pool(folder / "pool"))
            except PoolError as error:
                refusals.append(str(error))

        for number in range(rounds):
            threads = [threading.Thread(target=serve) for _ in range(servers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            [winner] = opened
            assert os.path.samestat(winner.path.stat(), (folder / "pool").stat())
            assert [each for each in refusals if "in use by another server" not in each] == []
            assert len(refusals) == servers - 1
            if number % 2:
                winner.remove()
            winner.close()
            opened.clear()
            refusals.clear()
        assert [each.name for each in folder.iterdir()] in ([], ["pool"])

    def test_its_file_is_private_whatever_was_there_and_whatever_the_umask(self, folder: Path) -> None:
        open_pool(folder / "pool").close()
        (folder / "pool").chmod(0o644)
        open_pool(folder / "pool").close()
        assert stat.S_IMODE((folder / "pool").stat().st_mode) == 0o600
        script = """
import os
os.umask(0o777)
HostTier(path.with_name("other"), pool_bytes=1 << 16, extent_bytes=1 << 16, make_evictor=LRU, clock=None)
print(oct(path.with_name("other").stat().st_mode & 0o7777))
"""
        assert run(script, folder / "pool") == "0o600"

    def test_an_empty_file_is_as_good_as_none(self, folder: Path) -> None:
        (folder / "pool").touch()
        open_pool(folder / "pool").close()
        assert (folder / "pool").read_bytes().startswith(MAGIC)


def make_link(path: Path) -> None:
    open_pool(path.with_name("target")).close()
    path.symlink_to(path.with_name("target"))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(0, 0))  # the one that takes no privilege to make


def look_at(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything that a change would show in."""
    found = {each.name: each.lstat() for each in folder.iterdir()}
    return {
        name: (seen.st_ino, seen.st_mode, seen.st_nlink, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
        for name, seen in found.items()
    }


class TestForeignPath:
    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda path: path.write_bytes(b"a letter"), r"is a file that starts with b'a letter', expected"),
            (lambda path: path.write_bytes(b"PK"), r"is a file that starts with b'PK', expected a pool file"),
            (lambda path: path.mkdir(), r"is a directory, expected a regular file or nothing; move it away"),
            (os.mkfifo, r"is a FIFO, expected a regular file"),
            (make_socket, r"is a socket, expected a regular file"),
            (make_device, r"is a device, expected a regular file"),
            (make_link, r"is a symbolic link, expected a regular file"),
            (lambda path: path.symlink_to("nowhere"), r"is a symbolic link, expected a regular file"),
        ],
    )
    def test_what_is_no_pool_file_stays_as_it_is(
        self, folder: Path, make: Callable[[Path], object], problem: str
    ) -> None:
        make(folder / "pool")
        before = look_at(folder)
        with pytest.raises(PoolError, match=problem):
            make_host(folder, FakeClock())
        assert look_at(folder) == before

    def test_a_file_of_another_user_stays_as_it_is(self, folder: Path) -> None:
        path = Path("/etc/passwd")
        if os.geteuid() == 0:
            path = folder / "pool"
            open_pool(path).close()
            os.chown(path, NOBODY, NOBODY)
        before = look_at(folder)
        with pytest.raises(PoolError, match=rf"belongs to user \d+, expected {os.geteuid()}, who runs this"):
            open_pool(path)
        assert look_at(folder) == before

    def test_a_file_that_may_not_be_read(self, folder: Path) -> None:
        """Root reads everything: for it the file is a pool's, or not."""
        (folder / "pool").write_bytes(b"secret")
        (folder / "pool").chmod(0)
        with pytest.raises(
            PoolError, match=r"cannot open pool file .*Permission denied|starts with b'secret'"
        ):
            open_pool(folder / "pool")
        assert (folder / "pool").stat().st_size == len(b"secret")

    def test_a_folder_that_does_not_exist(self, folder: Path) -> None:
        with pytest.raises(PoolError, match=r"is in .*/missing, which is no directory; make it first"):
            make_host(folder / "missing", FakeClock())
