"""What servers do before gRPC listens: it tells little of what is wrong, and in lines of its own."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from kvstore.address import Address
from kvstore.errors import ConfigError

_Found: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def require_free_port(address: Address) -> None:
    """ConfigError where the port of ``address``, which is a host and a port, cannot be listened on."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        missing = [error for error in map(_missing, found) if error is not None]
        # A name such as localhost may stand for ::1, too, on a machine without IPv6.
        if len(missing) == len(found):
            raise missing[0]
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror or error}; stop what uses it, or choose another "
            "in listen"
        ) from error


def _missing(found: _Found) -> OSError | None:
    """Why this machine has no such place; None where it can be listened on. OSError where it is taken."""
    family, kind, protocol, _, place = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of a server that has just ended are nobody's.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return error
    return None


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """TLS, mutual where a CA for clients is given. ConfigError where a file is not what it should be."""
    ca = None if client_ca is None else _read("tls_client_ca", client_ca)
    pair = (_read("tls_key", key), _read("tls_cert", cert))
    # gRPC finds out when it listens, and then says nothing of the files.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without an answer OpenSSL asks for a password on the terminal, or fails where there is none.
        context.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert {cert} and tls_key {key} are no certificate with its private key, in PEM, without a "
            f"password: {error.reason or error}; correct one of them"
        ) from error
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_client_ca {client_ca} holds no certificate in PEM: {error.reason or error}; correct it"
        ) from error
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field} {path} cannot be read: {error.strerror}; correct the path") from error
