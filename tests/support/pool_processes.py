"""Other processes that open a pool file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

OPEN = """
import sys
from pathlib import Path
from kvstore.block import WHOLE
from kvstore.evict.lru import LRU
from kvstore.store import BlockStatus, TieredStore, Tiers
from kvstore.tiers.host import HostTier

path = Path(sys.argv[1])
host = HostTier(path, pool_bytes=8 << 16, extent_bytes=1 << 16, make_evictor=LRU, clock=lambda: 1.0)
"""


def start(script: str, path: Path) -> subprocess.Popen[str]:
    """Run a script that has opened the pool at ``path`` in another process."""
    return subprocess.Popen(
        [sys.executable, "-c", OPEN + script, str(path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(script: str, path: Path) -> str:
    process = start(script, path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.strip()
