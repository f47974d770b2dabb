"""redis-py's connections, with our ``Wire`` as the only reader of their sockets.

redis-py knows how to reach a server: URL, addresses, TLS, AUTH, SELECT. It reads the replies to that
handshake through the wire, as its parser: so no byte is ever left behind in a second buffer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

from redis import Connection, SSLConnection, UnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.cluster import parse_cluster_slots
from redis.connection import AbstractConnection, DefaultParser, parse_url
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvstore.config import mask_url
from kvstore.errors import ConfigError
from kvstore.tiers.redis_wire import Clock, ErrorReply, Reply, StreamError, Wire

# redis-py annotates few of its functions; the types of those that we call are stated here and below.
_parse_url: Callable[[str], dict[str, Any]] = parse_url
_parse_error: Callable[[str], RedisError] = DefaultParser.parse_error
_parse_slots: Callable[..., dict[tuple[int, int], dict[str, Any]]] = parse_cluster_slots
_key_slot: Callable[[bytes], int] = key_slot
_new_sentinel: Callable[..., Any] = Sentinel


class ServerRefusedError(ConnectionError):
    """The server was reached and did not let us in: a wrong password, user, database or address."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


class Sentinels:
    """Those who know which server is the primary of a service. Thread-safe, and keeps nothing open."""

    def __init__(self, service: str, addresses: Sequence[Address], settings: dict[str, Any]) -> None:
        self.service = service
        self._addresses = list(addresses)
        self._settings = settings

    def primary(self) -> Address:
        """Who it is now, by the first sentinel that knows; that one is asked first from then on."""
        troubles = []
        addresses = self._addresses
        for address in addresses:
            sentinel = _new_sentinel([address], sentinel_kwargs=self._settings)
            try:
                with sentinel:
                    found = Address(*sentinel.discover_master(self.service))
            except RedisError as error:
                troubles.append(f"{address.host}:{address.port}: {error}")
                continue
            self._addresses = sorted(addresses, key=address.__ne__)
            return found
        raise ConnectionError(f"no sentinel names a primary: {'; '.join(troubles)}")


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

    def __init__(
        self,
        *,
        clock: Clock,
        sentinels: Sentinels | None = None,
        **settings: Any,  # noqa: ANN401  redis-py's own keywords
    ) -> None:
        self._clock = clock
        self._sentinels = sentinels
        self._handshake_deadline = 0.0
        super().__init__(**settings)

    @property
    def place(self) -> str:
        """Host and port, path, or the service that sentinels watch: what to call it in a message."""
        if self._sentinels is not None:
            return self._sentinels.service
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
            if self._sentinels is not None:
                self.host, self.port = self._sentinels.primary()
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


class ServerKind(Enum):
    """What stands behind the addresses of a URL. The value is what follows the + in its scheme."""

    SINGLE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_DEFAULT_PORTS = {ServerKind.SINGLE: 6379, ServerKind.SENTINEL: 26379, ServerKind.CLUSTER: 6379}


@dataclass(frozen=True)
class Servers:
    """What a URL says: how to make connections, not yet open, and the addresses that it lists."""

    kind: ServerKind
    addresses: tuple[Address, ...]
    _wired: Callable[..., WiredConnection]
    _settings: dict[str, Any]

    def connection(self, address: Address | None) -> WiredConnection:
        """A connection to the server at an address; None is the one that the URL names."""
        place = {} if address is None else address._asdict()
        return self._wired(**self._settings | place)


