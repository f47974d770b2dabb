"""The yardstick of ``redis_tier.py``: the same commands over a bare socket, and nothing else done."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.tiers.base import Payload
from kvstore.tiers.redis_wire import bulk_string

# The same pipelining as the tier's: so many bytes, or blocks, are asked for and not yet read.
_WINDOW_BYTES = 2 * 2**20
_WINDOW_BLOCKS = 64
_OK = b"+OK\r\n"
_EXPIRY = b"\r\n$2\r\nPX\r\n$8\r\n86400000\r\n"


class BareSocket:
    """One connection. Sizes of replies are known beforehand: nothing is parsed, no content checked."""

    def __init__(self, address: tuple[str, int] | Path) -> None:
        if isinstance(address, Path):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(address))
        else:
            self._socket = socket.create_connection(address)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def get(self, keys: Sequence[bytes], header_bytes: int, destinations: Sequence[Payload]) -> None:
        """Values of one size, each in one system call: its head and its end beside, its payload in place."""
        size = len(destinations[0])
        head = bytearray(len(b"$%d\r\n" % (header_bytes + size)) + header_bytes)
        end = bytearray(2)
        ahead, asked = _window(size), 0
        for done, destination in enumerate(destinations):
            if asked - done <= ahead // 2 and asked < len(keys):
                upto = min(done + ahead, len(keys))
                self._socket.sendall(b"".join(map(_get, keys[asked:upto])))
                asked = upto
            got, *_ = self._socket.recvmsg_into([head, destination.data, end], 0, socket.MSG_WAITALL)
            assert got == len(head) + size + len(end), got

    def set(self, keys: Sequence[bytes], headers: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        """Values with their time to live; a batch is under way while the one before is answered."""
        batch = max(1, _window(len(payloads[0])) // 2)
        unanswered = 0
        for start in range(0, len(keys), batch):
            pieces: list[memoryview] = []
            for key, header, payload in zip(
                keys[start : start + batch],
                headers[start : start + batch],
                payloads[start : start + batch],
                strict=True,
            ):
                size = len(header) + len(payload)
                lead = b"*5\r\n$3\r\nSET\r\n%b$%d\r\n%b" % (bulk_string(key), size, header)
                pieces += [memoryview(lead), payload.data, memoryview(_EXPIRY)]
            self._send_all(pieces)
            self._take(len(_OK) * unanswered)
            unanswered = len(keys[start : start + batch])
        self._take(len(_OK) * unanswered)

    def ask(self, command: bytes, reply: bytes) -> None:
        """A command whose reply is known."""
        self.send(command)
        self.expect(reply)

    def send(self, command: bytes) -> None:
        """Commands, made beforehand."""
        self._socket.sendall(command)

    def expect(self, reply: bytes) -> None:
        """Replies that are known; none may be due."""
        got = self._socket.recv(len(reply), socket.MSG_WAITALL) if reply else b""
        assert got == reply, (got, reply)

    def _send_all(self, pieces: list[memoryview]) -> None:
        while pieces:
            sent = self._socket.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][sent:]

    def _take(self, size: int) -> None:
        if size:
            got = self._socket.recv(size, socket.MSG_WAITALL)
            assert got == _OK * (size // len(_OK)), got


def exists_command(keys: Sequence[bytes]) -> bytes:
    """One variadic EXISTS."""
    return b"*%d\r\n$6\r\nEXISTS\r\n" % (1 + len(keys)) + b"".join(map(bulk_string, keys))


def _window(size: int) -> int:
    return min(max(2, _WINDOW_BYTES // size), _WINDOW_BLOCKS)


def _get(key: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n" + bulk_string(key)
