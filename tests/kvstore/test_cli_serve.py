"""``kvstore serve`` as a process: what it says, how fast it serves, how it ends."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block import TierName
from kvstore.service.operator import Operator
from tests.support.command_line import kvstore, spawn


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
            assert operator.status().epoch == serving["epoch"]
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "grpc" in mapped
        assert "torch" not in mapped
        process.send_signal(number)
        out, messages = process.communicate(timeout=30)
    assert (process.returncode, out, messages) == (0, "", "")
    assert not (memory / "socket").exists()


def test_serve_tells_people_on_stderr(memory: Path) -> None:
    with spawn("serve", *settings_in(memory), "--log-level", "info") as process:
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
    assert "pool_bytes = 8 MiB (flag)" in text
    assert "block_size" not in text, "defaults are logged only where everything is"


@pytest.mark.redis
def test_serve_brings_a_redis_of_its_own(memory: Path) -> None:
    with spawn("serve", "--json", *settings_in(memory), "--redis-url", "embedded") as process:
        assert process.stdout is not None
        with Operator(json.loads(process.stdout.readline())["addresses"][0]) as operator:
            tiers = {tier.tier: tier for tier in operator.status().tiers}
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert (tiers[TierName.REDIS].healthy, tiers[TierName.REDIS].reason) == (True, "")
    assert not Path(f"/proc/{child}").exists()


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


def test_an_address_that_is_taken_is_an_error(memory: Path) -> None:
    with spawn("serve", "--json", *settings_in(memory)) as process:
        assert process.stdout is not None
        tcp = json.loads(process.stdout.readline())["addresses"][1]
        done = kvstore("serve", *settings_in(memory), "--pool-path", f"{memory}/other", "--listen", tcp)
        assert done.returncode == 2
        assert f"error: cannot listen on {tcp}" in done.stderr
        done = kvstore("serve", *settings_in(memory), "--listen", "127.0.0.1:0")
        assert done.returncode == 2
        assert f"error: pool file {memory}/pool" in done.stderr
        process.terminate()
        process.communicate(timeout=30)