def read_url(url: str, clock: Clock, connect_timeout_seconds: float) -> Servers:
    """What a URL of redis-py means, or one that lists the hosts of sentinels or of a cluster."""
    expected = "expected what redis-py reads, such as redis://host:6379/0, rediss://host or unix:///path, or "
    expected += "redis+sentinel://host:26379,host:26379/service or redis+cluster://host:6379,host:6379"
    timeouts = dict.fromkeys(("socket_connect_timeout", "socket_timeout"), connect_timeout_seconds)
    try:
        kind, urls, service = _split_url(url)
        parsed = [{"protocol": 2, **timeouts, **_parse_url(each)} for each in urls]
        settings = parsed[0]
        if settings["protocol"] != 2:
            raise ValueError("protocol=3 is not supported, the bulk reader speaks RESP2: leave it out")
        if "ssl_keyfile" in settings and "ssl_certfile" not in settings:
            raise ValueError("ssl_keyfile belongs to an ssl_certfile: add that")
        default_port = _DEFAULT_PORTS[kind]
        addresses = tuple(
            Address(str(each.get("host", "localhost")), int(each.get("port", default_port)))
            for each in parsed
        )
        if kind is ServerKind.SENTINEL:
            settings["sentinels"] = Sentinels(service, addresses, _take_sentinel_settings(settings))
        if kind is ServerKind.CLUSTER and settings.get("db"):
            raise ValueError("a cluster has no databases but 0: leave it out")
        wired = _WIRED[settings.pop("connection_class", Connection)]
        servers = Servers(kind, addresses, partial(wired, clock=clock), settings)
        servers.connection(None)
    except (ValueError, TypeError, RedisError) as error:
        # The parser quotes what it stumbled over, which may be a part of the password.
        reason = "is what is special in user and password percent-encoded?" if "@" in url else error
        raise ConfigError(f"redis URL {mask_url(url)} is malformed ({reason}), {expected}") from None
    return servers


def _split_url(url: str) -> tuple[ServerKind, list[str], str]:
    """(kind, a URL for each host that redis-py can read, the service that sentinels watch)."""
    scheme, separator, rest = url.partition("://")
    base, plus, suffix = scheme.partition("+")
    kind = ServerKind(suffix) if plus else ServerKind.SINGLE
    if kind is ServerKind.SINGLE:
        return kind, [url], ""
    if base not in {"redis", "rediss"}:
        raise ValueError(f"{base}+{suffix} is no scheme")
    place, question, query = rest.partition("?")
    login, at, place = place.rpartition("@")
    hosts, _, path = place.partition("/")
    service = unquote(path.strip("/"))
    if (kind is ServerKind.SENTINEL) != bool(service) or not all(hosts.split(",")):
        raise ValueError("sentinels need the name of the service that they watch, a cluster has none")
    urls = [f"{base}{separator}{login}{at}{host}{question}{query}" for host in hosts.split(",")]
    return kind, urls, service


def _take_sentinel_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for the sentinels themselves: TLS and times as for the server, and what is said of them."""
    prefix = "sentinel_"
    own = {name.removeprefix(prefix): settings.pop(name) for name in [*settings] if name.startswith(prefix)}
    common = {name: value for name, value in settings.items() if name.startswith(("socket_", "ssl_"))}
    secure = settings.get("connection_class") is SSLConnection
    return {**common, "ssl": secure, "protocol": 2, "retry": Retry(NoBackoff(), 0), **own}


class SlotRange(NamedTuple):
    """Hash slots from ``first`` to ``last`` of a cluster, and who has them."""

    first: int
    last: int
    primary: Address
    replicas: list[Address]


def read_slots(reply: list[Reply], host: str) -> list[SlotRange]:
    """A reply to CLUSTER SLOTS; ``host`` is where the node was found that gave it.

    Raises StreamError where it is none.
    """
    try:
        ranges = _parse_slots(reply, current_host=host)
        return [
            SlotRange(first, last, Address(*nodes["primary"]), [Address(*each) for each in nodes["replicas"]])
            for (first, last), nodes in ranges.items()
        ]
    except (TypeError, ValueError, IndexError) as error:
        raise StreamError(f"got no ranges of hash slots ({error}); is this a Redis Cluster?") from error


def slot_of(tag: bytes) -> int:
    """The hash slot of a key with this segment tag."""
    return _key_slot(tag.hex().encode())
