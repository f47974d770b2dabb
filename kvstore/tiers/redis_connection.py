"""redis-py's connections, with our ``Wire`` as the only reader of their sockets.

redis-py knows how to reach a server: URL, addresses, TLS, AUTH, SELECT. It reads the replies to that
handshake through the wire, as its parser: so no byte is ever left behind in a second buffer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from redis import Connection, SSLConnection, UnixDomainSocketConnection
from redis.connection import AbstractConnection, DefaultParser, parse_url
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvstore.config import mask_url
from kvstore.errors import ConfigError
from kvstore.tiers.redis_wire import Clock, ErrorReply, Wire

# redis-py annotates few of its functions; the types of those that we call are stated here and below.
_parse_url: Callable[[str], dict[str, Any]] = parse_url
_parse_error: Callable[[str], RedisError] = DefaultParser.parse_error


class ServerRefusedError(ConnectionError):
    """The server was reached and did not let us in: a wrong password, user, database or address."""


class WireParser:
    """What redis-py asks of a parser, answered by the connection's wire."""

    def __init__(self, socket_read_size: int) -> None:
        self._wire: Wire | None = None

    def on_connect(self, connection: WiredConnection) -> None:
        self._wire = connection.wire

    def on_disconnect(self) -> None:
        self._wire = None

    def can_read(self, timeout: float = 0) -> bool:
        return self._wire is not None and not self._wire.is_fit()

    def read_response(self, disable_decoding: object = None, timeout: object = None) -> object:
        """The next reply of the handshake. Its deadline is the wire's; strings stay bytes."""
        if self._wire is None:
            raise ConnectionError("not connected")
        reply = self._wire.read_reply()
        if not isinstance(reply, ErrorReply):
            return reply
        error = _parse_error(reply.message)
        if isinstance(error, ResponseError):
            return error
        # The rest, such as "max number of clients reached", is about the connection, not a command.
        raise error


class WiredConnection(AbstractConnection):
    """Mixed in before a connection class of redis-py: makes a wire of each socket that it opens."""

    wire: Wire

    def __init__(self, *, clock: Clock, **settings: Any) -> None:  # noqa: ANN401  redis-py's own keywords
        self._clock = clock
        self._handshake_deadline = 0.0
        super().__init__(**settings)

    @property
    def place(self) -> str:
        """Host and port, or path: what to call the server in a message."""
        place: Callable[[], str] = self._host_error
        return place()

    def open(self, deadline: float) -> Wire:
        """Connect and authenticate, once.

        Raises TimeoutError, ServerRefusedError or ConnectionError; nothing stays open then. What
        the operating system does on its own, such as resolving a name, may outlast the deadline.
        """
        self._handshake_deadline = deadline
        connect: Callable[[], None] = self.connect
        try:
            connect()
        except RedisTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except (AuthenticationError, ResponseError, ValueError) as error:
            raise ServerRefusedError(str(error)) from error
        except RedisError as error:
            raise ConnectionError(str(error)) from error
        return self.wire

    def shut(self) -> None:
        """Close the socket, if one is open. Does not wait for the server."""
        disconnect: Callable[[], None] = self.disconnect
        disconnect()

    def set_parser(self, parser_class: object) -> None:
        # Whatever redis-py would choose: nothing else may read from this socket.
        self._parser = WireParser(self._socket_read_size)

    def _connect(self) -> socket.socket:
        # Abstract only by name: a concrete class of redis-py follows in the method resolution order.
        connect: Callable[[], socket.socket] = super()._connect  # type: ignore[safe-super]
        sock = connect()
        self.wire = Wire(sock, self._clock, self._handshake_deadline)
        return sock


class TcpConnection(WiredConnection, Connection):
    """``redis://``."""


class TlsConnection(WiredConnection, SSLConnection):
    """``rediss://``."""


class UnixConnection(WiredConnection, UnixDomainSocketConnection):
    """``unix://``."""


_WIRED: dict[object, Callable[..., WiredConnection]] = {
    Connection: TcpConnection,
    SSLConnection: TlsConnection,
    UnixDomainSocketConnection: UnixConnection,
}


def connections_to(url: str, clock: Clock, connect_timeout_seconds: float) -> Callable[[], WiredConnection]:
    """A maker of connections, not yet open, to the server of a URL that redis-py understands."""
    expected = "expected what redis-py reads, such as redis://host:6379/0, rediss://host or unix:///path"
    settings: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": connect_timeout_seconds,
        "socket_timeout": connect_timeout_seconds,
    }
    try:
        settings |= _parse_url(url)
        wired = _WIRED[settings.pop("connection_class", Connection)]
        if settings["protocol"] != 2:
            raise ValueError("protocol=3 is not supported, the bulk reader speaks RESP2: leave it out")
        wired(clock=clock, **settings)
    except (ValueError, TypeError, RedisError) as error:
        # The parser quotes what it stumbled over, which may be a part of the password.
        reason = "is what is special in user and password percent-encoded?" if "@" in url else error
        raise ConfigError(f"redis URL {mask_url(url)} is malformed ({reason}), {expected}") from None
    return lambda: wired(clock=clock, **settings)
