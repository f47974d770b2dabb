"""``kvstore`` as processes; and, where a test asks a real server often, in the process of the test."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 60.0
_UNWANTED = {"FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "PYTHONWARNINGS"}


def environment() -> dict[str, str]:
    """That of the tests, without what changes the output and without settings."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in _UNWANTED and not name.startswith("KVSTORE_")
    }
    path = os.pathsep.join(part for part in (str(REPOSITORY), plain.get("PYTHONPATH")) if part)
    return plain | {"PYTHONPATH": path}


def _command(arguments: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "kvstore", *map(str, arguments)]


def kvstore(*arguments: str | Path, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end; ``environ`` adds to the environment."""
    return subprocess.run(
        _command(arguments),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environment() | environ,
    )


def kvstore_here(*arguments: str | Path, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """``kvstore`` without the half second that a process costs."""
    out, messages = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(messages):
        patch.setattr(sys, "argv", ["kvstore", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        patch.setattr(os, "environ", environment() | environ)
        with pytest.raises(SystemExit) as ended:
            main()
    status = ended.value.code
    assert isinstance(status, int)
    return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), messages.getvalue())


@dataclass(frozen=True, slots=True)
class Asking:
    """Commands to one server. Each method says what it expects the command to be."""

    address: str

    def facts(self, *arguments: str | Path, status: int = 0) -> Any:
        """What a command says to a program."""
        done = kvstore_here(*arguments, "--address", self.address, "--json")
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout.count("\n") == 1
        return json.loads(done.stdout)

    def text(self, *arguments: str | Path, status: int = 0, stdin: str = "") -> str:
        """What it says to a person."""
        done = kvstore_here(*arguments, "--address", self.address, stdin=stdin)
        assert (done.returncode, done.stderr) == (status, "")
        return done.stdout

    def refusal(self, *arguments: str | Path) -> str:
        """What it says when it goes wrong."""
        done = kvstore_here(*arguments, "--address", self.address)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr


@contextmanager
def spawn(*arguments: str | Path, stdin: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that runs meanwhile; it is killed if it still does at the end."""
    process = subprocess.Popen(
        _command(arguments),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
