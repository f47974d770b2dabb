"""``prefill serve`` as real processes on tiny models, which a test may stop, kill and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
from openai import OpenAI
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.stores import pool_folder

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 60.0
FIRST_TEXT_TOKEN = 2
"""Ids below begin and end texts."""
TEXT_TOKENS = 256
_HELD = (
    "kvstore_leases",
    "prefill_waiting_requests",
    "prefill_running_requests",
    "prefill_served_requests",
)


class Forks:
    """A process that has loaded torch, and forks workers."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self._folder = folder
        self._count = 0
        # One thread: tiny models gain nothing from more, and a fork has none of its parent's.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker_fork_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=environment,
        )

    def fork(self, arguments: list[str]) -> tuple[int, Path, Path]:
        """Run a command: its pid, and the files that its outputs go to."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        stdout, stderr = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        job = {"arguments": arguments, "stdout": str(stdout), "stderr": str(stderr)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline()), stdout, stderr

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@dataclass
class PrefillWorker:
    """One worker process. Its ports are the same when it is started again."""

    forks: Forks
    settings: dict[str, str]
    pid: int = 0
    grpc: str = "127.0.0.1:0"
    http: str = "http://127.0.0.1:0"
    _log: Path | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        places = {"listen": self.grpc, "http": self.http.removeprefix("http://")}
        flags = {"model": str(self.forks.model), **places, **self.settings}
        arguments = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
        self.pid, stdout, self._log = self.forks.fork(["serve", "--json", *arguments])
        assert soon(lambda: _said(stdout) or not self.is_running, START_SECONDS)
        assert self.is_running, self.log
        started = json.loads(stdout.read_text())
        self.grpc, self.http = started["grpc"][0], started["http"]

    @property
    def is_running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def log(self) -> str:
        """What it wrote on stderr."""
        return self._log.read_text() if self._log and self._log.exists() else ""

    def kill(self) -> None:
        """End it as a crash does."""
        os.kill(self.pid, signal.SIGKILL)
        assert soon(lambda: not self.is_running, START_SECONDS)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped in the block of code: its sockets stay open and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if self.is_running:
                os.kill(self.pid, signal.SIGCONT)

    def openai(self, key: str = "unused") -> OpenAI:
        """A client that tries once, so that a test sees what the first answer was."""
        return OpenAI(base_url=f"{self.http}/v1", api_key=key, max_retries=0, timeout=30)

    def samples(self) -> list[Sample]:
        """What /metrics says."""
        body = httpx2.get(f"{self.http}/metrics", timeout=30).text
        return [sample for family in text_string_to_metric_families(body) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def held(self) -> dict[str, float]:
        """What requests hold: nothing at rest."""
        return {
            sample.name: sample.value for sample in self.samples() if sample.name in _HELD and sample.value
        }

    def assert_quiet(self) -> None:
        assert soon(lambda: not self.held), self.held


@contextmanager
def worker(forks: Forks, **settings: str) -> Iterator[PrefillWorker]:
    """A worker with memory of its own, which is gone afterwards."""
    with pool_folder() as folder:
        sizes = {
            "pool_bytes": "16MiB",
            "extent_bytes": "2MiB",
            "device_bytes": "4MiB",
            "log_level": "warning",
        }
        made = PrefillWorker(forks, {"pool_path": str(folder / "pool"), **sizes, **settings})
        made.start()
        try:
            yield made
        finally:
            if made.is_running:
                made.kill()


class Rpc:
    """The calls of one worker, with token ids as lists."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(self.channel)
        self.stub = stub

    def __enter__(self) -> Rpc:
        return self

    def __exit__(self, *_error: object) -> None:
        self.channel.close()

    def generate(self, tokens: list[int], new: int, **fields: Any) -> list[int]:
        """The whole answer."""
        request = prefill_pb2.GenerateRequest(ask=ask_of(tokens, new, **fields))
        return [
            token
            for part in self.stub.Generate(request, timeout=60)
            for token in unpack(part.progress.token_ids)
        ]

    def prefill(self, tokens: list[int], new: int, **fields: Any) -> prefill_pb2.PrefillResponse:
        answer = self.stub.Prefill(prefill_pb2.PrefillRequest(ask=ask_of(tokens, new, **fields)), timeout=60)
        assert isinstance(answer, prefill_pb2.PrefillResponse)
        return answer


def ask_of(tokens: list[int], new: int, **fields: Any) -> prefill_pb2.Ask:
    return prefill_pb2.Ask(token_ids=pack(tokens), max_new_tokens=new, ignore_eos=True, **fields)


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def unpack(data: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return tokens


def tokens_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens of texts; prompts of two seeds share no block."""
    random = np.random.default_rng([seed, length])
    tokens: list[int] = random.integers(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + TEXT_TOKENS, length).tolist()
    return tokens


def soon(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether the condition comes true in time; it may be a question to a worker, which costs something."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _said(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")
