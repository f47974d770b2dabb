"""Tenants files of tenants whose names say all there is to know."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One table of a tenants file; ``fields`` are further lines of it.

    ``token_of`` and ``salt_of`` are whose they are: the tenant's own, where they are empty.
    """

    name: str
    fields: str = ""
    token_of: str = ""
    salt_of: str = ""

    @property
    def token(self) -> str:
        return f"token-of-{self.token_of or self.name}-0123456789abcdef"

    @property
    def salt(self) -> bytes:
        return hashlib.sha256((self.salt_of or self.name).encode()).digest()


def write_tenants(path: Path, *entries: Entry) -> Path:
    """A tenants file that only its owner can read."""
    tables = [
        f'[[tenant]]\nname = "{each.name}"\nsalt = "{each.salt.hex()}"\n'
        f'token_sha256 = "{hashlib.sha256(each.token.encode()).hexdigest()}"\n{each.fields}'
        for each in entries
    ]
    path.touch(0o600)
    path.write_text("\n".join(tables), encoding="utf-8")
    return path
