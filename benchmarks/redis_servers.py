"""The servers that ``redis_tier.py`` measures against: one with a unix socket, and a cluster of three."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from kvstore.tiers.redis_embedded import EmbeddedRedis

_SLOTS = 16384
_FORM_SECONDS = 30.0


@contextmanager
def single_server() -> Iterator[tuple[EmbeddedRedis, Path]]:
    """A server, and the path of its unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        with EmbeddedRedis.start(
            Path(folder), maxmemory_bytes=2**31, settings={"unixsocket": str(path)}
        ) as one:
            yield one, path


@contextmanager
def cluster(nodes: int = 3) -> Iterator[tuple[str, list[Any]]]:
    """The URL of a cluster on this machine, and a redis-py client of each node."""
    with ExitStack() as stack:
        buses = [str(_free_port()) for _ in range(nodes)]
        servers = [
            stack.enter_context(EmbeddedRedis.start(settings={"cluster-enabled": "yes", "cluster-port": bus}))
            for bus in buses
        ]
        clients: list[Any] = [redis.Redis.from_url(server.url, protocol=2) for server in servers]
        for number, client in enumerate(clients):
            stack.callback(client.close)
            first, after = _SLOTS * number // nodes, _SLOTS * (number + 1) // nodes
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, after - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port, buses[0])
        deadline = time.perf_counter() + _FORM_SECONDS
        while not all(_knows_all(client, nodes) for client in clients):
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{nodes} nodes did not form a cluster within {_FORM_SECONDS:g} s")
            time.sleep(0.05)
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers), clients


def _knows_all(client: Any, nodes: int) -> bool:  # noqa: ANN401  redis-py annotates few of its functions
    state = client.execute_command("CLUSTER INFO")
    return bool(state["cluster_state"] == "ok" and int(state["cluster_size"]) == nodes)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
