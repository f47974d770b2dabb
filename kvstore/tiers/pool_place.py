"""The path of a pool file: taken from a server that is gone, never from one that runs.

A pool file gets its name when it is complete and locked, by a hard link, which replaces nothing.
Whoever wants the path of another pool file locks that inode, sees that the path still names it,
and keeps it or unlinks it. So of two servers that start at once one gets the path, the other is refused, and
a process that still maps the old file keeps memory that is its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from kvstore.errors import PoolError

FILE_MODE = 0o600
_ATTEMPTS = 16
_FIX = "move it away, or choose another pool_path"


def take_stale(path: Path, magic: bytes) -> int | None:
    """A locked descriptor of the file that a server that is gone left at ``path``; None where there is none.

    Raises PoolError, and leaves what is there alone, where that is no file of this user that is
    empty or starts with ``magic``, or where a server runs that has it locked.
    """
    for _ in range(_ATTEMPTS):
        try:
            found = path.lstat()
            # Before it is opened: opening a FIFO or a device can have effects of its own.
            _require_own_file(path, found)
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PoolError(f"cannot open pool file {path}: {error.strerror}; {_FIX}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if _lock_stale(path, descriptor, magic):
                undo.pop_all()
                return descriptor
    raise _never_settles(path)


def discard_stale(descriptor: int, path: Path) -> None:
    """Remove a file that ``take_stale`` gave, and close it."""
    remove(descriptor, path)
    os.close(descriptor)


def open_unnamed(path: Path) -> int:
    """A descriptor of a new locked file on ``path``'s file system that no directory names yet.

    Unless it is published, it is gone once it is closed and unmapped.
    """
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise PoolError(
            f"cannot make a pool file in {path.parent}: {error.strerror}; choose a pool_path on a tmpfs "
            "that this user may write"
        ) from error
    os.fchmod(descriptor, FILE_MODE)  # whatever the umask is
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def publish(descriptor: int, path: Path, magic: bytes) -> None:
    """Give an unnamed file its name. Raises PoolError where another server was faster."""
    for _ in range(_ATTEMPTS):
        try:
            # A directory descriptor, unused beside an absolute path, makes Python call linkat, which
            # follows the link in /proc to the file.
            os.link(f"/proc/self/fd/{descriptor}", path.absolute(), src_dir_fd=descriptor)
        except FileExistsError:
            # Of a server that came and went since.
            stale = take_stale(path, magic)
            if stale is not None:
                discard_stale(stale, path)
        except OSError as error:
            raise PoolError(
                f"cannot make pool file {path}: {error.strerror}; choose a pool_path that this user may write"
            ) from error
        else:
            return
    raise _never_settles(path)


def remove(descriptor: int, path: Path) -> None:
    """Unlink ``path`` if it names the file that is open, and locked, as ``descriptor``."""
    if _names(path, descriptor):
        path.unlink()


def unlock(descriptor: int) -> None:
    """Close a locked file, and unlock it: a mapping has a descriptor of its own that shares the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def check_room(path: Path, pool_bytes: int) -> None:
    """Raise PoolError where the file system has less room than the pool takes.

    Called when a stale file is removed, so that its memory counts exactly if nobody maps it any more.
    """
    parent = path.parent
    system = os.statvfs(parent)
    free = system.f_bavail * system.f_frsize
    if pool_bytes > free:
        raise PoolError(
            f"pool_bytes is {pool_bytes}, but {parent} has {free} bytes free; lower pool_bytes to at "
            f"most {free}, or enlarge {parent} (in Kubernetes: sizeLimit of the emptyDir volume; in "
            "Docker: --shm-size)"
        )


def _lock_stale(path: Path, descriptor: int, magic: bytes) -> bool:
    """Lock the open file; False where the path names another one by now."""
    opened = os.fstat(descriptor)
    _require_own_file(path, opened)
    start = os.pread(descriptor, len(magic), 0)
    if opened.st_size and start != magic:
        raise PoolError(
            f"pool_path {path} is a file that starts with {start!r}, expected a pool file, which starts "
            f"with {magic!r}; {_FIX}"
        )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PoolError(
            f"pool file {path} is in use by another server; stop it, or give this one another pool_path"
        ) from error
    return _names(path, descriptor)


def _names(path: Path, descriptor: int) -> bool:
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _require_own_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise PoolError(
            f"pool_path {path} is {_kind(found.st_mode)}, expected a regular file or nothing; {_FIX}"
        )
    if found.st_uid != os.geteuid():
        raise PoolError(
            f"pool_path {path} belongs to user {found.st_uid}, expected {os.geteuid()}, who runs this; {_FIX}"
        )


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def _never_settles(path: Path) -> PoolError:
    return PoolError(
        f"pool file {path} was replaced {_ATTEMPTS} times while this server started; "
        "give each server a pool_path of its own"
    )
