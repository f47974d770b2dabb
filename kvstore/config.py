"""Every setting of the store, and how a file, the environment and flags make one configuration."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from kvstore.address import LOOPBACK, Address, format_addresses, parse_addresses, parse_tcp_address
from kvstore.errors import ConfigError
from kvstore.quantity import Bytes, Seconds, format_bytes

ENVIRONMENT_PREFIX = "KVSTORE_"
EMBEDDED_REDIS = "embedded"
"""``redis_url`` that stands for a Valkey server started by this process."""

_MASK = "***"
_LIKENESS_MIN = 0.5
_LISTED_MAX = 40


# Whether each needs a host, and whether a path: that of a socket, or the name of a service.
_REDIS_SCHEMES = {
    "redis": (True, False),
    "rediss": (True, False),
    "unix": (False, True),
    "redis+sentinel": (True, True),
    "rediss+sentinel": (True, True),
    "redis+cluster": (True, False),
    "rediss+cluster": (True, False),
}


def _parse_redis_url(value: object) -> str | None:
    expected = (
        "expected redis://, rediss:// or unix:// with a host or a socket path, redis+sentinel:// with hosts "
        "and the name of a service, or redis+cluster:// with hosts, such as redis://127.0.0.1:6379/0 or "
        f"redis+cluster://a:6379,b:6379; or the word {EMBEDDED_REDIS} or none"
    )
    if value is None or value == "none":
        return None
    if value == EMBEDDED_REDIS:
        return EMBEDDED_REDIS
    if not isinstance(value, str):
        raise ValueError(expected)
    try:
        parts = urlsplit(value)
        needs_host, needs_path = _REDIS_SCHEMES[parts.scheme]
        hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
        _ = [host.port for host in hosts]  # raises on a port that is no number below 65,536
    except (ValueError, KeyError) as error:
        raise ValueError(expected) from error
    missing = (needs_host and not all(host.hostname for host in hosts)) or (
        needs_path and not parts.path.strip("/")
    )
    if missing or (len(hosts) > 1 and "+" not in parts.scheme):
        raise ValueError(expected)
    return value


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("expected an absolute path, since other processes open the file by it")
    return path


def _none_or_as_given(value: object) -> object:
    if value == "":
        raise ValueError("expected the path of a file, or none")
    return None if value == "none" else value


def _matching(pattern: str, expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


_AS_TEXT = PlainSerializer(format_addresses)
Listen = Annotated[tuple[Address, ...], BeforeValidator(parse_addresses), _AS_TEXT]
HttpListen = Annotated[Address | None, BeforeValidator(parse_tcp_address), _AS_TEXT]
OptionalPath = Annotated[Path | None, BeforeValidator(_none_or_as_given)]
RedisUrl = Annotated[str | None, BeforeValidator(_parse_redis_url)]
Device = Annotated[str, _matching(r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N")]
KeyPrefix = Annotated[str, _matching(r"[^{}\s]+", "one or more characters without braces or spaces")]


class Config(BaseModel):
    """All settings, immutable. A size is in bytes, a duration in seconds, whatever unit it was given in.

    Constructing it reads neither files nor the environment: ``load_config`` is given both.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,  # a Redis URL may hold a password
    )

    pool_path: Annotated[Path, AfterValidator(_absolute)] = Path("/dev/shm/prefix-kvstore.pool")
    """File of the host tier, on a tmpfs; clients on this machine map it."""

    pool_bytes: Bytes = 2**30
    """Size of the host tier, reserved in full."""

    extent_bytes: Bytes = 64 * 2**20
    """Piece of a pool that serves one slot size at a time."""

    device: Device = "cpu"
    """Torch device of the device tier: cpu, cuda or cuda:N."""

    device_bytes: Bytes = 2**30
    """Size of the device tier."""

    block_size: int = Field(default=16, ge=1)
    """Tokens in a block, the unit of hashing and of reuse."""

    hash_algorithm: Literal["xxh3_128", "sha256"] = "xxh3_128"
    """Block hash; sha256 where tenants do not trust each other."""

    redis_url: RedisUrl = Field(default=None, repr=False)
    """Redis or Valkey (docs/redis.md); embedded starts a Valkey beside this process, none does without."""

    redis_prefix: KeyPrefix = "kv"
    """First part of every key in Redis; no spaces, and no braces: those mark a hash tag in Redis Cluster."""

    redis_ttl_seconds: Seconds = Field(default=86400, ge=1)
    """Time after its last use at which Redis forgets a block; at least one second."""

    redis_connections: int = Field(default=2, ge=1, le=64)
    """Connections to each Redis node that carry payloads."""

    redis_probe_seconds: Seconds = 0.05
    """Longest wait for Redis to say which blocks it has."""

    redis_acquire_seconds: Seconds = 0.5
    """Longest wait for Redis to deliver the blocks of one request, the probe included."""

    redis_queue_bytes: Bytes = 256 * 2**20
    """Payloads that may wait for Redis to take them; beyond it, writes to Redis are dropped and counted."""

    lease_seconds: Seconds = 30
    """Time for which acquired blocks stay readable without a renewal."""

    write_seconds: Seconds = 30
    """Time a writer has between staging blocks and committing them."""

    listen: Listen = (Address(path=Path("/dev/shm/prefix-kvstore.sock")),)
    """Addresses of the gRPC server, with commas between them: unix:/absolute/path, host:port, :port."""

    http_listen: HttpListen = Address(host=LOOPBACK, port=9470)
    """Address of /metrics, /healthz and /readyz, without TLS: counts and model names, no prompts; or none."""

    tls_cert: OptionalPath = None
    """PEM file with the server's certificate chain; with it every host:port speaks TLS. Or none."""

    tls_key: OptionalPath = None
    """PEM file with the private key of tls_cert, or none."""

    tls_client_ca: OptionalPath = None
    """PEM file with the authorities that clients' certificates must come from, or none: they need none."""

    tenants_file: OptionalPath = None
    """TOML file of the tenants and their tokens, or none: then whoever can connect may use the store."""

    client_leases: int = Field(default=4096, ge=1)
    """Leases that one client may hold at a time."""

    client_staged_bytes: Bytes = 2**30
    """Bytes that one client may have staged and not yet committed."""

    client_streams: int = Field(default=16, ge=1)
    """Streams of payloads that one client may have open at a time."""

    drain_seconds: Seconds = 10
    """Time that a server which is told to stop gives its clients, and Redis for what is queued for it."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important messages that are logged."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.pool_bytes < self.extent_bytes:
            raise ValueError(
                f"pool_bytes = {format_bytes(self.pool_bytes)} is less than one extent, "
                f"extent_bytes = {format_bytes(self.extent_bytes)}: raise the first or lower the second"
            )
        if self.redis_probe_seconds > self.redis_acquire_seconds:
            raise ValueError(
                f"redis_probe_seconds = {self.redis_probe_seconds:g} is longer than "
                f"redis_acquire_seconds = {self.redis_acquire_seconds:g}, which includes it: "
                "lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_key", "tls_cert") if self.tls_cert is None else ("tls_cert", "tls_key")
            raise ValueError(f"{given} is set without {missing}: TLS needs both, set {missing} too")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca is set without tls_cert and tls_key: clients can prove who they are by "
                "certificate only to a server that has one, set both too"
            )
        lacking = [name for name in ("tenants_file", "tls_cert") if getattr(self, name) is None]
        for address in self.listen:
            if lacking and not address.is_of_this_machine:
                raise ValueError(
                    f"listen = {address} may be reached from other machines, which needs tenants_file (else "
                    "anybody there could read and write blocks) and tls_cert (else tokens and prompts could "
                    f"be read on the way), but there is no {' and no '.join(lacking)}: set what is missing, "
                    "or listen on 127.0.0.1 or unix:"
                )
        return self


class Source(StrEnum):
    """Where a value came from, weakest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


