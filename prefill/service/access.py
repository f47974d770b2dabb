"""What a worker shows and asks for at its doors: its key, and certificates, read from their files."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.errors import ConfigError
from kvstore.service.client.channel import credentials_of
from kvstore.service.client.options import TLS
from kvstore.service.listening import server_credentials
from prefill.config import ServeConfig
from prefill.service.web_server import WebTLS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """None in place of each that there is not. ``peers`` is for the workers that prefill for this one."""

    key: str | None
    rpc: grpc.ServerCredentials | None
    web: WebTLS | None
    peers: grpc.ChannelCredentials | None


def read_access(serve: ServeConfig) -> Access:
    """Read the files. ConfigError names the one that is not what it should be.

    What may be read on the way to another machine is warned of: its network may be protected otherwise.
    """
    key = None if serve.api_key_file is None else _read_key(serve.api_key_file)
    _warn_of_open_ways(serve, key)
    if serve.tls_cert is None or serve.tls_key is None:
        return Access(key, None, None, _peer_credentials(serve))
    files = serve.tls_cert, serve.tls_key, serve.tls_client_ca
    return Access(key, server_credentials(*files), WebTLS(*files), _peer_credentials(serve))


def _peer_credentials(serve: ServeConfig) -> grpc.ChannelCredentials | None:
    """A worker shows those that prefill for it the certificate that it shows its clients."""
    authority = serve.prefill_tls_ca
    if authority is None:
        return None
    credentials = credentials_of(TLS(authority, serve.tls_cert, serve.tls_key))
    try:
        # gRPC would find out at the first call, and call it a connection that failed.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(authority)
    except ssl.SSLError as error:
        raise ConfigError(
            f"prefill_tls_ca {authority} holds no certificate in PEM: {error.reason or error}; correct it"
        ) from error
    return credentials


def _read_key(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}; correct the path") from error
    key = lines[0].strip() if lines else ""
    if not key:
        raise ConfigError(f"api_key_file {path} has no key in its first line; write one there")
    if not (key.isascii() and key.isprintable()):
        # A header holds no more: nobody could send it.
        raise ConfigError(
            f"api_key_file {path} holds more than printable ASCII in its first line; choose another key"
        )
    return key


def _warn_of_open_ways(serve: ServeConfig, key: str | None) -> None:
    doors = (*serve.listen, *([] if serve.http is None else [serve.http]))
    if serve.tls_cert is None and not all(door.is_of_this_machine for door in doors):
        _log.warning(
            "other machines can reach %s; without tls_cert keys, prompts and answers are sent in the clear",
            ", ".join(map(str, doors)),
        )
    if key and serve.prefill_tls_ca is None and not all(each.is_of_this_machine for each in serve.prefill_at):
        _log.warning(
            "the key and the prompts go to %s in the clear; set prefill_tls_ca here, and tls_cert there",
            ", ".join(map(str, serve.prefill_at)),
        )
