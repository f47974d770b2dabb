"""Kernel locks by which a server sees that a client lives.

A client locks one byte of the pool file, at an offset that its number names and where no file has
bytes. The lock belongs to the open file description (``F_OFD_SETLK``), and a mapping keeps that
open: so the lock is there exactly as long as some process, a forked child included, can still write
to the memory. It vanishes with the last of them, however that ended.
"""

from __future__ import annotations

import errno
import fcntl
import struct

SERVER = 0
"""The number whose byte the server itself locks. Clients have 1 and more."""
MOST_CLIENTS = (1 << 31) - 1
"""The largest number of a client."""

_LOCK_BASE = 1 << 40
_FLOCK = struct.Struct("@hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid


def lock(descriptor: int, number: int) -> bool:
    """Lock a number's byte; False when another open file description has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(number))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(descriptor: int, number: int) -> bool:
    """Whether an open file description other than this one has a number's byte locked."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(number))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _request(number: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, 0, _LOCK_BASE + number, 1, 0)
