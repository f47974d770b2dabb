"""What a request says of its own future, in the ``kv_transfer_params`` that come with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.errors import HintsError
from kvstore.hints import NO_HINTS, Hints, checked

_NAMES = Hints._fields


def hints_of(params: Mapping[str, Any] | None) -> Hints:
    """The hints among a request's parameters; other names there are other connectors'.

    HintsError where one has another type than it should, or is out of range.
    """
    given = {name: params[name] for name in _NAMES if name in params} if params else {}
    if not given:
        return NO_HINTS
    for name, value in given.items():
        _require_type(name, value)
    return checked(Hints(**given))


def _require_type(name: str, value: object) -> None:
    if name == "ended":
        right, expected = isinstance(value, bool), "true or false"
    elif name == "priority":
        right, expected = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        right = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        expected = "a number of seconds"
    if not right:
        raise HintsError(f"hints.{name} is {value!r:.40}, expected {expected}; correct it or leave it out")
