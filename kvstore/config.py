"""Every setting of the store, and how a file, the environment and flags make one configuration."""

from __future__ import annotations

import math
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
    ValidationError,
    model_validator,
)

from kvstore.errors import ConfigError

ENVIRONMENT_PREFIX = "KVSTORE_"
EMBEDDED_REDIS = "embedded"
"""``redis_url`` that stands for a Valkey server started by this process."""

_MASK = "***"
_LIKENESS_MIN = 0.5
_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SECOND_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def _quantity(value: object, units: Mapping[str, float], expected: str) -> float:
    """A number, or a number with one of ``units``, in the unit of factor 1."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"expected {expected}")
    number = float(match[1]) if "." in match[1] else int(match[1])
    return number * units[match[2]]


def _parse_bytes(value: object) -> int:
    expected = "a size above zero in whole bytes, such as 1GiB, 512MiB or 1048576"
    number = _quantity(value, _BYTE_UNITS, expected)
    if not math.isfinite(number) or number <= 0 or number != int(number):
        raise ValueError(f"expected {expected}")
    return int(number)


def _parse_seconds(value: object) -> float:
    expected = "a duration above zero, such as 0.5, 500ms, 30s, 5m, 2h or 1d"
    number = _quantity(value, _SECOND_UNITS, expected)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"expected {expected}")
    return float(number)


def _parse_redis_url(value: object) -> str | None:
    expected = (
        "expected redis://, rediss:// or unix:// with a host or a socket path, "
        f"such as redis://127.0.0.1:6379/0, or the word {EMBEDDED_REDIS} or none"
    )
    if value is None or value == "none":
        return None
    if value == EMBEDDED_REDIS:
        return EMBEDDED_REDIS
    if not isinstance(value, str):
        raise ValueError(expected)
    try:
        parts = urlsplit(value)
        place = parts.path if parts.scheme == "unix" else parts.hostname
        _ = parts.port  # raises on a port that is no number below 65,536
    except ValueError as error:
        raise ValueError(expected) from error
    if parts.scheme not in {"redis", "rediss", "unix"} or not place:
        raise ValueError(expected)
    return value


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("expected an absolute path, since other processes open the file by it")
    return path


def _matching(pattern: str, expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
Seconds = Annotated[float, BeforeValidator(_parse_seconds)]
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
    """Redis or Valkey of the redis tier; embedded starts a Valkey beside this process, none does without."""

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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.pool_bytes < self.extent_bytes:
            raise ValueError(
                f"pool_bytes = {_format_bytes(self.pool_bytes)} is less than one extent, "
                f"extent_bytes = {_format_bytes(self.extent_bytes)}: raise the first or lower the second"
            )
        if self.redis_probe_seconds > self.redis_acquire_seconds:
            raise ValueError(
                f"redis_probe_seconds = {self.redis_probe_seconds:g} is longer than "
                f"redis_acquire_seconds = {self.redis_acquire_seconds:g}, which includes it: "
                "lower the first or raise the second"
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
                self.problems.append(f"{layer.kind} {given} does not exist; {_suggestion(given, fields)}")
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


def _suggestion(given: str, names: Iterable[str]) -> str:
    def likeness(name: str) -> float:
        return SequenceMatcher(None, name.lower(), given.lower()).ratio()

    nearest = max(names, key=likeness)
    if likeness(nearest) >= _LIKENESS_MIN:
        return f"did you mean {nearest}?"
    return f"expected one of {', '.join(sorted(names))}"


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
        return _format_bytes(value)
    return f"{value:g} s" if isinstance(value, float) else str(value)


def _format_bytes(size: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % _BYTE_UNITS[unit] == 0:
            return f"{size // _BYTE_UNITS[unit]} {unit}"
    return f"{size} B"
