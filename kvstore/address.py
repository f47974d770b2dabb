"""Where a server listens."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
_UNIX = "unix:"
_UNIX_PATH_BYTES_MAX = 107
"""What ``struct sockaddr_un`` of Linux has room for, its closing zero aside."""

_TCP = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]*)):(?P<port>\d{1,5})", re.ASCII)
_EXPECTED = "expected unix:/absolute/path, host:port, or :port for the loopback interface"


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket's ``path``, or a ``host`` and a ``port``; port 0 stands for any free one.

    ``str`` gives it as gRPC takes it.
    """

    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_of_this_machine(self) -> bool:
        """Whether no other machine can reach it. A host name other than localhost may be anybody's."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """One address; ValueError says what would fit."""
    if text.startswith(_UNIX):
        path = Path(text.removeprefix(_UNIX))
        if not path.is_absolute() or len(os.fsencode(path)) > _UNIX_PATH_BYTES_MAX:
            raise ValueError(
                f"expected an absolute path of at most {_UNIX_PATH_BYTES_MAX} bytes after unix:, not {path}"
            )
        return Address(path=path)
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 0xFFFF:
        raise ValueError(f"{_EXPECTED}, not {text!r}")
    if match["ip6"] is not None:
        try:
            ipaddress.IPv6Address(match["ip6"])
        except ValueError as error:
            raise ValueError(f"{_EXPECTED}; {match['ip6']!r} in brackets is no IPv6 address") from error
    return Address(host=match["ip6"] or match["host"] or LOOPBACK, port=int(match["port"]))


def parse_addresses(value: object) -> tuple[Address, ...]:
    """One or more addresses with commas between them; ValueError says what would fit."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, str):
        raise ValueError("expected addresses with commas between them, such as unix:/run/kvstore.sock,:9471")
    addresses = tuple(parse_address(part.strip()) for part in value.split(","))
    for place, address in enumerate(addresses):
        gets_its_own_port = address.path is None and address.port == 0
        if address in addresses[:place] and not gets_its_own_port:
            raise ValueError(f"expected each address once; leave one {address} out")
    return addresses


def parse_tcp_address(value: object) -> Address | None:
    """A host and a port, or none; ValueError says what would fit."""
    if value is None or value == "none":
        return None
    if isinstance(value, Address):
        return value
    address = parse_address(value) if isinstance(value, str) else None
    if address is None or address.path is not None:
        raise ValueError("expected host:port, :port for the loopback interface, or none")
    return address


def format_addresses(addresses: tuple[Address, ...] | Address | None) -> str:
    """What ``parse_addresses`` and ``parse_tcp_address`` read."""
    if addresses is None:
        return "none"
    return ",".join(map(str, addresses)) if isinstance(addresses, tuple) else str(addresses)
