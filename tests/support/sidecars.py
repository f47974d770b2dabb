"""Sidecars as processes of their own, each with its pool, socket and failpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 30.0
STOP_SECONDS = 20.0

_MAIN = """
import json, signal, sys, time, logging
from pathlib import Path
from kvstore.serve import Clocks, run
from kvstore.commands.serving import announce
from kvstore.settings import load_config

settings, stops = json.loads(sys.argv[1]), dict(json.loads(sys.argv[2]))

log = settings.get("log_file")
logging.basicConfig(**({"level": "INFO", "filename": log} if log else {"level": "WARNING"}))
armed = Path(settings["pool_path"] + ".step")

def failpoint(step):
    reached = armed.exists() and armed.read_text() == step
    if reached:
        armed.unlink()
    if stops.get(step):
        stops[step] -= 1
        reached = reached or stops[step] == 0
    if reached:
        signal.raise_signal(signal.SIGSTOP)  # to this thread, which goes no step further

loaded = load_config(environ={}, overrides=settings)
run(loaded, Clocks(time.monotonic, time.time), lambda serving: announce(serving, as_json=True), failpoint)
"""


@dataclass(slots=True)
class Sidecar:
    """A server process. ``settings`` are fields of Config; ``stop_at`` maps a Step to the pass at which
    the process stops itself with SIGSTOP."""

    settings: dict[str, Any]
    process: subprocess.Popen[str] = field(init=False)
    serving: dict[str, Any] = field(init=False)
    stop_at: dict[str, int] = field(default_factory=dict)

    @property
    def address(self) -> str:
        address: str = self.serving["addresses"][0]
        return address

    @property
    def pool_path(self) -> Path:
        return Path(self.settings["pool_path"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def launch(self) -> None:
        """Start the process; it may stop before it serves, if ``stop_at`` says so."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps(self.settings), json.dumps(self.stop_at)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        """Start the process and wait until it serves."""
        self.launch()
        self.await_serving()

    def await_serving(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the sidecar ended with status {self.process.wait(STOP_SECONDS)}"
        self.serving = json.loads(line)

    def arm(self, step: str) -> None:
        """Have the running process stop itself when it next comes to ``step``."""
        whole = self.pool_path.with_name("step")
        whole.write_text(step)
        whole.replace(f"{self.pool_path}.step")

    def await_stopped(self) -> None:
        """Wait until the process has stopped itself at a failpoint."""
        deadline = time.monotonic() + STOP_SECONDS
        while not (stopped := os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG))[0]:
            assert time.monotonic() < deadline, f"the sidecar did not stop in {STOP_SECONDS} s"
            time.sleep(0.002)
        assert os.WIFSTOPPED(stopped[1]), f"the sidecar did not stop but ended with {stopped[1]}"

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def restart(self) -> None:
        """Crash, and a new server on the same pool and addresses."""
        if self.process.poll() is None:
            self.kill()
        self.stop_at = {}
        self.start()

    def stop(self) -> int:
        """End it in order; its exit status."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


@contextmanager
def sidecar(*, stop_at: Any = None, **settings: Any) -> Iterator[Sidecar]:
    """A running server with a pool and a socket of its own in shared memory."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as memory:
        defaults = {
            "pool_path": f"{memory}/pool",
            "pool_bytes": "32MiB",
            "extent_bytes": "1MiB",
            "listen": f"unix:{memory}/socket",
            "http_listen": "127.0.0.1:0",
        }
        server = Sidecar({**defaults, **settings}, stop_at=stop_at or {})
        try:
            server.start()
            yield server
        finally:
            if server.process.poll() is None:
                server.stop()
            elif server.process.stdout is not None:
                server.process.stdout.close()
