"""A client is killed, or sleeps past its deadlines, at each step between its calls.

One test a step. What it held comes free as soon as it is gone, and not before; what it does when it
wakes up harms nobody, and it knows what is no longer true (LMCache #987 #1034 #1130 #1756, vllm
#42289, Mooncake #3076, local-inference-lab/vllm #480).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.service.client import Outcome
from kvstore.table import SlotState
from tests.support.crash_blocks import PAYLOAD_BYTES
from tests.support.crash_census import take_census
from tests.support.crash_checks import (
    POOL,
    check,
    flood,
    fresh_client,
    pool_of,
    resident_blocks,
    settle,
    status_of,
    write_whole,
)
from tests.support.crash_client import CrashClient
from tests.support.crash_points import Point
from tests.support.crash_servers import Servers, servers
from tests.support.sidecars import Sidecar
from tests.support.valkey import eventually

__all__ = ["servers"]

BLOCKS = 8
WARM, FRESH = 1, 2
FLOODS = (100, 200, 300)
HELD_BYTES = BLOCKS * PAYLOAD_BYTES

every_point = pytest.mark.parametrize("point", list(Point), ids=str)


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"lease_seconds": 1, "write_seconds": 1}


@pytest.fixture
def server(servers: Servers, settings: dict[str, Any]) -> Sidecar:
    running = servers.empty(**POOL, **settings)
    with fresh_client(running) as namespace:
        assert write_whole(namespace, WARM, BLOCKS) == BLOCKS
    return running


@pytest.fixture
def client(server: Sidecar) -> Iterator[CrashClient]:
    with CrashClient(server.address) as running:
        yield running


def stop_at(server: Sidecar, client: CrashClient, point: Point) -> None:
    """The client stops there, and holds what it holds there."""
    if point.writes:
        client.tell("write", number=FRESH, blocks=BLOCKS, pause=point)
    else:
        client.tell("read", number=WARM, blocks=BLOCKS, pause=point)
    client.await_stopped()
    pool = pool_of(status_of(server))
    assert (pool.staged_bytes if point.writes else pool.leased_bytes) == HELD_BYTES


@every_point
@pytest.mark.parametrize("settings", [{"lease_seconds": 60, "write_seconds": 60}], ids=["no deadline near"])
def test_killed(point: Point, server: Sidecar, client: CrashClient) -> None:
    """Its lock on the pool file is gone with it: nobody waits for a deadline."""
    stop_at(server, client, point)
    client.kill()
    settle(server)
    assert resident_blocks(server, WARM, BLOCKS) == BLOCKS
    assert resident_blocks(server, FRESH, BLOCKS) == 0
    with fresh_client(server) as namespace:
        assert write_whole(namespace, FRESH, BLOCKS) == BLOCKS
    check(server)


@pytest.mark.parametrize("point", [point for point in Point if not point.writes], ids=str)
def test_reader_oversleeps(point: Point, server: Sidecar, client: CrashClient) -> None:
    stop_at(server, client, point)
    assert eventually(lambda: not status_of(server).leases), (
        "the lease of a stopped reader ends by its deadline"
    )
    flood(server, FLOODS[0])
    assert resident_blocks(server, WARM, BLOCKS) == 0, "the pressure takes blocks that nobody holds any more"
    client.resume()
    check_woken_reader(client.answer(), point)
    check_goes_on(server, client)


@pytest.mark.parametrize("point", [point for point in Point if point.writes], ids=str)
def test_writer_oversleeps(point: Point, server: Sidecar, client: CrashClient) -> None:
    stop_at(server, client, point)
    assert eventually(lambda: pool_of(status_of(server)).quarantined_bytes == HELD_BYTES)
    check_quarantine(server)
    client.resume()
    assert client.answer() == {"outcome": Outcome.LOST, "status": ["yours"] * BLOCKS, "committed": 0}
    check_goes_on(server, client)
    check_slots_are_used_again(server)


@pytest.mark.parametrize("point", [point for point in Point if not point.writes], ids=str)
def test_reader_sleeps_through_a_restart(point: Point, server: Sidecar, client: CrashClient) -> None:
    stop_at(server, client, point)
    server.restart()
    assert eventually(lambda: not pool_of(status_of(server)).leased_bytes)
    flood(server, FLOODS[0])
    client.resume()
    check_woken_reader(client.answer(), point)
    check_goes_on(server, client)


@pytest.mark.parametrize("settings", [{"lease_seconds": 60, "write_seconds": 60}], ids=["no deadline near"])
def test_what_was_promised_outlives_the_server(server: Sidecar, client: CrashClient) -> None:
    stop_at(server, client, Point.READ_COPYING)
    server.restart()
    assert pool_of(status_of(server)).leased_bytes == HELD_BYTES
    flood(server, FLOODS[0])
    assert resident_blocks(server, WARM, BLOCKS) == BLOCKS
    client.resume()
    answer = client.answer()
    # The reader sees that the server is another, and has to ask again; but nobody has touched its blocks.
    assert (answer["valid"], answer["wrong"], answer["stale"]) == (0, 0, 0)


@pytest.mark.parametrize("point", [point for point in Point if point.writes], ids=str)
def test_writer_sleeps_through_a_restart(point: Point, server: Sidecar, client: CrashClient) -> None:
    stop_at(server, client, point)
    server.restart()
    check_quarantine(server)
    client.resume()
    answer = client.answer()
    assert answer["outcome"] in (Outcome.LOST, Outcome.UNREACHABLE)
    assert answer["committed"] == 0
    check_goes_on(server, client)
    check_slots_are_used_again(server)


def check_woken_reader(answer: dict[str, Any], point: Point) -> None:
    assert answer["promised"] == BLOCKS
    assert (answer["valid"], answer["wrong"]) == (0, 0), "a reader that overstayed knows it"
    if point is Point.READ_COPYING:
        assert answer["stale"] > 0, (
            "what it copied after waking up is another's: without asking it would be used"
        )


def check_quarantine(server: Sidecar) -> None:
    """Others fill every slot there is, several times, but for those that the sleeper may yet write to."""
    flood(server, FLOODS[0])
    slots = take_census(server.pool_path).slots
    assert (slots[SlotState.FREE], slots[SlotState.STAGED], slots[SlotState.QUARANTINED]) == (0, 0, BLOCKS)


def check_slots_are_used_again(server: Sidecar) -> None:
    """They were wanted all the time: as soon as the sleeper has let go, others have them."""
    flood(server, FLOODS[1])
    slots = take_census(server.pool_path).slots
    assert slots[SlotState.READY] == sum(slots.values())


def check_goes_on(server: Sidecar, client: CrashClient) -> None:
    """With the client alive nothing is left of what it had, and it writes and reads as before."""
    settle(server)
    check(server)
    # A server that has restarted may take a call or two to be found.
    assert eventually(lambda: client.ask("write", number=FLOODS[2], blocks=BLOCKS)["committed"] == BLOCKS)
    answer = client.ask("read", number=FLOODS[2], blocks=BLOCKS)
    assert (answer["valid"], answer["wrong"]) == (BLOCKS, 0)
