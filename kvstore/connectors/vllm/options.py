"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.service.client import TLS, AroundMapping, Client, ClientOptions

_SECONDS = ("lookup_seconds", "redis_seconds", "rpc_seconds", "transfer_seconds")


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The connector's settings. A duration is in seconds."""

    address: str = "unix:/dev/shm/prefix-kvstore.sock"
    """The sidecar: unix:<path> or host:port."""
    token_file: str | None = None
    """File with the tenant's token; command lines and configurations are no place for one."""
    tls_ca: str | None = None
    """PEM file with the authorities that the server's certificate may come from."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """PEM files of the engine's own certificate, where the server asks for one."""
    map_pool: bool = True
    """Copy through the sidecar's shared memory where it can be mapped; false streams always."""
    asynchronous_loads: bool = True
    """Load while other requests run; false loads before the step that needs the blocks."""
    lookup_seconds: float = 1.0
    """A request that has waited so long to hear what is cached is computed instead."""
    redis_seconds: float = 0.5
    """The longest that the sidecar waits for blocks that are on their way from Redis."""
    rpc_seconds: float = 1.0
    """The longest that a call waits for an answer, beside that."""
    transfer_seconds: float = 5.0
    """The longest that one streamed load or save takes."""
    request_hints: bool = True
    """Whether requests may say of their own future what ``kv_transfer_params`` holds (docs/vllm.md)."""
    model: str | None = None
    """Name of the model in the store; engines that are to share blocks give the same one."""
    weights_id: str | None = None
    """Revision of the weights; None takes the hub's revision, or digests the files of a local folder."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ConnectorOptions:
        """Options from a configuration; ConfigError for a name or a type that is none of them."""
        known = {field.name: field for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                near = get_close_matches(name, known, 1, 0.5)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"kv_connector_extra_config has no option {name!r}; {hint}")
            _check(name, value, getattr(cls(), name))
        return cls(**given)

    def open_client(self, around_mapping: AroundMapping | None = None, *, populate: bool = True) -> Client:
        """A client of the sidecar; ConfigError where a file cannot be read.

        ``around_mapping`` and ``populate`` as in ``ClientOptions``.
        """
        tls = None
        if self.tls_ca or self.tls_cert or self.tls_key:
            tls = TLS(*(None if path is None else Path(path) for path in self._tls_files))
        options = ClientOptions(
            rpc_seconds=self.rpc_seconds,
            transfer_seconds=self.transfer_seconds,
            map_pool=self.map_pool,
            around_mapping=around_mapping,
            populate=populate,
        )
        return Client(self.address, token=self._token(), tls=tls, options=options)

    @property
    def _tls_files(self) -> tuple[str | None, str | None, str | None]:
        return self.tls_ca, self.tls_cert, self.tls_key

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            return Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the token in {self.token_file}: {error}; name a file that holds nothing else"
            ) from error


def _check(name: str, value: object, default: object) -> None:
    if name in _SECONDS:
        right = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        expected = "a number of seconds above 0"
    elif isinstance(default, bool):
        right, expected = isinstance(value, bool), "true or false"
    else:
        right, expected = isinstance(value, str) and bool(value), "a non-empty string"
    if not right:
        raise ConfigError(
            f"kv_connector_extra_config has {name} = {value!r}, expected {expected}; correct it"
        )
