"""Who may use the server: the tenants file, and the check of a token.

    [[tenant]]
    name = "search"
    token_file = "/etc/kvstore/search.tokens"  # one token a line; or token_sha256 = "<64 hex digits>"
    salt_file = "/etc/kvstore/search.salt"     # 16 random bytes or more in hex; or salt = "<hex>"
    # so much is required; what follows may be left out
    share_bytes = "8GiB"                       # guaranteed part of pool_bytes
    expires = 2027-06-30T00:00:00Z             # none of its tokens is valid from then on
    maps_pool = true                           # may map the pool file, hence read what all tenants stored
    admin = true                               # may ask for the status, clear, pin, set shares, watch events

The file and those that it names are read when the server starts, and again at each SIGHUP; where they are
not right then, what they said before holds. Nobody but their owner may read them (mode 600), or also a group
where they are root's (640).

A token does not stand in the file itself, only its SHA-256 or the name of a file that holds it, so that
who sees the configuration cannot log in. Two tokens of one tenant are valid at the same time: a new one
is added, clients move to it, the old one is taken out. The salt is part of every block's identity: with
another salt all that a tenant has stored is out of its reach.

An admin sees and clears what all tenants have, but reads no block of another: a prompt that it names, to
look it up or to pin it, is one of its own tenant.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictBool,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from kvstore.errors import ConfigError
from kvstore.quantity import Bytes, format_bytes
from kvstore.settings import suggestion

SALT_BYTES_MIN = 16
TOKEN_CHARACTERS_MIN = 22
"""Of 16 random bytes in base64: a token that can be guessed is found by its SHA-256."""

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody whose namespaces nobody else reaches.

    ``salt`` is part of their roots; None only for the one tenant of a server that has no tenants file.
    ``share_bytes`` of the pools are guaranteed to it. One that ``maps_pool`` belongs to the server's
    trust domain: whoever maps the pool file can read and damage what all tenants stored.
    """

    name: str
    salt: bytes | None = field(repr=False)
    share_bytes: int = 0
    admin: bool = False
    maps_pool: bool = False


class Refusal(StrEnum):
    """Why a token opens nothing."""

    UNKNOWN = "unknown"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a token opens, until when in Unix seconds (None: for ever)."""

    tenant: Tenant
    expires: float | None


class Tenants:
    """All tenants of a server, and whose token is whose."""

    def __init__(self) -> None:
        self._tenants: list[Tenant] = []
        self._passes: dict[bytes, _Pass] = {}

    def admit(self, tenant: Tenant, token_digests: Sequence[bytes], expires: float | None = None) -> None:
        """Add a tenant with the SHA-256 of each of its tokens, valid until ``expires`` in Unix seconds.

        ValueError where it shares a name, a token or a salt with another: who is who would be open.
        """
        for other in self._tenants:
            for what in ("name", "salt"):
                if getattr(tenant, what) == getattr(other, what):
                    raise ValueError(f"{what}: expected one of its own, tenant {other.name} has the same")
        for digest in token_digests:
            if digest in self._passes:
                raise ValueError(
                    f"tokens: expected each once, tenant {self._passes[digest].tenant.name} has "
                    "the same; give each tenant its own"
                )
            self._passes[digest] = _Pass(tenant, expires)
        self._tenants.append(tenant)

    def authenticate(self, token: str, now: float) -> Tenant | Refusal:
        """Whose token this is at ``now``, in Unix seconds.

        The time that it takes says nothing about the tokens that exist: what is looked up is a SHA-256
        of the caller's text, and how far that agrees with a stored one is beyond the caller's control.
        """
        found = self._passes.get(hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest())
        if found is None:
            return Refusal.UNKNOWN
        if found.expires is not None and now >= found.expires:
            return Refusal.EXPIRED
        return found.tenant

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants)

    def check_shares(self, pool_bytes: int) -> None:
        """ConfigError where more is guaranteed than there is."""
        promised = sum(tenant.share_bytes for tenant in self._tenants)
        if promised > pool_bytes:
            shares = ", ".join(
                f"{tenant.name} {format_bytes(tenant.share_bytes)}"
                for tenant in self._tenants
                if tenant.share_bytes
            )
            raise ConfigError(
                f"the tenants' share_bytes add up to {format_bytes(promised)} ({shares}), expected at most "
                f"pool_bytes = {format_bytes(pool_bytes)}: lower a share or raise pool_bytes"
            )


def load_tenants(path: Path) -> Tenants:
    """Read the tenants file and the files that it names.

    ConfigError with one line a problem, each with file, tenant and key. No token, digest or salt is shown.
    """
    try:
        content = tomllib.loads(_read_private(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"tenants_file {path} is not TOML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"tenants_file {error}") from error
    tables = content.pop("tenant", None)
    if content:
        name = next(iter(content))
        raise ConfigError(f"tenants_file {path}: key {name} does not exist; {suggestion(name, ['tenant'])}")
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"tenants_file {path} names no tenant; add a [[tenant]] table for each")
    tenants = Tenants()
    problems: list[str] = []
    for number, table in enumerate(tables, start=1):
        name = table.get("name", f"number {number}") if isinstance(table, dict) else f"number {number}"
        found = _admit(tenants, table, path.parent)
        problems += [f"tenants_file {path}: tenant {name}: {problem}" for problem in found]
    if problems:
        raise ConfigError("\n".join(problems))
    return tenants


def _admit(tenants: Tenants, table: object, folder: Path) -> list[str]:
    """Add the tenant of one table, whose paths are relative to ``folder``; or what is wrong with it."""
    try:
        entry = _Entry.model_validate(table, context=folder)
        tenants.admit(entry.tenant, [*entry.token_sha256, *entry.token_file], entry.expires)
    except ValidationError as error:
        return list(_explain(error))
    except ValueError as error:
        return [str(error)]
    return []


def _explain(error: ValidationError) -> Iterator[str]:
    """One line a problem. Pydantic's own text may show a salt."""
    for problem in error.errors(include_url=False, include_input=False):
        key = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "extra_forbidden":
            yield f"key {key} does not exist; {suggestion(key, _Entry.model_fields)}"
        else:
            reason = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
            yield f"{key}: {reason}" if key else reason


