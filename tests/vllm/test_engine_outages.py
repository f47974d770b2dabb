"""The sidecar is gone or does not answer: the engine is then plain vLLM, and comes back by itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.failpoints import Step
from tests.support.sidecars import Sidecar, sidecar
from tests.vllm.engines import Engine, engine, transfer_config
from tests.vllm.prompts import LONG, WARMUP, tokens
from tests.vllm.stored import await_blocks, await_idle, eventually

Plain = dict[str, list[int]]
WAITS = "vllm:kvstore_scheduler_wait_seconds_bucket_"
STORED = 1 + 31


@pytest.fixture(scope="module", params=["mapped", "streamed"])
def running(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sidecar, Engine]]:
    # A lease of which the engine never hears runs out by itself.
    with sidecar(pool_bytes="64MiB", lease_seconds=2) as server:
        config = transfer_config(
            server.address,
            map_pool=request.param == "mapped",
            lookup_seconds=0.3,
            rpc_seconds=0.5,
            transfer_seconds=1.0,
        )
        with engine(model, tmp_path_factory.mktemp("outage"), kv_transfer_config=config) as started:
            started.one(WARMUP)
            started.one(LONG)
            await_blocks(server, STORED)
            yield server, started


@pytest.fixture(autouse=True)
def goes_on(running: tuple[Sidecar, Engine]) -> Iterator[None]:
    yield
    server, _ = running
    if server.process.poll() is None:
        server.resume()


def waits(started: Engine) -> tuple[float, float, float]:
    """How often a step waited for answers: at all, for more than 5 ms, for more than 100 ms."""
    found = started.metrics()
    every = found[f"{WAITS}+Inf"]
    return every, every - found[f"{WAITS}0.005"], every - found[f"{WAITS}0.1"]


def assert_plain(started: Engine, plain: Plain, seconds: float = 5.0) -> None:
    """Right, not slow, and the scheduler waited at most 5 ms a step, but for pauses of a busy machine."""
    before = waits(started)
    output = started.one(LONG)
    assert output.tokens == plain["long"]
    assert output.seconds < seconds
    every, long, longest = (after - known for after, known in zip(waits(started), before, strict=True))
    assert long <= max(1, every / 10), f"{long} of {every} steps waited for more than 5 ms"
    assert longest == 0


def await_hit(started: Engine) -> None:
    eventually(lambda: started.one(LONG).cached > 0)


@pytest.mark.parametrize("step", [Step.ACQUIRE_ADMITTED, Step.ACQUIRE_PINNED, Step.RELEASE_ADMITTED], ids=str)
def test_stopped_while_it_is_asked(running: tuple[Sidecar, Engine], plain: Plain, step: Step) -> None:
    server, started = running
    server.arm(step)
    assert_plain(started, plain)
    server.await_stopped()
    assert_plain(started, plain)
    server.resume()
    await_hit(started)
    await_idle(server)


@pytest.mark.parametrize("step", [Step.WRITE_STAGED, Step.WRITE_COMMITTING, Step.WRITE_COMMITTED], ids=str)
def test_stopped_while_it_is_written_to(running: tuple[Sidecar, Engine], plain: Plain, step: Step) -> None:
    """A save that hangs holds nobody up; one that ends half-way leaves nothing (LMCache #4991)."""
    server, started = running
    server.arm(step)
    fresh = tokens(len(step.value), 200)
    expected = started.one(fresh).tokens
    server.await_stopped()
    assert_plain(started, plain)
    server.resume()
    await_hit(started)
    assert started.one(fresh).tokens == expected
    await_idle(server)


def test_stopped_before_it_is_asked(running: tuple[Sidecar, Engine], plain: Plain) -> None:
    server, started = running
    server.process.send_signal(signal.SIGSTOP)
    assert_plain(started, plain)
    assert_plain(started, plain)
    server.resume()
    await_hit(started)


def test_killed_and_started_again(running: tuple[Sidecar, Engine], plain: Plain) -> None:
    """One line when it goes and one when it is back; a counter meanwhile (LMCache #4642)."""
    server, started = running
    said = len(started.log)
    failures = started.counted("server_failures")
    server.kill()
    assert_plain(started, plain)
    assert_plain(started, plain)
    assert started.counted("server_failures") > failures
    server.start()
    await_hit(started)
    time.sleep(0.5)
    lines = [line for line in started.log[said:].splitlines() if "kvstore server" in line]
    gone = [line for line in lines if "is unreachable" in line]
    back = [line for line in lines if "answers again" in line]
    # Scheduler and worker each have a client that notices.
    assert 1 <= len(gone) <= 2
    assert 1 <= len(back) <= 2
    assert_plain(started, plain)
