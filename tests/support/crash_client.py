"""Handles of client processes that a test tells what to do, stops, resumes and kills."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from tests.support.sidecars import REPOSITORY

ANSWER_SECONDS = 30.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.002
_PIECE_BYTES = 65_536


class CrashClient:
    """A process of ``crash_client_main``; as a context manager ended in order, or killed if it hangs."""

    def __init__(self, address: str, *, streams: bool = False) -> None:
        """``streams``: it does not map the pool file, as if it were on another machine."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.crash_client_main", address, *["stream"] * streams],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "GRPC_VERBOSITY": "NONE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have it done; what came of it."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._received:
            ready, _, _ = select.select([stdout], [], [], ANSWER_SECONDS)
            assert ready, f"client process {self.pid} gave no answer in {ANSWER_SECONDS} s"
            piece = os.read(stdout.fileno(), _PIECE_BYTES)
            assert piece, f"client process {self.pid} ended with {self._process.wait(STOP_SECONDS)}"
            self._received += piece
        line, self._received = self._received.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def await_stopped(self) -> None:
        """Wait until it has stopped itself."""
        await_stopped(self.pid)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.await_stopped()

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait(STOP_SECONDS)
        self._close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is not None:
            return
        if kind is not None:
            self.kill()
            return
        self.resume()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._close_pipes()
        assert status == 0, f"client process {self.pid} ended with {status}"

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def await_stopped(pid: int, seconds: float = STOP_SECONDS) -> None:
    """Wait until a child has been stopped."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if found:
            assert os.WIFSTOPPED(status), f"process {pid} did not stop but ended with {status}"
            return
        assert time.monotonic() < deadline, f"process {pid} did not stop in {seconds} s"
        time.sleep(_POLL_SECONDS)
