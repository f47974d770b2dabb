"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGE = "prefix-kvstore"


def installed_version() -> str:
    """As its metadata says; a checkout that is not installed has none."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "not installed"
