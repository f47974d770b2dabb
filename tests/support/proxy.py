"""A proxy before a real server, that delays or cuts off what the server says."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self


class Fault(Enum):
    """What happens to a connection once the server has said as much as it may."""

    CLOSE = "close"
    HALF_CLOSE = "half close"
    STALL = "stall"


@dataclass(frozen=True)
class Behaviour:
    """``piece_bytes`` at a time go from server to client, each after ``delay_seconds``."""

    delay_seconds: float = 0.0
    piece_bytes: int = 65536
    bytes_before_fault: int | None = None
    fault: Fault = Fault.CLOSE


class Proxy:
    """Forwards connections on ``port`` to another port of this machine, as ``behaviour`` says."""

    def __init__(self, target_port: int, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Only shutdown wakes a thread that waits in accept or recv.
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            pumps = [
                threading.Thread(target=self._commands, args=(client, server)),
                threading.Thread(target=self._replies, args=(server, client)),
            ]
            self._threads += pumps
            for pump in pumps:
                pump.start()

    def _commands(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _replies(self, server: socket.socket, client: socket.socket) -> None:
        left = self.behaviour.bytes_before_fault
        with suppress(OSError):
            while data := server.recv(self.behaviour.piece_bytes):
                time.sleep(self.behaviour.delay_seconds)
                if left is not None and len(data) >= left:
                    client.sendall(data[:left])
                    if self.behaviour.fault is Fault.CLOSE:
                        client.shutdown(socket.SHUT_RDWR)
                    elif self.behaviour.fault is Fault.HALF_CLOSE:
                        client.shutdown(socket.SHUT_WR)
                    return
                client.sendall(data)
                left = None if left is None else left - len(data)
            client.shutdown(socket.SHUT_WR)
