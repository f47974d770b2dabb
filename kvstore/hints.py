"""What a request may say of its own future."""

from __future__ import annotations

import sys
from typing import NamedTuple

from kvstore.errors import HintsError

PRIORITY_MOST = 8
"""Priorities are from its negative to it; 0 is a request that says nothing."""


class Hints(NamedTuple):
    """What a request says of its own future; bounded in what it can cost others.

    ``ended``: nobody will ask for what follows it. Higher ``priority`` stays longer. ``idle_seconds``
    is when the next request of this conversation is expected.
    """

    ended: bool = False
    priority: int = 0
    idle_seconds: float | None = None


NO_HINTS = Hints()


def checked(hints: Hints) -> Hints:
    """The hints. HintsError where a value is out of range."""
    if not -PRIORITY_MOST <= hints.priority <= PRIORITY_MOST:
        raise HintsError(
            f"hints.priority is {hints.priority}, expected {-PRIORITY_MOST} … {PRIORITY_MOST}; choose one in "
            "that range, or leave it out"
        )
    idle = hints.idle_seconds
    if idle is not None and not 0 <= idle <= sys.float_info.max:
        raise HintsError(
            f"hints.idle_seconds is {idle}, expected 0 or more and finite; correct it or leave it out"
        )
    return hints
