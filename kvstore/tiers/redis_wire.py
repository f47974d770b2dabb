"""RESP2 on a socket: small replies through one small buffer, payloads straight to where they belong."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds on a clock that never goes back, the one that deadlines are on."""

# Holds any reply but a payload, and what is received of a payload with it costs a copy: hence small.
_BUFFER_BYTES = 4096
# A payload is received in pieces that are still in the processor's own cache when they are tapped. Smaller
# ones let a TCP peer go on sooner, larger ones spare system calls, which is what a unix socket asks for.
_PIECE_BYTES = 256 * 1024
# What is received of the replies after a payload together with it, at most.
_MOST_AHEAD_BYTES = 256
# Setting a timeout is a system call: it is set anew only when it is off by this much.
_REARM_SECONDS = 0.005
_SHORTEST_TIMEOUT_SECONDS = 0.001
_MOST_VECTORS = 512  # Linux takes 1,024 in one call.
_TIMEVAL = struct.Struct("@ll")
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


Tap: TypeAlias = Callable[[memoryview], object]
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
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # Bytes that arrived but were not read yet: [start, stop) of the buffer.
        self._start = 0
        self._stop = 0
        self._owed = 0
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN | _HANGUP)
        sock.settimeout(None)
        self._armed_seconds = float("-inf")
        self.begin(deadline)

    def begin(self, deadline: float) -> None:
        """Start an exchange. ``replies`` and ``error_codes`` speak of it alone.

        ``preface``, empty at first, is a command that whoever sends puts before each of its own; the
        reply to it is read and dropped before each reply.
        """
        self._deadline = deadline
        self.preface = b""
        self.replies = 0
        self.error_codes: list[str] = []

    def owe(self, replies: int) -> None:
        """Leave this many replies for the next exchange to drop: nobody waits for them."""
        self._owed += 2 * replies if self.preface else replies

    def is_fit(self) -> bool:
        """Whether a connection that lay idle is still open and in step. Does not wait."""
        events = self._poller.poll(0)
        if any(mask & _HANGUP for _, mask in events):
            return False
        return self._owed > 0 or (not events and self._start == self._stop)

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all buffers in order, without joining them."""
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        left = sum(map(len, pending))
        while left:
            self._arm()
            try:
                if self._encrypted:
                    sent = self._sock.send(pending[0])
                else:
                    sent = self._sock.sendmsg(pending[:_MOST_VECTORS])
            except BlockingIOError:
                raise TimeoutError("the server did not take a command in time") from None
            left -= sent
            if left:
                _drop_front(pending, sent)

    def read_reply(self) -> Reply:
        """The next reply, whole; not for payloads."""
        if self._owed or self.preface:
            self._settle()
        line = self._line()
        if line.startswith(b":"):
            self.replies += 1
            return _number(line)
        return self._note(self._reply_from(line))

    def read_bulk_size(self) -> int | ErrorReply | None:
        """The start of a string reply: its size. So many bytes, and then its end, must be read next.

        None (no such key) and an error are whole replies.
        """
        if self._owed or self.preface:
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

    def take(self, expected: bytes) -> bool:
        """Whether a whole reply, or the start of a string reply, that was expected has come: it is read then.

        False also where it has not come yet: it is then there for the other methods.
        """
        if self._owed or self.preface or not self._buffer.startswith(expected, self._start, self._stop):
            return False
        self._start += len(expected)
        self.replies += 1
        return True

    def read_string(self, head: memoryview, body: memoryview, tap: Tap, *, surely: int) -> None:
        """All of a string reply whose size has been read: what it begins with, the rest, and its end.

        ``tap`` gets the rest piece by piece. At least ``surely`` bytes follow, of replies that were
        asked for: they are received with the last piece, where that saves a system call.
        """
        rest = head[self._drain(head) :]
        done = 0 if len(rest) else self._drain(body)
        if done:
            tap(body[:done])
        if not len(body):
            self.read_part(rest)
        while done < len(body):
            piece = body[done : done + _PIECE_BYTES]
            done += len(piece)
            ahead = 2 + min(surely, _MOST_AHEAD_BYTES) if done == len(body) else 0
            # The buffer is empty by now.
            self._stop = self._fill([rest, piece], self._view[:ahead])
            rest = rest[:0]
            tap(piece)
        self.end_bulk()

    def _fill(self, views: list[memoryview], ahead: memoryview) -> int:
        """Receive what the views hold, and of ``ahead`` as much as comes: how much that is."""
        got, needed, left = 0, sum(map(len, views)), [*views, ahead]
        whole = needed + len(ahead)
        while got < whole:
            try:
                count = self._receive(left)
            except OSError:
                if got < needed:
                    raise
                # What was to come has come. Whoever reads on is told.
                break
            got += count
            if got < whole:
                _drop_front(left, count)
        return got - needed

    def _drain(self, target: memoryview) -> int:
        """Copy what has arrived already."""
        count = min(len(target), self._stop - self._start)
        target[:count] = self._view[self._start : self._start + count]
        self._start += count
        if self._start == self._stop:
            self._start = self._stop = 0
        return count

    def read_part(self, target: memoryview) -> None:
        """The next bytes of a string reply."""
        done = self._drain(target)
        if done < len(target):
            self._fill([target[done:]], target[:0])

    def end_bulk(self) -> None:
        """The end of a string reply, all of which has been read."""
        while self._stop - self._start < 2:
            self._more()
        if not self._buffer.startswith(b"\r\n", self._start):
            raise StreamError("a string reply does not end where its size says")
        self._start += 2

    def skip_part(self, size: int, scratch: memoryview) -> None:
        """The next ``size`` bytes of a string reply, which nobody wants; overwrites ``scratch``."""
        while size:
            self.read_part(scratch[:size])
            size -= min(size, len(scratch))

    def _settle(self) -> None:
        if self.preface:
            self._owed += 1
        while self._owed:
            self._note(self._reply())
            self._owed -= 1

    def _note(self, reply: Reply) -> Reply:
        self.replies += 1
        if isinstance(reply, ErrorReply):
            self.error_codes.append(reply.code)
        return reply

    def _reply(self, depth: int = 0) -> Reply:
        return self._reply_from(self._line(), depth)

    def _reply_from(self, line: bytes, depth: int = 0) -> Reply:
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
        self.read_part(memoryview(data))
        self.end_bulk()
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
        if held:
            self._buffer[:held] = self._buffer[self._start : self._stop]
        self._start, self._stop = 0, held
        self._stop += self._receive([self._view[held:]])

    def _receive(self, targets: list[memoryview]) -> int:
        """Bytes received, at least one; without TLS, as many as two or more targets hold."""
        self._arm()
        try:
            if len(targets) == 1:
                count = self._sock.recv_into(targets[0])
            elif self._encrypted:
                count = self._sock.recv_into(next(filter(len, targets)))
            else:
                count = self._sock.recvmsg_into(targets, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("the server did not answer in time") from None
        if count == 0:
            raise ConnectionError("the server closed the connection")
        return count

    def _arm(self) -> None:
        """Let the next system call wait no longer than the deadline."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError("the deadline passed before the server was done")
        if -_REARM_SECONDS < left - self._armed_seconds < _REARM_SECONDS:
            return
        self._armed_seconds = left = max(left, _SHORTEST_TIMEOUT_SECONDS)
        if self._encrypted:
            self._sock.settimeout(left)
        else:
            # Timeouts of the kernel's, on a blocking socket: it then waits for all that was asked
            # for in one system call, where Python would poll before each of several.
            timeval = _TIMEVAL.pack(int(left), int(left % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _drop_front(views: list[memoryview], count: int) -> None:
    """Take ``count`` bytes off the front of the views."""
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise StreamError(f"got {line[:32]!r}, expected a number; is this a Redis server?") from None


def _error(line: bytes) -> ErrorReply:
    message = line[1:].decode("utf-8", "replace")
    return ErrorReply(message.partition(" ")[0], message)
