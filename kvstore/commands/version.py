"""``--version``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_PACKAGE = "prefix-kvstore"


def describe_version() -> str:
    """Name and version of the package; a checkout that is not installed has none."""
    try:
        return f"{_PACKAGE} {version(_PACKAGE)}"
    except PackageNotFoundError:
        return f"{_PACKAGE}, not installed"
