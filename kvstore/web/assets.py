"""The files of the live page, read once: what is served is what was installed, whatever a path says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

FILES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/": ("status.html", "text/html; charset=utf-8"),
        "/status.css": ("status.css", "text/css; charset=utf-8"),
        **{
            f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
            for name in ("status", "charts", "counts", "dom", "format", "names", "tables")
        },
        "/icon.svg": ("icon.svg", "image/svg+xml"),
    }
)
"""File and content type by path."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file in memory."""

    content_type: str
    body: bytes


def load_assets() -> dict[str, Asset]:
    """By path."""
    folder = files("kvstore.web") / "page"
    return {path: Asset(kind, (folder / name).read_bytes()) for path, (name, kind) in FILES.items()}
