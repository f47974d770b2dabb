"""Every way to reach a server: each a fixture with a URL, a client to look inside, and ``clear``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.redis_fleets import ClusterFleet, SentinelFleet
from tests.support.redis_tls import start_tls
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
