"""The server stops at each step of taking over the pool file of the one before: killed, delayed, or alone.

One test a step. Whatever happened: no block that was readable is lost, no byte wrong, nothing stays in
use, and clients of the server before go on by themselves (LMCache #4642).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvstore.failpoints import Step
from kvstore.service.client import Outcome
from tests.support.crash_checks import (
    POOL,
    check,
    fresh_client,
    resident_blocks,
    settle,
    status_of,
    write_whole,
)
from tests.support.crash_client import CrashClient
from tests.support.crash_servers import Servers, servers
from tests.support.sidecars import Sidecar
from tests.support.valkey import eventually

__all__ = ["servers"]

BLOCKS = 8
WARM, FRESH = 1, 2
LONG_SECONDS = 1.4

every_step = pytest.mark.parametrize(
    "step", [Step.ADOPTION_LOCKED, Step.ADOPTION_SCANNED, Step.ADOPTION_DONE], ids=str
)


@pytest.fixture
def server(servers: Servers) -> Sidecar:
    running = servers.empty(**POOL, lease_seconds=1, write_seconds=1)
    with fresh_client(running) as namespace:
        assert write_whole(namespace, WARM, BLOCKS) == BLOCKS
    return running


@pytest.fixture
def client(server: Sidecar) -> Iterator[CrashClient]:
    """A client that holds a lease, and a write that it has begun."""
    with CrashClient(server.address) as running:
        assert running.ask("hold", number=WARM, blocks=BLOCKS)["promised"] == BLOCKS
        assert running.ask("begin", number=FRESH, blocks=BLOCKS)["status"] == ["yours"] * BLOCKS
        yield running


def stop_in_adoption(server: Sidecar, step: Step) -> None:
    """The server dies with all that, and its successor stops itself at the step."""
    server.kill()
    server.stop_at = {step: 1}
    server.launch()
    server.await_stopped()


def check_taken_over(server: Sidecar, before: int) -> None:
    assert status_of(server).epoch > before, "clients have to notice"
    assert status_of(server).adopted_blocks == BLOCKS
    assert resident_blocks(server, WARM, BLOCKS) == BLOCKS
    assert resident_blocks(server, FRESH, BLOCKS) == 0
    settle(server)
    check(server)


def go_on(client: CrashClient) -> None:
    """What was begun at the server before is over; what is asked now is answered."""
    answer = client.ask("finish", number=FRESH, blocks=BLOCKS)
    assert (answer["outcome"], answer["committed"]) == (Outcome.LOST, 0)
    client.ask("forget", number=WARM)

    def reads() -> bool:
        answer = client.ask("read", number=WARM, blocks=BLOCKS)
        assert answer["wrong"] == 0
        return bool(answer["valid"] == BLOCKS)

    assert eventually(reads)


@every_step
def test_killed_once_more(step: Step, server: Sidecar, client: CrashClient) -> None:
    before = status_of(server).epoch
    stop_in_adoption(server, step)
    server.restart()
    go_on(client)
    check_taken_over(server, before)


@every_step
def test_takes_its_time(step: Step, server: Sidecar, client: CrashClient) -> None:
    before = status_of(server).epoch
    stop_in_adoption(server, step)
    time.sleep(LONG_SECONDS)
    server.resume()
    server.await_serving()
    go_on(client)
    check_taken_over(server, before)


@every_step
def test_client_is_killed_meanwhile(step: Step, server: Sidecar, client: CrashClient) -> None:
    before = status_of(server).epoch
    stop_in_adoption(server, step)
    client.kill()
    server.resume()
    server.await_serving()
    check_taken_over(server, before)
