"""How a file, the environment and flags make one configuration, and what is said of what does not fit."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from kvstore.config import Config, mask_url
from kvstore.errors import ConfigError
from kvstore.quantity import format_bytes

ENVIRONMENT_PREFIX = "KVSTORE_"

_LIKENESS_MIN = 0.5
_LISTED_MAX = 40


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
            if _is_table(value):
                self.problems.append(
                    f"{layer.kind} {given} is a table, but there are no tables; write its keys at the top of "
                    "the file, without a heading"
                )
                continue
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
    ConfigError with one line an offender, all of them: a key, variable or flag that does not exist,
    with the nearest one that does; a table; a value that does not fit, with what would.
    """
    merged = _Merged()
    if toml_path is not None:
        merged.add(_Layer(Source.FILE, f"{toml_path}: key", str, _read_toml(toml_path)))
    variables = {name: value for name, value in environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
    merged.add(_Layer(Source.ENVIRONMENT, "environment variable", _variable, variables))
    flags = {_flag(name): value for name, value in overrides.items() if value is not None}
    merged.add(_Layer(Source.FLAG, "flag", _flag, flags))
    try:
        config = Config(**merged.values)
    except ValidationError as error:
        raise ConfigError("\n".join([*merged.problems, *_explain(error, merged)])) from error
    if merged.problems:
        raise ConfigError("\n".join(merged.problems))
    return LoadedConfig(config, MappingProxyType(merged.sources))


def _is_table(value: object) -> bool:
    """A TOML table, or an array of them."""
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_is_table, value)))


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggestion(given: str, names: Iterable[str]) -> str:
    """What to say of a name that does not exist: the nearest that does, or else all of them."""
    listed = sorted(names)
    # What all of them begin with, such as KVSTORE_, makes none of them likelier.
    alike = takewhile(lambda letters: len({*letters}) == 1, zip(given, *listed, strict=False))
    shared = len([*alike]) if len(listed) > 1 else 0

    def likeness(name: str) -> float:
        return SequenceMatcher(None, name[shared:].lower(), given[shared:].lower()).ratio()

    nearest = max(listed, key=likeness)
    if likeness(nearest) >= _LIKENESS_MIN:
        return f"did you mean {nearest}?"
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
            # Where a name is wrong, the default in its place may be what contradicts the others.
            lines += [] if merged.problems else [reason]
            continue
        name = str(problem["loc"][0])
        value = merged.values[name]
        shown = mask_url(value) if name == "redis_url" and isinstance(value, str) else value
        lines.append(f"{merged.origins[name]} = {shown!r}: {reason}")
    return lines


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
