"""Every way to reach a server: each a fixture with a URL, a client to look inside, and ``clear``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_fleets import ClusterFleet, SentinelFleet, free_port
from tests.support.valkey import ValkeyServer

NEEDED_COMMANDS = ["+get", "+set", "+exists", "+pttl", "+pexpire", "+unlink"]
"""All that a user of the tier has to be allowed, on the keys under its prefix."""


@dataclass(frozen=True)
class Way:
    """How a tier reaches the server that ``client`` looks into."""

    url: str
    client: Any
    clear: Callable[[], None]


@pytest.fixture(scope="session")
def shared_unix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    path = tmp_path_factory.mktemp("unix") / "redis.sock"
    server = ValkeyServer(path.parent, {"unixsocket": str(path)})
    yield Way(f"unix://{path}", server.client, server.clear)
    server.close()


@pytest.fixture(scope="session")
def shared_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    server, query = start_tls(tmp_path_factory.mktemp("tls"))
    yield Way(f"rediss://127.0.0.1:{server.setting('tls-port')}?{query}", server.client, server.clear)
    server.close()


def start_tls(folder: Path, **settings: str) -> tuple[ValkeyServer, str]:
    """The distribution's Redis, which has TLS, and what a URL needs: both sides show certificates."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH: apt-get install redis-server")
    make_certificates(folder)
    tls = {
        "tls-port": str(free_port()),
        "tls-ca-cert-file": str(folder / "ca.pem"),
        "tls-cert-file": str(folder / "server.pem"),
        "tls-key-file": str(folder / "server.key"),
    }
    own = f"ssl_certfile={folder}/server.pem&ssl_keyfile={folder}/server.key"
    return ValkeyServer(folder, tls | settings, Path(binary)), f"ssl_ca_certs={folder}/ca.pem&{own}"


@pytest.fixture(scope="session")
def shared_acl(shared_valkey: ValkeyServer) -> Way:
    """A user with a password that URLs cannot hold as it is, who may do no more than is needed."""
    server = shared_valkey
    server.client.acl_setuser(
        "kv", enabled=True, passwords=["+p@ss:/?word"], commands=NEEDED_COMMANDS, keys=["kv:*"]
    )
    return Way(server.url_of("kv:p%40ss%3A%2F%3Fword"), server.client, server.clear)


@pytest.fixture(scope="session")
def shared_sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelFleet]:
    with SentinelFleet(tmp_path_factory.mktemp("sentinel")) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterFleet]:
    with ClusterFleet(tmp_path_factory.mktemp("cluster")) as fleet:
        yield fleet


def make_certificates(folder: Path) -> None:
    """A private authority, ca.pem, and what it signed for 127.0.0.1: server.pem with server.key."""
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {key} -days 1 -subj /CN=authority -keyout ca.key -out ca.pem",
        f"req {key} -subj /CN=server -addext subjectAltName=IP:127.0.0.1 -keyout server.key -out request",
        "x509 -req -in request -CA ca.pem -CAkey ca.key -days 1 -copy_extensions copy -out server.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
