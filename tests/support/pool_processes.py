"""Other processes that open a pool file: servers that own it, clients that map it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

OPEN = """
import os, signal, sys
from pathlib import Path
import numpy as np
from hashing import KVShape, Namespace
from kvstore.block import WHOLE, Chain
from kvstore.evict.lru import LRU
from kvstore.spec import NamespaceSpec
from kvstore.store import BlockStatus, TieredStore, Tiers
from kvstore.tiers.host import HostTier

path = Path(sys.argv[1])
host = HostTier(path, pool_bytes=8 << 16, extent_bytes=1 << 16, make_evictor=LRU, clock=lambda: 1.0)
"""

MAP = """
import os, sys, time
from pathlib import Path
from kvstore.tiers.pool_view import PoolView

view = PoolView(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


def start(script: str, path: Path) -> subprocess.Popen[str]:
    """Run a script that has opened the pool at ``path``, as ``host``, in another process."""
    return _start(OPEN + script, str(path))


def run(script: str, path: Path, *, ends_by: signal.Signals | None = None, bare: bool = False) -> str:
    """Run such a script to its end, or to the signal by which it ends; what it printed.

    A ``bare`` one gets the path and opens the pool by itself.
    """
    process = _start(script, str(path)) if bare else start(script, path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (0 if ends_by is None else -ends_by)
    return output.strip()


@contextmanager
def mapping(path: Path, epoch: int, client: int, script: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that maps the pool file as a client, until it is killed; ``script`` has its ``view``."""
    process = _start(
        MAP + script + "\nprint('mapped', flush=True)\nsys.stdin.read()", str(path), str(epoch), str(client)
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def kill(process: subprocess.Popen[str]) -> None:
    """End a process as the kernel does it, without a goodbye, and see it gone."""
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)


def _start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