def _read_private(path: Path) -> str:
    """The text of a file that holds secrets; ValueError where others may read it.

    Its group may read it where it is root's: so orchestrators hand secrets to processes that are not root.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; correct the path or its rights"
        ) from error
    is_roots = status.st_uid == 0
    if status.st_mode & (stat.S_IRWXO | (stat.S_IWGRP if is_roots else stat.S_IRWXG)):
        raise ValueError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and holds secrets, expected that only its "
            "owner can use it; run `chmod 600` on it"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _folder(info: ValidationInfo) -> Path:
    assert isinstance(info.context, Path), "the folder of the tenants file"
    return info.context


def _several(value: object, expected: str) -> list[str]:
    """A string or an array of them."""
    given = value if isinstance(value, list) else [value]
    found = [item for item in given if isinstance(item, str)]
    if not found or len(found) < len(given):
        raise ValueError(f"expected {expected}, or an array of them")
    return found


def _parse_name(value: object) -> str:
    if not isinstance(value, str) or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value) is None:
        raise ValueError("expected up to 64 letters, digits, dots, dashes and underscores, such as search-2")
    return value


def _parse_digests(value: object) -> tuple[bytes, ...]:
    expected = "the 64 hex digits that `printf %s TOKEN | sha256sum` prints"
    try:
        digests = tuple(bytes.fromhex(text) for text in _several(value, expected))
    except ValueError as error:
        raise ValueError(f"expected {expected}, or an array of them") from error
    if any(len(digest) != _DIGEST_BYTES for digest in digests):
        raise ValueError(f"expected {expected}, or an array of them")
    return digests


def _read_digests(value: object, info: ValidationInfo) -> tuple[bytes, ...]:
    """SHA-256 of the tokens in one or several files, one a line."""
    tokens: list[str] = []
    for name in _several(value, "the name of a file"):
        path = _folder(info) / name
        found = [line.strip() for line in _read_private(path).splitlines() if line.strip()]
        if not found or min(map(len, found)) < TOKEN_CHARACTERS_MIN:
            raise ValueError(
                f"{path}: expected random tokens of at least {TOKEN_CHARACTERS_MIN} characters, one a line, "
                "such as `openssl rand -base64 24` prints"
            )
        tokens += found
    return tuple(hashlib.sha256(token.encode()).digest() for token in tokens)


def _parse_salt(value: object) -> bytes:
    try:
        salt = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        salt = b""
    if len(salt) < SALT_BYTES_MIN:
        raise ValueError(
            f"expected {SALT_BYTES_MIN} random bytes or more in hex, such as `openssl rand -hex "
            f"{SALT_BYTES_MIN}` prints"
        )
    return salt


def _read_salt(value: object, info: ValidationInfo) -> bytes:
    if not isinstance(value, str):
        raise ValueError("expected the name of a file")
    return _parse_salt(_read_private(_folder(info) / value).strip())


def _parse_expiry(value: object) -> float:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError("expected a time with its zone and without quotes, such as 2027-06-30T00:00:00Z")
    return value.timestamp()


class _Entry(BaseModel):
    """One ``[[tenant]]`` table; what stands in files is read while it is checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, BeforeValidator(_parse_name)]
    token_sha256: Annotated[tuple[bytes, ...], BeforeValidator(_parse_digests)] = ()
    token_file: Annotated[tuple[bytes, ...], BeforeValidator(_read_digests)] = ()
    salt: Annotated[bytes | None, BeforeValidator(_parse_salt)] = None
    salt_file: Annotated[bytes | None, BeforeValidator(_read_salt)] = None
    expires: Annotated[float | None, BeforeValidator(_parse_expiry)] = None
    share_bytes: Bytes = 0
    admin: StrictBool = False
    maps_pool: StrictBool = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.token_sha256 and not self.token_file:
            raise ValueError("expected token_sha256 or token_file: without a token it can never log in")
        if (self.salt is None) == (self.salt_file is None):
            raise ValueError("expected salt or salt_file, and not both: it keeps its blocks from the others")
        return self

    @property
    def tenant(self) -> Tenant:
        salt = self.salt or self.salt_file
        assert salt is not None, "checked together"
        return Tenant(self.name, salt, self.share_bytes, self.admin, self.maps_pool)
