"""RESP2 on a socket: small replies through one small buffer, payloads straight to where they belong."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds on a clock that never goes back, the one that deadlines are on."""

# Holds any reply but a payload. It is also where the bytes after a payload land, and what it then
# holds of the next payload has to be copied: hence no larger.
_BUFFER_BYTES = 4096
# Setting a timeout is a system call: it is set anew only when it is off by this much.
_REARM_SECONDS = 0.005
_MOST_VECTORS = 512  # Linux takes 1,024 in one call.
_HANGUP = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)

# Replies that are not payloads come nowhere near these; a broken proxy's might.
_MOST_STRING_BYTES = 2**20
_MOST_ITEMS = 4096
_DEEPEST = 4


class StreamError(ConnectionError):
    """What arrived is not what the protocol says comes next: the connection must be closed."""


class ErrorReply(NamedTuple):
    """An error in the place of one reply. ``code`` is the first word of ``message``."""

    code: str
    message: str


Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"


def command(*parts: bytes) -> bytes:
    """A command as the server reads it."""
    return b"*%d\r\n" % len(parts) + b"".join(map(bulk_string, parts))


def bulk_string(value: bytes) -> bytes:
    """One argument of a command as the server reads it."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Wire:
    """The byte stream of one connection. Not thread-safe.

    Every call ends by the deadline given to ``begin``, or a few milliseconds later with
    TimeoutError. After any OSError the stream is in doubt: close the connection, never read on.
    """

    def __init__(self, sock: socket.socket, clock: Clock, deadline: float) -> None:
        self._sock = sock
        self._clock = clock
        self._scatters = not isinstance(sock, ssl.SSLSocket)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # Bytes that arrived but were not read yet: [start, stop) of the buffer.
        self._start = 0
        self._stop = 0
        self._owed = 0
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN | _HANGUP)
        self.begin(deadline)

    def begin(self, deadline: float) -> None:
        """Start an exchange. ``replies`` and ``error_codes`` speak of it alone."""
        self._deadline = deadline
        self._armed_at = float("-inf")
        self.replies = 0
        self.error_codes: list[str] = []

    def owe(self, replies: int) -> None:
        """Leave this many replies for the next exchange to drop: nobody waits for them."""
        self._owed += replies

    def is_fit(self) -> bool:
        """Whether a connection that lay idle is still open and in step. Does not wait."""
        events = self._poller.poll(0)
        if any(mask & _HANGUP for _, mask in events):
            return False
        return self._owed > 0 or (not events and self._start == self._stop)

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all buffers in order, without joining them."""
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while pending:
            self._arm()
            if self._scatters:
                sent = self._sock.sendmsg(pending[:_MOST_VECTORS])
            else:
                sent = self._sock.send(pending[0])
            _drop_front(pending, sent)

    def read_reply(self) -> Reply:
        """The next reply, whole; not for payloads."""
        self._settle()
        return self._note(self._reply())

    def read_bulk_size(self) -> int | ErrorReply | None:
        """First half of a string reply: its size, all of which must be read before anything else.

        None (no such key) and an error are whole replies.
        """
        self._settle()
        line = self._line()
        if line.startswith(b"-"):
            error = _error(line)
            self._note(error)
            return error
        if not line.startswith(b"$"):
            raise StreamError(f"got {line[:32]!r}, expected a string; is this a Redis server?")
        size = _number(line)
        self._note(None)
        return None if size < 0 else size

    def read_part(self, target: memoryview) -> None:
        """The next bytes of a string reply whose end comes later."""
        self._fill([target])

    def read_bulk(self, *targets: memoryview) -> None:
        """Second half of a string reply: fill the targets in order, up to its very end."""
        self._fill(list(targets))
        while self._stop - self._start < 2:
            self._more()
        if not self._buffer.startswith(b"\r\n", self._start):
            raise StreamError("a string reply does not end where its size says")
        self._start += 2

    def skip_bulk(self, size: int, scratch: memoryview) -> None:
        """The last ``size`` bytes of a string reply, which nobody wants; overwrites ``scratch``."""
        while size > len(scratch):
            self._fill([scratch])
            size -= len(scratch)
        self.read_bulk(scratch[:size])

    def _settle(self) -> None:
        while self._owed:
            self._note(self._reply())
            self._owed -= 1

    def _note(self, reply: Reply) -> Reply:
        self.replies += 1
        if isinstance(reply, ErrorReply):
            self.error_codes.append(reply.code)
        return reply

    def _reply(self, depth: int = 0) -> Reply:
        line = self._line()
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b":":
            return _number(line)
        if kind == b"-":
            return _error(line)
        if kind == b"$":
            return self._string(_number(line))
        count = _number(line)
        if kind != b"*" or depth == _DEEPEST or count > _MOST_ITEMS:
            raise StreamError(f"got {line[:32]!r}, expected a short reply; is this a Redis server?")
        return [self._reply(depth + 1) for _ in range(count)]

    def _string(self, size: int) -> bytes | None:
        if size < 0:
            return None
        if size > _MOST_STRING_BYTES:
            raise StreamError(f"got a string of {size} bytes, expected a short reply")
        data = bytearray(size)
        self.read_bulk(memoryview(data))
        return bytes(data)

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._stop)) < 0:
            self._more()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _more(self) -> None:
        """Receive into the buffer, behind what it holds."""
        held = self._stop - self._start
        if held == _BUFFER_BYTES:
            raise StreamError(f"got {_BUFFER_BYTES} bytes without an end of line; is this a Redis server?")
        self._buffer[:held] = self._buffer[self._start : self._stop]
        self._start, self._stop = 0, held
        self._stop += self._receive([self._view[held:]])

    def _fill(self, targets: list[memoryview]) -> None:
        """Fill the targets in order: from the buffer, then from the socket without a copy."""
        pending = [target for target in targets if len(target)]
        while pending and self._start < self._stop:
            count = min(len(pending[0]), self._stop - self._start)
            pending[0][:count] = self._view[self._start : self._start + count]
            self._start += count
            _drop_front(pending, count)
        while pending:
            self._start = self._stop = 0
            # What follows the targets in the stream goes to the buffer, in the same system call.
            self._stop = _drop_front(pending, self._receive([*pending, self._view]))

    def _receive(self, targets: Sequence[memoryview]) -> int:
        """Bytes received, at least one. TLS sockets know no scattering: the first target alone."""
        self._arm()
        sock = self._sock
        count = sock.recvmsg_into(targets)[0] if self._scatters else sock.recv_into(targets[0])
        if count == 0:
            raise ConnectionError("the server closed the connection")
        return count

    def _arm(self) -> None:
        """Let the next system call wait no longer than the deadline."""
        now = self._clock()
        if now - self._armed_at < _REARM_SECONDS:
            return
        if now >= self._deadline:
            raise TimeoutError("the deadline passed")
        self._sock.settimeout(self._deadline - now)
        self._armed_at = now


def _drop_front(views: list[memoryview], count: int) -> int:
    """Take ``count`` bytes off the front of the views; how many of them there were too many."""
    done = 0
    for view in views:
        if count < len(view):
            break
        count -= len(view)
        done += 1
    del views[:done]
    if views and count:
        views[0] = views[0][count:]
        return 0
    return count


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise StreamError(f"got {line[:32]!r}, expected a number; is this a Redis server?") from None


def _error(line: bytes) -> ErrorReply:
    message = line[1:].decode("utf-8", "replace")
    return ErrorReply(message.partition(" ")[0], message)
