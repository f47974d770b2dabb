"""The examples run as they are, and say what the README says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_example(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_library() -> None:
    assert run_example("library.py").startswith("496 of 1500 tokens are cached, in blocks [0, 1, 2,")


def test_two_processes() -> None:
    assert run_example("two_processes.py").startswith("992 of 2000 tokens are cached, in blocks [0, 1, 2,")


@pytest.mark.slow
@pytest.mark.redis
def test_handoff() -> None:
    said = run_example("handoff.py")
    assert "cold: 0 of 801 tokens cached" in said
    assert "warm: 800 of 801 tokens cached" in said
    assert re.search(r"handed over: \d+ bytes, 0 prompt tokens computed again", said)
