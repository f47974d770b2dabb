"""What a request may say of its own future, and what becomes of what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.connectors.vllm.hints import hints_of
from kvstore.errors import HintsError
from kvstore.hints import NO_HINTS, Hints


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (None, NO_HINTS),
        ({}, NO_HINTS),
        ({"do_remote_prefill": True, "remote_engine_id": "x"}, NO_HINTS),
        ({"ended": True}, Hints(ended=True)),
        ({"ended": False, "priority": -3, "idle_seconds": None}, Hints(priority=-3)),
        ({"idle_seconds": 30, "priority": 1, "other": []}, Hints(priority=1, idle_seconds=30)),
    ],
)
def test_hints_are_found_among_other_parameters(params: dict[str, Any] | None, hints: Hints) -> None:
    assert hints_of(params) == hints


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ended": 1}, r"hints\.ended is 1, expected true or false"),
        ({"priority": "high"}, r"hints\.priority is 'high', expected a whole number"),
        ({"priority": 1.5}, r"hints\.priority is 1\.5"),
        ({"priority": True}, r"hints\.priority is True"),
        ({"priority": 10**12}, r"hints\.priority is 1000000000000, expected -8 … 8"),
        ({"idle_seconds": "soon"}, r"hints\.idle_seconds is 'soon', expected a number of seconds"),
        ({"idle_seconds": float("nan")}, r"hints\.idle_seconds is nan"),
        ({"idle_seconds": -1}, r"hints\.idle_seconds is -1"),
        ({"idle_seconds": 10**400}, r"hints\.idle_seconds is 10+, expected 0 or more and finite"),
        ({"idle_seconds": float("inf")}, r"hints\.idle_seconds is inf"),
        ({"ended": True, "idle_seconds": True}, r"hints\.idle_seconds is True"),
    ],
)
def test_what_a_hint_cannot_be(params: dict[str, Any], message: str) -> None:
    with pytest.raises(HintsError, match=message):
        hints_of(params)
