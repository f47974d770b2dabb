"""The processes that ``service.py`` measures: sidecars, the empty handler, and the Redis that is attached."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hashing import KVShape, Namespace
from kvstore.spec import NamespaceSpec
from kvstore.tiers.redis_embedded import EmbeddedRedis

Metadata = tuple[tuple[str, str], ...]

BLOCK_SIZE = 16
STOP_SECONDS = 30.0
# A server looks every quarter of a second whether there is something to send.
POLL_SECONDS = 0.05
QUIET_POLLS = 8
QUIET_BYTES = 4096
# Any import of torch fails in the server, wherever it is installed.
_SERVE = "import sys; sys.modules['torch'] = None; from kvstore.cli import main; main()"
_EMPTY = Path(__file__).with_name("service_empty.py")


@dataclass(frozen=True)
class Running:
    """A server process and what a client needs to call it."""

    process: subprocess.Popen[str]
    address: str
    token: str

    @property
    def metadata(self) -> Metadata:
        return (("authorization", f"Bearer {self.token}"),)


class Processes:
    """Starts servers in a folder of shared memory, with one tenant and one Redis; ends them all.

    The tenant maps the pool and is an admin. Every call needs its token, metrics are served.
    """

    def __init__(self, lmcache_python: str | None = None) -> None:
        """``lmcache_python`` is an interpreter that has LMCache, where there is one."""
        self.lmcache_python = lmcache_python
        self._opened = ExitStack()
        self._number = 0

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(prefix="kvstore-benchmark-", dir="/dev/shm")
        self._folder = Path(self._opened.enter_context(folder))
        self._redis = self._opened.enter_context(EmbeddedRedis.start())
        self._asking = redis.Redis.from_url(self._redis.url, protocol=2)
        self._opened.callback(self._asking.close)
        self.token = secrets.token_urlsafe(32)
        self._tenants = self._folder / "tenants.toml"
        (self._folder / "token").write_text(self.token, encoding="ascii")
        self._tenants.write_text(
            '[[tenant]]\nname = "benchmark"\ntoken_file = "token"\n'
            f'salt = "{secrets.token_hex(16)}"\nmaps_pool = true\nadmin = true\n',
            encoding="ascii",
        )
        for path in self._folder.iterdir():
            path.chmod(0o600)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def command(self, **settings: str) -> tuple[list[str], str]:
        """The command line of a sidecar with a pool of its own, and its address."""
        self._number += 1
        address = f"unix:{self._folder}/{self._number}.sock"
        flags = {
            "pool_path": str(self._folder / f"{self._number}.pool"),
            "listen": address,
            "http_listen": "127.0.0.1:0",
            "tenants_file": str(self._tenants),
            "redis_url": self._redis.url,
            "redis_prefix": f"benchmark-{self._number}",
            "log_level": "warning",
            **settings,
        }
        named = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
        return [sys.executable, "-c", _SERVE, "serve", "--json", *named], address

    def sidecar(self, **settings: str) -> Running:
        """``kvstore serve`` with ``settings``, serving."""
        command, address = self.command(**settings)
        return self.run(command, address)

    def empty(self) -> Running:
        """A handler of the same message that does nothing, on a unix socket, in a process of its own."""
        self._number += 1
        address = f"unix:{self._folder}/{self._number}.sock"
        return self.run([sys.executable, str(_EMPTY), address], address)

    def run(self, command: list[str], address: str) -> Running:
        """Start a server and wait for the line in which it says that it serves."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self._folder)
        self._opened.callback(stop, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a server ended with status {process.wait()}: {' '.join(command)}")
        json.loads(line)
        return Running(process, address, self.token)

    def settle(self) -> None:
        """Wait until Redis has got what was queued for it: it would compete for the cores."""
        before, quiet = self._received(), 0
        while quiet < QUIET_POLLS:
            time.sleep(POLL_SECONDS)
            now = self._received()
            quiet = quiet + 1 if now - before < QUIET_BYTES else 0
            before = now

    def _received(self) -> int:
        received: int = self._asking.info("stats")["total_net_input_bytes"]
        return received


def seconds_to_serving(command: list[str], address: str) -> float:
    """From the start of a server process to the answer SERVING of its health service."""
    path = address.removeprefix("unix:")
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)
    try:
        while not _connects(path):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            time.sleep(0.002)
        with grpc.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            request = health_pb2.HealthCheckRequest()
            while check(request, timeout=STOP_SECONDS).status != health_pb2.HealthCheckResponse.SERVING:
                time.sleep(0.002)
        return time.perf_counter() - started
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """Tell a server to end, and see that it does."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def spec_of(name: str, payload_bytes: int) -> NamespaceSpec:
    """A namespace whose blocks have 16 tokens and ``payload_bytes``."""
    shape = KVShape(layers=1, planes=2, kv_heads=1, head_size=1)
    return NamespaceSpec(Namespace(name, "0", "uint8", "none", BLOCK_SIZE, shape), payload_bytes)


def _connects(path: str) -> bool:
    if not os.path.exists(path):  # noqa: PTH110 - a system call every two milliseconds
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
