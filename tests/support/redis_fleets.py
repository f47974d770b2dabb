"""Servers that belong together: a Sentinel with a primary and its replica, and a Cluster."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from kvstore.tiers.redis_connection import slot_of
from kvstore.tiers.redis_embedded import find_server
from tests.support.redis_tls import make_certificates, start_tls, tls_server, tls_settings
from tests.support.valkey import ValkeyServer, eventually

SERVICE = "blocks"
_WITH_REPLICAS = {"cluster-replica-validity-factor": "0", "repl-diskless-sync-delay": "0"}
_SLOTS = 16384
_PRIMARIES = 3


class Fleet:
    """Servers and the URL by which a tier reaches them all."""

    url: str
    client: Any
    """Of redis-py, for what a test looks at or damages."""

    def clear(self) -> None:
        raise NotImplementedError

    def __init__(self) -> None:
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.stack.close()

    def start(self, folder: Path, settings: dict[str, str]) -> ValkeyServer:
        folder.mkdir()
        server = ValkeyServer(folder, settings)
        self.stack.callback(server.close)
        return server


class SentinelFleet(Fleet):
    """A primary, a replica, and a sentinel that makes the replica the primary within a second or two.

    With TLS, nobody speaks to anybody without it, but for the tests' own clients of the servers.
    """

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        super().__init__()
        self._certificates = make_certificates(folder) if tls else None
        settings = {"repl-diskless-sync-delay": "0", "repl-timeout": "2"}
        self.primary = self._start_one(folder / "primary", settings)
        self.replica = self._start_one(folder / "replica", settings)
        self.replica.client.replicaof("127.0.0.1", self.port_of(self.primary))
        self.client = self.primary.client
        self._start_sentinel(folder)
        # A sentinel that is not there comes first: it costs nothing but the next one's answer.
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self._port}/{SERVICE}"
        self.url = f"rediss+sentinel://{hosts}?{self._query}" if tls else f"redis+sentinel://{hosts}"

    def clear(self) -> None:
        self.primary.clear()

    def port_of(self, server: ValkeyServer) -> int:
        """Where others reach it."""
        return int(server.setting("tls-port")) if self._certificates else server.port

    def _start_one(self, folder: Path, settings: dict[str, str]) -> ValkeyServer:
        if self._certificates is None:
            return self.start(folder, settings)
        folder.mkdir()
        secure = settings | {"tls-replication": "yes"}
        server, self._query = start_tls(folder, self._certificates, **secure)
        self.stack.callback(server.close)
        return server

    def _start_sentinel(self, folder: Path) -> None:
        configuration = folder / "sentinel.conf"
        settings = {"port": str(free_port()), "bind": "127.0.0.1", "dir": str(folder)}
        self._port, binary = int(settings["port"]), find_server()
        client_settings: dict[str, Any] = {"host": "127.0.0.1"}
        if self._certificates is not None:
            settings |= tls_settings(self._certificates) | {"port": "0", "tls-replication": "yes"}
            self._port, binary = int(settings["tls-port"]), tls_server()
            names = {"ca_certs": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}
            client_settings |= {f"ssl_{name}": self._certificates / file for name, file in names.items()}
            client_settings["ssl"] = True
        configuration.write_text(
            "".join(f"{name} {value}\n" for name, value in settings.items())
            + f"sentinel monitor {SERVICE} 127.0.0.1 {self.port_of(self.primary)} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 300\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        self._sentinel = subprocess.Popen(
            [binary, configuration, "--sentinel"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.stack.callback(self.stop_sentinel)
        self.sentinel = redis.Redis(port=self._port, protocol=2, decode_responses=True, **client_settings)
        self.stack.callback(self.sentinel.close)
        assert eventually(self._is_ready, 10), "the sentinel does not see primary and replica"

    def stop_sentinel(self) -> None:
        self._sentinel.terminate()
        self._sentinel.wait()

    def point_sentinel_at(self, server: ValkeyServer) -> None:
        """Have the sentinel name another primary, as it does after a failover."""
        self.sentinel.sentinel_remove(SERVICE)
        self.sentinel.sentinel_monitor(SERVICE, "127.0.0.1", server.port, 1)
        assert eventually(lambda: self._state()["flags"] == "master", 10)

    def role_of_replica(self) -> str:
        """``slave`` before a failover, ``master`` after it, nothing while it closes all connections."""
        try:
            return str(self.replica.client.info("replication")["role"])
        except redis.ConnectionError:
            return ""

    def _state(self) -> Any:
        return self.sentinel.sentinel_master(SERVICE)

    def _is_ready(self) -> bool:
        try:
            state = self._state()
        except redis.ConnectionError:
            return False
        return bool(state["num-slaves"] == 1 and state["flags"] == "master" and self._is_linked())

    def _is_linked(self) -> bool:
        return bool(self.replica.client.info("replication")["master_link_status"] == "up")


class ClusterFleet(Fleet):
    """Three primaries that share the slots evenly, and replicas of the first ones."""

    def __init__(self, folder: Path, *, replicas: int = 0, timeout_ms: int = 2000) -> None:
        """A node that is silent for ``timeout_ms`` is taken for dead by the others."""
        super().__init__()
        folder.mkdir(exist_ok=True)
        settings = _WITH_REPLICAS | {"cluster-node-timeout": str(timeout_ms)}
        self.nodes = [
            self.start(folder / f"node-{number}", settings | cluster_settings())
            for number in range(_PRIMARIES + replicas)
        ]
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])
        edges = [_SLOTS * number // _PRIMARIES for number in range(_PRIMARIES + 1)]
        for node, first, after in zip(self.nodes, edges, edges[1:], strict=False):
            node.run("CLUSTER ADDSLOTSRANGE", first, after - 1)
        for epoch, node in enumerate(self.nodes, 1):
            node.run("CLUSTER SET-CONFIG-EPOCH", epoch)
            bus = self.nodes[0].setting("cluster-port")
            node.run("CLUSTER MEET", "127.0.0.1", self.nodes[0].port, bus)
        assert eventually(lambda: all(map(self._is_ready, self.nodes)), 20), "the cluster does not form"
        for node, primary in zip(self.nodes[_PRIMARIES:], self.nodes, strict=False):
            assert eventually(partial(self._replicates, node, primary), 10)
        self.client = redis.RedisCluster(host="127.0.0.1", port=self.nodes[0].port, protocol=2)
        self.stack.callback(self.client.close)

    def clear(self) -> None:
        for node in self.nodes:
            if node.client.info("replication")["role"] == "master":
                node.clear()

    def node_of(self, tag: bytes) -> ValkeyServer:
        """Who has a segment."""
        return next(node for node in self.nodes if slot_of(tag) in self._slots_of(node))

    def id_of(self, node: ValkeyServer) -> str:
        identity: bytes = node.run("CLUSTER MYID")
        return identity.decode()

    def begin_move(self, slot: int, source: ValkeyServer, target: ValkeyServer) -> None:
        """Mark a slot as on its way; its keys stay where they are."""
        target.run("CLUSTER SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.run("CLUSTER SETSLOT", slot, "MIGRATING", self.id_of(target))

    def move_keys(self, keys: Sequence[bytes], source: ValkeyServer, target: ValkeyServer) -> None:
        source.run("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)

    def end_move(self, slot: int, source: ValkeyServer, target: ValkeyServer) -> None:
        """The slot is the target's, and every node knows."""
        for node in (target, source, *self.nodes):
            node.run("CLUSTER SETSLOT", slot, "NODE", self.id_of(target))

    def _is_ready(self, node: ValkeyServer) -> bool:
        state = node.run("CLUSTER INFO")
        return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == len(self.nodes)

    def _replicates(self, node: ValkeyServer, primary: ValkeyServer) -> bool:
        if node.client.info("replication")["role"] == "master":
            node.run("CLUSTER REPLICATE", self.id_of(primary))
        return bool(node.client.info("replication").get("master_link_status") == "up")

    @staticmethod
    def _slots_of(node: ValkeyServer) -> set[int]:
        slots: set[int] = set()
        for first, last, primary, *_ in node.run("CLUSTER SLOTS"):
            if primary[1] == node.port:
                slots.update(range(first, last + 1))
        return slots


def cluster_settings() -> dict[str, str]:
    """Of a node. The port of its bus, by default 10,000 above its own, need not exist."""
    return {"cluster-enabled": "yes", "cluster-port": str(free_port())}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