class ConfigRow(NamedTuple):
    """One setting as shown to people; a password in ``value`` is masked."""

    field: str
    value: str
    source: Source


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and, for each of its fields, where the value came from."""

    config: Config
    sources: Mapping[str, Source]

    def describe(self) -> list[ConfigRow]:
        """All settings in the order in which ``Config`` declares them, fit for a log."""
        return [
            ConfigRow(name, _format_value(name, getattr(self.config, name)), self.sources[name])
            for name in Config.model_fields
        ]


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one source said, under the names that this source uses."""

    source: Source
    kind: str
    spell: Callable[[str], str]
    given: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Merged:
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(
        default_factory=lambda: dict.fromkeys(Config.model_fields, Source.DEFAULT)
    )
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, layer: _Layer) -> None:
        fields = {layer.spell(name): name for name in Config.model_fields}
        for given, value in layer.given.items():
            if given not in fields:
                self.problems.append(f"{layer.kind} {given} does not exist; {suggestion(given, fields)}")
                continue
            name = fields[given]
            self.values[name] = value
            self.sources[name] = layer.source
            self.origins[name] = f"{layer.kind} {given}"


def load_config(
    *,
    toml_path: Path | None = None,
    environ: Mapping[str, str],
    overrides: Mapping[str, object],
) -> LoadedConfig:
    """Build the configuration; defaults < TOML file < ``KVSTORE_*`` in ``environ`` < ``overrides``.

    ``overrides`` are flags by field name; None means that the flag was not given. Raises
    ConfigError with one line an offender: a key, variable or flag that does not exist, with the
    nearest one that does; or a value that does not fit, with what would.
    """
    merged = _Merged()
    if toml_path is not None:
        merged.add(_Layer(Source.FILE, f"{toml_path}: key", str, _read_toml(toml_path)))
    variables = {name: value for name, value in environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
    merged.add(_Layer(Source.ENVIRONMENT, "environment variable", _variable, variables))
    flags = {_flag(name): value for name, value in overrides.items() if value is not None}
    merged.add(_Layer(Source.FLAG, "flag", _flag, flags))
    if merged.problems:
        raise ConfigError("\n".join(merged.problems))
    try:
        config = Config(**merged.values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, merged))) from error
    return LoadedConfig(config, MappingProxyType(merged.sources))


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggestion(given: str, names: Iterable[str]) -> str:
    """What to say of a name that does not exist: the nearest that does, or else all of them."""

    def likeness(name: str) -> float:
        return SequenceMatcher(None, name.lower(), given.lower()).ratio()

    nearest = max(names, key=likeness)
    if likeness(nearest) >= _LIKENESS_MIN:
        return f"did you mean {nearest}?"
    listed = sorted(names)
    more = f", and {len(listed) - _LISTED_MAX} more" if len(listed) > _LISTED_MAX else ""
    return f"expected one of {', '.join(listed[:_LISTED_MAX])}{more}"


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error


def _explain(error: ValidationError, merged: _Merged) -> list[str]:
    """One line a problem. Pydantic's own text may show a password and does not name the source."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        reason = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
        if not problem["loc"]:
            lines.append(reason)
            continue
        name = str(problem["loc"][0])
        value = merged.values[name]
        shown = mask_url(value) if name == "redis_url" and isinstance(value, str) else value
        lines.append(f"{merged.origins[name]} = {shown!r}: {reason}")
    return lines


def mask_url(url: str) -> str:
    """The URL with any password replaced, so that it can be logged; malformed URLs too."""
    head, at, place = url.rpartition("@")
    if at:
        scheme, slashes, login = head.rpartition("://")
        user, colon, _password = login.partition(":")
        url = f"{scheme}{slashes}{user}{colon}{_MASK if colon else ''}@{place}"
    return re.sub(r"(?i)(password=)[^&#]*", rf"\g<1>{_MASK}", url)


def _format_value(name: str, value: object) -> str:
    if value is None:
        return "none"
    if name == "redis_url":
        return mask_url(str(value))
    if name.endswith("_bytes"):
        assert isinstance(value, int)
        return format_bytes(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g} s" if isinstance(value, float) else str(value)
