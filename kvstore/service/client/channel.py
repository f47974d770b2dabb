"""Channels to the server, and what its statuses mean for the caller."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc

from kvstore.address import Address, parse_address
from kvstore.errors import ConfigError, KVStoreError
from kvstore.service.client.options import TLS, CallError, Outcome, Silence
from kvstore.service.codec import MESSAGE_BYTES

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_Request = TypeVar("_Request")
_Call = TypeVar("_Call")

_KEEPALIVE_SECONDS = 30.0
_KEEPALIVE_TIMEOUT_SECONDS = 5.0
_OUTCOMES = {
    grpc.StatusCode.UNAUTHENTICATED: Outcome.REJECTED,
    grpc.StatusCode.PERMISSION_DENIED: Outcome.REJECTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.REFUSED,
}
_SILENCES = {
    grpc.StatusCode.UNAVAILABLE: Silence.AWAY,
    grpc.StatusCode.DEADLINE_EXCEEDED: Silence.LATE,
}
_STALE = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
_WRONG = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.ALREADY_EXISTS)


class StaleError(Exception):
    """The server does not have what the call names: it has restarted, or the lease or write is over.

    ``error`` is what to raise where that is the caller's mistake.
    """

    def __init__(self, error: KVStoreError) -> None:
        super().__init__(str(error))
        self.error = error


def open_channel(
    address: str, token: str | None, tls: TLS | None, *, reconnect_seconds: float = 1.0
) -> grpc.Channel:
    """A channel that sends ``token`` with every call and connects by itself, at first and again.

    ConfigError where a file of ``tls`` cannot be read, and as ``require_trustworthy``.
    """
    require_trustworthy(address, token, tls)
    options = _channel_options(reconnect_seconds)
    credentials = credentials_of(tls)
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    return channel if token is None else grpc.intercept_channel(channel, _Bearer(bearer(token)))


def open_aio_channel(
    address: str, credentials: grpc.ChannelCredentials | None, *, reconnect_seconds: float = 1.0
) -> grpc.aio.Channel:
    """``open_channel`` for asyncio, of the running loop; the caller adds ``bearer`` to each call."""
    options = _channel_options(reconnect_seconds)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def bearer(token: str | None) -> Metadata:
    """The metadata that a token is sent as; ConfigError where it cannot be sent."""
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the token holds more than printable ASCII; take it as it was given out, without newlines"
        )
    return () if token is None else (("authorization", f"Bearer {token}"),)


def require_trustworthy(address: str, token: str | None, tls: TLS | None) -> None:
    """ConfigError where a call would hand its token or prompt to strangers.

    That is a token in the clear to another machine, or a unix socket of another user: folders such
    as /dev/shm belong to everybody, and whoever comes first has the name.
    """
    parsed = parse_address(address)
    if token is not None and tls is None and not parsed.is_of_this_machine:
        raise ConfigError(
            f"a token is given for {address}, which may be another machine, and no TLS: it would be sent in "
            "the clear; give TLS, or an address of this machine such as unix:<path> or 127.0.0.1:<port>"
        )
    complaint = complaint_of_owner(parsed)
    if complaint is not None:
        raise ConfigError(complaint)


def complaint_of_owner(address: Address) -> str | None:
    """What is wrong with the owner of a unix socket; None where nothing is, or there is no socket."""
    if address.path is None:
        return None
    try:
        owner = os.lstat(address.path).st_uid
    except OSError:
        return None
    ours = os.geteuid()
    if owner in (0, ours):
        return None
    return (
        f"{address} belongs to user {owner}, expected {ours}, who runs this, or root; run the server as "
        "this user, with an address in a folder that only this user may write to"
    )


def explain(error: grpc.RpcError, what: str, raised: type[KVStoreError]) -> Exception:
    """What a status means: CallError, StaleError, or ``raised`` where the request itself is wrong.

    ``what`` names the call and the server in the message.
    """
    code, details = error.code(), error.details() or "no details"
    if code in _WRONG:
        return raised(details)
    if code in _STALE:
        return StaleError(raised(details))
    outcome = _OUTCOMES.get(code, Outcome.UNREACHABLE)
    silence = _SILENCES.get(code, Silence.FAILED) if outcome is Outcome.UNREACHABLE else None
    return CallError(outcome, f"{what}: {details} ({code.name})", silence)


def _channel_options(reconnect_seconds: float) -> Sequence[tuple[str, int]]:
    backoff = max(100, int(reconnect_seconds * 1000))
    return (
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", min(100, backoff)),
        ("grpc.max_reconnect_backoff_ms", backoff),
        # Otherwise clients of one process share a connection, and with it the back-off of the others.
        ("grpc.use_local_subchannel_pool", 1),
        # A sidecar is never behind the proxy that http_proxy names.
        ("grpc.enable_http_proxy", 0),
        # Only while a call is open: a stream of events has no deadline, and a dead host no RST.
        ("grpc.keepalive_time_ms", int(_KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", int(_KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 0),
    )


def credentials_of(tls: TLS | None) -> grpc.ChannelCredentials | None:
    """What a secure channel needs; ConfigError where a file cannot be read."""
    if tls is None:
        return None
    if (tls.cert is None) != (tls.key is None):
        raise ConfigError(f"TLS has cert {tls.cert} and key {tls.key}; give both, or neither")
    return grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the TLS file {path}: {error.strerror}; correct the path") from error


class _CallDetails(grpc.ClientCallDetails):
    """The details of a call, with more metadata."""

    def __init__(self, details: grpc.ClientCallDetails, metadata: Metadata) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = (*(details.metadata or ()), *metadata)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _Bearer(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor
):
    """Adds the token to each call."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, _Request], _Call],
        client_call_details: grpc.ClientCallDetails,
        request: _Request,
    ) -> _Call:
        return continuation(_CallDetails(client_call_details, self._metadata), request)

    intercept_unary_stream = intercept_unary_unary

    def intercept_stream_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, _Request], _Call],
        client_call_details: grpc.ClientCallDetails,
        request_iterator: _Request,
    ) -> _Call:
        return continuation(_CallDetails(client_call_details, self._metadata), request_iterator)
