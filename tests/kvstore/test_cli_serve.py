"""``kvstore serve`` as a process: what it says, how fast it serves, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block import TierName
from kvstore.service.client import Client
from kvstore.service.operator import Operator
from tests.support.clients import put
from tests.support.command_line import kvstore, spawn
from tests.support.stores import make_chain, make_spec
from tests.support.valkey import eventually


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def settings_in(memory: Path) -> tuple[str, ...]:
    return (
        "--pool-path",
        f"{memory}/pool",
        "--pool-bytes",
        "8MiB",
        "--extent-bytes",
        "1MiB",
        "--listen",
        f"unix:{memory}/socket,127.0.0.1:0",
        "--http-listen",
        "127.0.0.1:0",
        "--log-level",
        "error",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_where_it_is_and_ends_in_order(memory: Path, number: signal.Signals) -> None:
    with spawn("serve", "--json", *settings_in(memory)) as process:
        assert process.stdout is not None
        serving = json.loads(process.stdout.readline())
        socket, tcp = serving["addresses"]
        assert socket == f"unix:{memory}/socket"
        assert tcp.startswith("127.0.0.1:")
        assert not tcp.endswith(":0")
        assert (serving["pool_path"], serving["pool_bytes"]) == (f"{memory}/pool", 8 << 20)
        for address in serving["addresses"]:
            with Operator(address) as operator:
                assert operator.lookup_all([]) == []
        with Operator(socket) as operator:
            assert str(operator.status().epoch) == serving["epoch"]
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "grpc" in mapped
        assert "torch" not in mapped
        process.send_signal(number)
        out, messages = process.communicate(timeout=30)
    assert (process.returncode, out, messages) == (0, "", "")
    assert not (memory / "socket").exists()


def test_serve_tells_people_on_stderr(memory: Path) -> None:
    log = memory / "log"
    with spawn("serve", *settings_in(memory), "--log-level", "info", "--log-file", str(log)) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while not any(line.startswith("live page, metrics and health: ") for line in lines):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        process.terminate()
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    text = "".join(lines)
    assert f"serving on unix:{memory}/socket\n" in text
    assert f"pool: {memory}/pool, 8 MiB; " in text
    told = log.read_text()
    assert "pool_bytes = 8 MiB (flag)" in told
    assert "block_size" not in told, "defaults are logged only where everything is"
    assert told.splitlines()[-1].endswith(" INFO kvstore.serve: ended")


@pytest.mark.redis
def test_serve_brings_a_redis_of_its_own_and_another_where_that_is_killed(memory: Path) -> None:
    told = "--log-format", "json", "--log-level", "info"
    with spawn("serve", *settings_in(memory), *told, "--redis-url", "embedded") as process:
        assert eventually((memory / "socket").exists, 30)
        spec = make_spec("kept")
        chain = make_chain(spec, "abcd")
        with Operator(f"unix:{memory}/socket") as operator, Client(f"unix:{memory}/socket") as client:

            def is_in_redis() -> bool:
                return client.namespace(spec).lookup(chain, tiers=[TierName.REDIS]).matched_tokens > 0

            (first,) = children_of(process)
            put(client.namespace(spec), chain)
            assert eventually(is_in_redis)
            os.kill(first, signal.SIGKILL)
            assert eventually(lambda: children_of(process) not in ([first], []), 20)
            (second,) = children_of(process)
            assert not is_in_redis()

            def is_stored_again() -> bool:
                operator.clear()  # what was stored before it was back is not sent again
                put(client.namespace(spec), chain)
                return is_in_redis()

            assert eventually(is_stored_again, 20)
            redis = {tier.tier: tier for tier in operator.status().tiers}[TierName.REDIS]
            assert (redis.healthy, redis.reason) == (True, "")
        process.terminate()
        _, messages = process.communicate(timeout=30)
    assert process.returncode == 0
    assert not Path(f"/proc/{second}").exists()
    log = [json.loads(line)["message"] for line in messages.splitlines()]
    life = ["serving on ", "the embedded redis was ended by signal 9", "draining for ", "ended"]
    assert [part for part in life if any(line.startswith(part) for line in log)] == life
    assert log[-1] == "ended"


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """Those of all threads."""
    lists = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("--pool-bytes", "1MiB", "--extent-bytes", "2MiB"), "pool_bytes = 1 MiB is less than one extent"),
        (("--listen", "unix:/proc/nowhere/socket"), "cannot listen on unix:/proc/nowhere/socket"),
        (("--listen", "0.0.0.0:0"), "may be reached from other machines, which needs tenants_file"),
        (("--tenants-file", "/proc/nowhere/tenants"), "/proc/nowhere/tenants"),
        (("--config", "/proc/nowhere/kvstore.toml"), "/proc/nowhere/kvstore.toml cannot be read"),
        (("--extent-bytes", "3"), "flag --extent-bytes = '3': expected greater than or equal to 4096"),
        (
            ("--extent-bytes", "4096", "--pool-bytes", "2GiB"),
            "at most 262144 are possible: raise extent_bytes",
        ),
        (("--pool-bytes", "900TiB", "--extent-bytes", "4GiB"), "pool_bytes is 989560464998400, but "),
    ],
)
def test_a_server_that_cannot_start_says_why(memory: Path, setting: tuple[str, ...], message: str) -> None:
    done = kvstore("serve", *settings_in(memory), *setting)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_log_file_says_why_a_server_did_not_start(memory: Path) -> None:
    log = memory / "log"
    done = kvstore("serve", *settings_in(memory), "--tenants-file", "/nowhere", "--log-file", str(log))
    assert done.returncode == 2
    assert "ERROR kvstore.commands.serving: ended: tenants_file /nowhere cannot be read" in log.read_text()


def test_an_address_that_is_taken_is_an_error(memory: Path) -> None:
    with spawn("serve", "--json", *settings_in(memory)) as process:
        assert process.stdout is not None
        tcp = json.loads(process.stdout.readline())["addresses"][1]
        done = kvstore("serve", *settings_in(memory), "--pool-path", f"{memory}/other", "--listen", tcp)
        assert done.returncode == 2
        assert f"error: cannot listen on {tcp}: Address already in use" in done.stderr
        assert "add_port" not in done.stderr, "gRPC's own lines say less, in front of ours"
        done = kvstore("serve", *settings_in(memory), "--listen", "127.0.0.1:0")
        assert done.returncode == 2
        assert f"error: pool file {memory}/pool" in done.stderr
        process.terminate()
        process.communicate(timeout=30)
