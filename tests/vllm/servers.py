"""vLLM's HTTP server as a process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.engines import REPOSITORY, environment

START_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


@contextmanager
def http_server(
    model: Path, log: Path, transfer: dict[str, Any] | None, *flags: str, **environ: str
) -> Iterator[str]:
    """The base URL of a server of ``model``, named ``m``, as soon as it is ready."""
    port = free_port()
    arguments = [
        *("--model", str(model), "--served-model-name", "m", "--port", str(port), "--host", "127.0.0.1"),
        *("--enforce-eager", "--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
        *flags,
    ]
    if transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    said = log.open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        cwd=REPOSITORY,
        env=environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | environ,
        stdout=said,
        stderr=said,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _ready(url):
            assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-4000:]}"
            assert time.monotonic() < deadline, f"the server did not start in {START_SECONDS} s"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
        said.close()


def _ready(url: str) -> bool:
    try:
        fetch(f"{url}/health")
    except (urllib.error.URLError, OSError):
        return False
    return True
