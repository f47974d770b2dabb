"""Sizes and durations as people write them, such as 1GiB or 500ms, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

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


def parse_bytes(value: object) -> int:
    """Whole bytes above zero; ValueError says what would fit."""
    expected = "a size above zero in whole bytes, such as 1GiB, 512MiB or 1048576"
    number = _quantity(value, _BYTE_UNITS, expected)
    if not math.isfinite(number) or number <= 0 or number != int(number):
        raise ValueError(f"expected {expected}")
    return int(number)


def parse_seconds(value: object) -> float:
    """Seconds above zero; ValueError says what would fit."""
    expected = "a duration above zero, such as 0.5, 500ms, 30s, 5m, 2h or 1d"
    number = _quantity(value, _SECOND_UNITS, expected)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"expected {expected}")
    return float(number)


def format_bytes(size: int) -> str:
    """In the largest unit of which it is a whole number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % _BYTE_UNITS[unit] == 0:
            return f"{size // _BYTE_UNITS[unit]} {unit}"
    return f"{size} B"


def _quantity(value: object, units: Mapping[str, float], expected: str) -> float:
    """A number, or a number with one of ``units``, in the unit of factor 1."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"expected {expected}")
    number = float(match[1]) if "." in match[1] else int(match[1])
    return number * units[match[2]]


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
