"""What servers do before gRPC listens: it tells little of what is wrong, and in lines of its own."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import grpc

from kvstore.address import Address
from kvstore.errors import ConfigError


def require_free_port(address: Address) -> None:
    """ConfigError where the port of ``address``, which is a host and a port, cannot be listened on."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of a server that has just ended are nobody's.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror or error}; stop what uses it, or choose another "
            "in listen"
        ) from error


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """TLS, mutual where a CA for clients is given. ConfigError where a file is not what it should be."""
    ca = None if client_ca is None else _read("tls_client_ca", client_ca)
    pair = (_read("tls_key", key), _read("tls_cert", cert))
    # gRPC finds out when it listens, and then says nothing of the files.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
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
