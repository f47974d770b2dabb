"""From the options that name a server to a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvstore.address import Address, parse_address
from kvstore.commands.options import ServerOptions
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.quantity import parse_seconds
from kvstore.service.client.options import TLS, CallError, Outcome
from kvstore.service.operator import Operator

_TLS_HINTS: Mapping[str, str] = {
    "Socket closed": "where it speaks TLS, add --tls, or --tls-ca with the authority that it has",
    "CERTIFICATE_VERIFY_FAILED": "name the authority of its certificate with --tls-ca",
    "WRONG_VERSION_NUMBER": "it does not speak TLS; leave the TLS options out",
}
"""By words of gRPC's account of a failed connection, which says nothing of what was expected there."""


@contextmanager
def connect(options: ServerOptions, load: Callable[[], Config]) -> Iterator[Operator]:
    """The server that ``options`` name, or else the one that is configured on this machine.

    ``load`` is called only where the options name none: who asks another machine's server need not
    have its settings. A CallError that leaves the context names the option to change, where one helps.
    """
    with _operator(options, load) as operator:
        try:
            yield operator
        except CallError as error:
            hint = _hint(error, options)
            if hint is None:
                raise
            raise CallError(error.outcome, f"{error}; {hint}", error.silence) from error


def _hint(error: CallError, options: ServerOptions) -> str | None:
    if error.outcome is Outcome.REJECTED:
        if options.token_file is None:
            return "--token-file names the file that holds the token"
        return f"the token was the first line of --token-file {options.token_file}"
    if error.outcome is Outcome.UNREACHABLE:
        return next((hint for word, hint in _TLS_HINTS.items() if word in str(error)), None)
    return None


def _operator(options: ServerOptions, load: Callable[[], Config]) -> Operator:
    if options.address is not None:
        address, secure = _parse_address(options.address), options.tls
    else:
        config = load()
        address = _first_address(config)
        secure = options.tls or (config.tls_cert is not None and address.path is None)
    return Operator(
        str(address),
        token=None if options.token_file is None else _read_token(options.token_file),
        tls=_tls(options, address, secure=secure),
        timeout_seconds=seconds_of("--timeout", options.timeout),
    )


def seconds_of(option: str, text: str) -> float:
    """The duration that an option names."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}, {error}") from error


def _parse_address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ConfigError(f"--address is {text!r}: {error}") from error


def _first_address(config: Config) -> Address:
    address = config.listen[0]
    if address.path is None and address.port == 0:
        raise ConfigError(
            f"listen begins with {address}, whose port the server chooses when it starts; give --address "
            "with the one that it printed"
        )
    return address


def _tls(options: ServerOptions, address: Address, *, secure: bool) -> TLS | None:
    tls = TLS(options.tls_ca, options.tls_cert, options.tls_key)
    if tls == TLS() and not secure:
        return None
    if address.path is not None:
        raise ConfigError(f"{address} is a unix socket, which has no TLS; leave the TLS options out")
    return tls


def _read_token(path: Path) -> str:
    """The first line: the server's own file of a tenant may hold two tokens while one replaces the other."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {path} cannot be read ({error}); name a file with the token"
        ) from error
    token = next((line.strip() for line in lines if line.strip()), "")
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"--token-file {path} holds no token, expected a line of text without spaces")
    return token
