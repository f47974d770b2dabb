"""Real servers for tests: one shared one, and ones that a test may kill, stop or fill."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.tiers.redis_embedded import EmbeddedRedis


class ValkeyServer:
    """A server on a port that it keeps when it is started again, with a client to look inside."""

    def __init__(self, directory: Path, settings: dict[str, str], binary: Path | None = None) -> None:
        self._directory = directory
        self._settings = settings
        self._binary = binary
        self._process = EmbeddedRedis.start(directory, settings=settings, binary=binary)
        self._stopped = False
        self.client = redis.Redis.from_url(self.url, protocol=2)

    @property
    def url(self) -> str:
        return self._process.url

    def url_of(self, user: str = "", database: int = 0) -> str:
        """The URL with ``user:password`` and a database."""
        login = f"{user}@" if user else ""
        return f"redis://{login}127.0.0.1:{self._process.port}/{database}"

    @property
    def port(self) -> int:
        return self._process.port

    def kill(self) -> None:
        """End the process as a crash does: no reply, no goodbye."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.close()

    def restart(self) -> None:
        """A new and empty process on the same port."""
        self._process.close()
        self._process = EmbeddedRedis.start(
            self._directory, port=self.port, settings=self._settings, binary=self._binary
        )

    def stop(self) -> None:
        """Freeze the process: its sockets stay open, nothing is read or answered."""
        os.kill(self._process.pid, signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)
        self._stopped = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped in the block of code, however that ends."""
        self.stop()
        try:
            yield
        finally:
            self.resume()

    def close(self) -> None:
        if self._stopped:
            self.resume()
        self.client.close()
        self._process.close()

    def setting(self, name: str) -> str:
        """What the server was started with."""
        return self._settings[name]

    def run(self, *words: str | int | bytes) -> Any:
        """A command that redis-py has no method for, or one whose reply it turns into something else."""
        run: Callable[..., Any] = self.client.execute_command
        return run(*words)

    def calls(self) -> dict[str, int]:
        """Commands by name since the last ``clear``, refused ones too; and how many keys were looked up."""
        stats = self.client.info("commandstats").items()
        calls = {
            name.removeprefix("cmdstat_"): values["calls"] + values["rejected_calls"]
            for name, values in stats
        }
        asked = self.client.info("stats")
        return calls | {"keys": asked["keyspace_hits"] + asked["keyspace_misses"]}

    def value(self, key: bytes) -> bytes:
        value = self.client.get(key)
        assert isinstance(value, bytes)
        return value

    def clear(self) -> None:
        self.client.flushall()
        self.client.config_resetstat()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="session")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"), {})
    yield server
    server.close()


@pytest.fixture
def valkey(shared_valkey: ValkeyServer) -> ValkeyServer:
    """A server that is empty, and that the test leaves running."""
    shared_valkey.clear()
    return shared_valkey


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """The distribution's own Redis, which is what most installations have."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH: apt-get install redis-server")
    server = ValkeyServer(tmp_path_factory.mktemp("redis"), {}, Path(binary))
    yield server
    server.close()


@pytest.fixture(params=["shared_valkey", "shared_redis"])
def any_server(request: pytest.FixtureRequest) -> ValkeyServer:
    """``valkey``, and once more with the distribution's Redis in its place."""
    server: ValkeyServer = request.getfixturevalue(request.param)
    server.clear()
    return server


@pytest.fixture
def start_valkey(tmp_path: Path) -> Iterator[Callable[..., ValkeyServer]]:
    """Starts servers that are the test's own, with the settings given by name, dashes as underscores."""
    started: list[ValkeyServer] = []

    def start(**settings: str) -> ValkeyServer:
        named = {name.replace("_", "-"): value for name, value in settings.items()}
        started.append(ValkeyServer(tmp_path / f"valkey-{len(started)}", named))
        return started[-1]

    yield start
    for server in started:
        server.close()
