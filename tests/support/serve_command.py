"""``kvstore serve`` as a user runs it, where it is to fail."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_FIXED = {"KVSTORE_POOL_BYTES": "4MiB", "KVSTORE_EXTENT_BYTES": "1MiB", "KVSTORE_HTTP_LISTEN": "none"}


def fails_to_serve(**settings: object) -> str:
    """What a server says that cannot start with these settings; it ends with status 2 and no traceback."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as memory:
        places = {"KVSTORE_POOL_PATH": f"{memory}/pool", "KVSTORE_LISTEN": f"unix:{memory}/socket"}
        given = {f"KVSTORE_{name.upper()}": str(value) for name, value in settings.items()}
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **_FIXED, **places, **given}
        command = [sys.executable, "-m", "kvstore", "serve"]
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    said = ended.stderr
    assert ended.returncode == 2, f"status {ended.returncode}: {said}"
    assert "error:" in said
    assert "Traceback" not in said
    return said
