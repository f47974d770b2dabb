"""The server stops at each step between two changes: it is killed there, goes on later, or loses its client.

One test a step and a crash. Whatever happened: blocks are there whole or not at all, nothing stays
in use, the books balance, and the same client goes on by itself (LMCache #987 #1034 #1130 #1756
#3381 #4642 #4991 #5090).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.block import TierName
from kvstore.failpoints import Step
from kvstore.service.client import Outcome
from kvstore.service.operator import Operator
from kvstore.service.reports import ServerStatus
from tests.support.crash_blocks import BLOCK_SIZE
from tests.support.crash_checks import POOL, check, resident_blocks, settle
from tests.support.crash_client import CrashClient
from tests.support.crash_servers import Servers, servers
from tests.support.sidecars import Sidecar
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, valkey

__all__ = ["servers", "shared_valkey", "valkey"]

BLOCKS = 8
WARM, COLD, FRESH, OTHER = 1, 2, 3, 4
BRIEF_SECONDS = 0.15
"""Of a stop that nobody notices: less than the client waits for an answer."""
LONG_SECONDS = 1.4
"""Of one after which all deadlines have passed."""

READS = [Step.ACQUIRE_ADMITTED, Step.ACQUIRE_PINNED, Step.RELEASE_ADMITTED]
WRITES = [Step.WRITE_STAGED, Step.WRITE_COMMITTING, Step.WRITE_COMMITTED]
PROMOTIONS = [
    Step.PROMOTION_PROBED,
    Step.PROMOTION_STAGED,
    Step.PROMOTION_LOADED,
    Step.PROMOTION_COMMITTED,
]
STEPS = [*READS, *WRITES, *(pytest.param(step, marks=pytest.mark.redis) for step in PROMOTIONS)]

every_step = pytest.mark.parametrize("step", STEPS, ids=str)


@pytest.fixture
def server(servers: Servers, step: Step, request: pytest.FixtureRequest) -> Sidecar:
    """A server with a small pool and short deadlines, and with Valkey below it where the step needs one."""
    settings: dict[str, Any] = {**POOL, "lease_seconds": 1, "write_seconds": 1}
    if step in PROMOTIONS:
        below: ValkeyServer = request.getfixturevalue("valkey")
        settings |= {"redis_url": below.url, "redis_probe_seconds": 2, "redis_acquire_seconds": 4}
    return servers.empty(**settings)


@pytest.fixture
def client(server: Sidecar) -> Iterator[CrashClient]:
    with CrashClient(server.address) as running:
        yield running


def prepare(server: Sidecar, client: CrashClient, step: Step, request: pytest.FixtureRequest) -> None:
    """WARM is in memory; COLD, for a promotion, in redis alone."""
    assert client.ask("write", number=WARM, blocks=BLOCKS)["committed"] == BLOCKS
    if step in PROMOTIONS:
        below: ValkeyServer = request.getfixturevalue("valkey")
        assert client.ask("write", number=COLD, blocks=BLOCKS)["committed"] == BLOCKS
        assert eventually(lambda: below.client.dbsize() == 2 * BLOCKS)
        forget(server)


def forget(server: Sidecar) -> None:
    settle(server)
    with Operator(server.address) as operator:
        assert operator.clear(tiers=[TierName.HOST]).held_blocks == 0


def begin(client: CrashClient, step: Step, fresh: int = FRESH) -> None:
    """Tell the client to do what leads to the step."""
    if step in WRITES:
        client.tell("write", number=fresh, blocks=BLOCKS)
    elif step in PROMOTIONS:
        client.tell("read", number=COLD, blocks=BLOCKS, wait=4.0)
    else:
        client.tell("read", number=WARM, blocks=BLOCKS)


def stop_at(server: Sidecar, client: CrashClient, step: Step, fresh: int = FRESH) -> None:
    server.arm(step)
    begin(client, step, fresh)
    server.await_stopped()


def check_written(server: Sidecar, step: Step) -> None:
    """What was being written is there whole or not at all; and as the step says, where that is certain."""
    found = resident_blocks(server, FRESH, BLOCKS)
    if step is Step.WRITE_COMMITTED:
        assert found == BLOCKS
    elif step is Step.WRITE_STAGED:
        assert found == 0
    else:
        assert found in (0, BLOCKS)


@every_step
def test_server_is_killed(
    step: Step, server: Sidecar, client: CrashClient, request: pytest.FixtureRequest
) -> None:
    prepare(server, client, step, request)
    stop_at(server, client, step)
    server.restart()
    if step in WRITES:
        assert client.answer()["outcome"] == Outcome.UNREACHABLE
    else:
        answer = client.answer()
        assert answer["wrong"] == 0
        # Whoever had read by then has what was promised; all others know that there was nobody.
        assert (answer["valid"], answer["outcome"]) in ((BLOCKS, Outcome.OK), (0, Outcome.UNREACHABLE))
    # The blocks were there before, and the same client reads and writes on, with nothing started anew.
    wanted = COLD if step in PROMOTIONS else WARM
    assert eventually(lambda: goes_on(client, wanted))
    settle(server)
    check_written(server, step)
    check(server)


def goes_on(client: CrashClient, number: int) -> bool:
    answer = client.ask("read", number=number, blocks=BLOCKS, wait=2.0)
    assert answer["wrong"] == 0
    return bool(answer["valid"] == BLOCKS)


@every_step
def test_server_goes_on(
    step: Step, server: Sidecar, client: CrashClient, request: pytest.FixtureRequest
) -> None:
    """First before anybody has missed it, which nobody notices; then after all deadlines."""
    prepare(server, client, step, request)
    before = settle(server)
    stop_at(server, client, step, fresh=OTHER)
    time.sleep(BRIEF_SECONDS)
    server.resume()
    check_unnoticed(server, client.answer(), step, before)
    if step in PROMOTIONS:
        forget(server)
    stop_at(server, client, step)
    time.sleep(LONG_SECONDS)
    server.resume()
    answer = client.answer()
    assert (answer.get("wrong", 0), answer.get("committed", 0)) == (0, 0)
    # The client lives on and knows of nothing that it has: then it has nothing.
    settle(server)
    check_written(server, step)
    assert eventually(lambda: goes_on(client, COLD if step in PROMOTIONS else WARM))
    check(server)


def check_unnoticed(server: Sidecar, answer: dict[str, Any], step: Step, before: ServerStatus) -> None:
    """All went as if there had been no stop, and is counted once."""
    after = settle(server)
    assert answer["outcome"] == Outcome.OK
    if step in WRITES:
        assert answer["committed"] == BLOCKS
        assert after.asked_tokens == before.asked_tokens
    else:
        assert (answer["valid"], answer["wrong"]) == (BLOCKS, 0)
        assert after.asked_tokens - before.asked_tokens == BLOCKS * BLOCK_SIZE
    assert after.miss_tokens == before.miss_tokens


@every_step
def test_client_is_killed_while_the_server_is_stopped(
    step: Step, server: Sidecar, client: CrashClient, request: pytest.FixtureRequest
) -> None:
    prepare(server, client, step, request)
    stop_at(server, client, step)
    client.kill()
    server.resume()
    settle(server)
    check_written(server, step)
    check(server)
