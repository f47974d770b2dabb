"""What the entry points run, as they spell it: on loopback, with a small pool, and paths of this test."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis

from kvstore.tiers.redis_embedded import find_server
from tests.support.command_line import environment
from tests.support.deployed import compose_services, free_port, instruction, manifests
from tests.support.stubs import dialled, spec, tokens_of
from tests.support.valkey import eventually

SMALL = "16MiB"
STOP_SECONDS = 30.0
_SIZE = re.compile(r"^\d+gb$")


@dataclass(frozen=True)
class Server:
    """What an entry point started."""

    process: subprocess.Popen[bytes]
    http_port: int
    socket: str

    def get(self, path: str, seconds: float = 10.0) -> int:
        """The status of a page; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.http_port}{path}", timeout=seconds
            ) as answer:
                return int(answer.status)
        except OSError as error:
            return int(getattr(error, "code", 0))

    def healthcheck(self) -> int:
        """The exit status of the Dockerfile's."""
        name, *arguments = instruction("HEALTHCHECK")
        assert name == "python"
        told = [argument.replace(":9470/", f":{self.http_port}/") for argument in arguments]
        done = subprocess.run([sys.executable, *told], capture_output=True, timeout=30, check=False)
        return done.returncode


@contextmanager
def started(arguments: list[str], settings: Mapping[str, str], redis_port: int) -> Iterator[Server]:
    """The image's entry point with these arguments and settings, until it is told to stop."""
    assert instruction("ENTRYPOINT") == ["kvstore"]
    port = free_port()
    with TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as memory:
        places = {
            "KVSTORE_POOL_PATH": f"{memory}/prefix-kvstore.pool",
            "KVSTORE_LISTEN": f"unix:{memory}/prefix-kvstore.sock",
            "KVSTORE_POOL_BYTES": SMALL,
            "KVSTORE_EXTENT_BYTES": "1MiB",
        }
        assert settings["KVSTORE_HTTP_LISTEN"] == ":9470"
        given = {
            **settings,
            "KVSTORE_HTTP_LISTEN": f"127.0.0.1:{port}",
            "KVSTORE_REDIS_URL": settings["KVSTORE_REDIS_URL"].replace(
                "valkey:6379", f"127.0.0.1:{redis_port}"
            ),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *arguments],
            env=environment() | given | places,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Server(process, port, places["KVSTORE_LISTEN"])
        finally:
            process.kill()
            process.wait()


@pytest.fixture(name="cache", scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """Valkey, as the compose file starts it."""
    port = free_port()
    name, *arguments = compose_services()["valkey"]["command"]
    assert name == "valkey-server"
    process = subprocess.Popen(
        [find_server(), *arguments, "--port", str(port), "--bind", "127.0.0.1"],
        cwd=tmp_path_factory.mktemp("valkey"),
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=port, protocol=2)
    try:
        assert eventually(lambda: answers(client), 20)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(STOP_SECONDS)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def port_of(client: redis.Redis) -> int:
    port: int = client.connection_pool.connection_kwargs["port"]
    return port


def test_the_cache_forgets_by_itself_and_keeps_nothing_on_disk(cache: redis.Redis) -> None:
    settings: Any = cache.config_get("*")
    wanted = {"maxmemory-policy": "allkeys-lru", "save": "", "appendonly": "no"}
    assert {name: settings[name] for name in wanted} == wanted
    assert int(settings["maxmemory"]) > 0


def test_the_cache_of_kubernetes_is_the_same_with_more_memory() -> None:
    [container] = manifests("Deployment")["valkey"]["spec"]["template"]["spec"]["containers"]
    command = compose_services()["valkey"]["command"]
    assert [_SIZE.sub("", each) for each in container["args"]] == [_SIZE.sub("", each) for each in command]


def test_compose_serves_through_the_cache(cache: redis.Redis) -> None:
    """It becomes healthy, stores in Valkey, and ends in order."""
    service = compose_services()["kvstore"]
    with started(service["command"], service["environment"], port_of(cache)) as server:
        assert eventually(lambda: server.get("/readyz") == 200, STOP_SECONDS)
        assert server.healthcheck() == 0
        assert [server.get(path) for path in ("/", "/metrics", "/live.json")] == [200] * 3
        with dialled(server.socket) as raw:
            raw.register(spec("m")).write(tokens_of(5))
            assert eventually(lambda: cache.dbsize() == 5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_SECONDS) == 0
        assert server.healthcheck() != 0


def test_kubernetes_probes_find_the_sidecar(cache: redis.Redis) -> None:
    pod = manifests("Deployment")["engine"]["spec"]["template"]["spec"]
    [sidecar] = pod["initContainers"]
    settings = {each["name"]: each["value"] for each in sidecar["env"]}
    with started(sidecar["args"], settings, port_of(cache)) as server:
        startup, liveness = (sidecar[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness"))
        assert eventually(lambda: server.get(startup) == 200, STOP_SECONDS)
        assert server.get(liveness) == 200
        server.process.send_signal(signal.SIGSTOP)
        try:
            assert server.get(liveness, 1.0) == 0, "a process that is stuck is found"
        finally:
            server.process.send_signal(signal.SIGCONT)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_SECONDS) == 0


def test_the_image_serves_without_arguments() -> None:
    assert instruction("CMD") == compose_services()["kvstore"]["command"] == ["serve"]


def test_engines_are_given_the_same_connector() -> None:
    """One engine command in the compose file and in the manifests, which the connector's tests run."""
    [engine] = manifests("Deployment")["engine"]["spec"]["template"]["spec"]["containers"]
    assert compose_services()["vllm"]["command"] == engine["args"]
