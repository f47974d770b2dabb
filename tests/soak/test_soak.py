"""A minute of the soak; ``make soak`` is ten."""

from __future__ import annotations

import pytest

from tests.soak.director import Plan, run


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(180)
def test_a_minute_of_random_kills() -> None:
    summary = run(Plan(seconds=60.0, seed=20_261_130))
    assert summary.violations == [], "\n".join(summary.lines())
    assert summary.counts["operations"] > 1000
    assert summary.counts["read_blocks"] > 1000
    assert summary.events["adoptions"] > 0
