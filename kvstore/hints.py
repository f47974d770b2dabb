"""What a request may say of its own future."""

from __future__ import annotations

from typing import NamedTuple


class Hints(NamedTuple):
    """What a request says of its own future; bounded in what it can cost others."""

    ended: bool = False
    priority: int = 0
    idle_seconds: float | None = None


NO_HINTS = Hints()
