"""The stores that vLLM benchmarks compare, as processes on one Valkey: our sidecar, and LMCache's server.

LMCache 0.5.6 takes part where it is installed beside vLLM: its wheel without dependencies, with those
that its server imports. On a CPU only its server mode runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from kvstore.block import TierName
from kvstore.service.operator import Operator
from kvstore.tiers.redis_embedded import EmbeddedRedis

SECONDS = 60.0
CHUNK_TOKENS = 256
"""What LMCache stores as one; its default."""
_QUIET_SECONDS = 0.6
HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None


@dataclass(frozen=True)
class Store:
    """A store that serves; ``granule`` is what it finds prefixes in multiples of, at least a block."""

    name: str
    transfer: dict[str, Any]
    granule: int
    redis: EmbeddedRedis
    idle: Callable[[], bool]
    empty_memory: Callable[[], None]

    def settle(self) -> None:
        """Wait until nothing is held any more, and Redis has all that it is to get."""
        deadline, keys, since = time.monotonic() + SECONDS, -1, time.monotonic()
        with redis.Redis.from_url(self.redis.url) as client:
            while not self.idle() or time.monotonic() - since < _QUIET_SECONDS:
                found = client.dbsize()
                if found != keys:
                    keys, since = found, time.monotonic()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} is not idle after {SECONDS:g} s")
                time.sleep(0.05)

    def leave_to_redis(self) -> None:
        """What is stored is in Redis alone afterwards."""
        self.settle()
        self.empty_memory()


@contextmanager
def ours(server: EmbeddedRedis) -> Iterator[Store]:
    """A sidecar with room for everything."""
    with tempfile.TemporaryDirectory(prefix="kvstore-benchmark-", dir="/dev/shm") as folder:
        flags = (
            f"--json --pool-path {folder}/pool --listen unix:{folder}/socket --http-listen none "
            f"--pool-bytes 1GiB --redis-url {server.url} --redis-queue-bytes 512MiB --log-level warning"
        )
        command = [sys.executable, "-m", "kvstore", "serve", *flags.split()]
        address = f"unix:{folder}/socket"
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process, Operator(address) as asking:
            assert process.stdout is not None
            process.stdout.readline()

            def idle() -> bool:
                status = asking.status()
                return not (status.leases or status.writes)

            transfer = {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "kvstore.connectors.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "address": address,
                    "redis_seconds": 5.0,
                    "lookup_seconds": 10.0,
                },
            }
            try:
                yield Store("ours", transfer, 1, server, idle, lambda: _forget(asking))
            finally:
                process.terminate()


def _forget(asking: Operator) -> None:
    asking.clear(tiers=[TierName.HOST])


@contextmanager
def lmcache(server: EmbeddedRedis) -> Iterator[Store]:
    """LMCache's server, with shared memory and the same Valkey."""
    port, http = _free_port(), _free_port()
    place = {"type": "resp", "host": "127.0.0.1", "port": server.port}
    flags = (
        f"server --port {port} --http-port {http} --chunk-size {CHUNK_TOKENS} --eviction-policy LRU "
        f"--supported-transfer-mode auto --shm-name kvstore-benchmark-{os.getpid()} --no-l1-use-lazy "
        "--l1-size-gb 1 --l1-init-size-gb 1 --disable-observability"
    )
    command = [sys.executable, "-m", "lmcache.cli.main", *flags.split(), "--l2-adapter", json.dumps(place)]
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1"}
    url = f"http://127.0.0.1:{http}"
    with subprocess.Popen(command, env=os.environ | quiet, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not _answers(f"{url}/healthcheck"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("LMCache's server does not answer; its messages are above")
                time.sleep(0.2)
            transfer = {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                },
            }
            clear = urllib.request.Request(f"{url}/cache/clear", method="POST")
            yield Store("lmcache", transfer, CHUNK_TOKENS, server, lambda: True, lambda: _send(clear))
        finally:
            process.terminate()


def _send(request: urllib.request.Request) -> None:
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


def _answers(url: str) -> bool:
    try:
        _send(urllib.request.Request(url))
    except (urllib.error.URLError, OSError):
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
