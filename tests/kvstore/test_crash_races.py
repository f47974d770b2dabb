"""Clients that want the same blocks at the same time, crowd the server, or never give anything back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from kvstore.failpoints import Step
from kvstore.service.client import Outcome
from tests.support.crash_blocks import BLOCK_SIZE
from tests.support.crash_checks import (
    POOL,
    check,
    flood,
    fresh_client,
    pool_of,
    resident_blocks,
    scrape,
    settle,
    status_of,
    write_whole,
)
from tests.support.crash_client import CrashClient
from tests.support.sidecars import Sidecar, sidecar
from tests.support.valkey import eventually

BLOCKS = 8
WARM, FRESH = 1, 2
LEASE_SECONDS = 2
PROCESSES, CONNECTIONS = 4, 50


@pytest.fixture
def server() -> Iterator[Sidecar]:
    with sidecar(**POOL, lease_seconds=LEASE_SECONDS, write_seconds=2) as running:
        yield running


@pytest.fixture
def clients(server: Sidecar) -> Iterator[list[CrashClient]]:
    with ExitStack() as opened:
        yield [opened.enter_context(CrashClient(server.address)) for _ in range(2)]


def test_one_of_two_writers_gets_a_block(server: Sidecar, clients: list[CrashClient]) -> None:
    """The longer prompt begins with the shorter one: each block has one writer, whoever came first."""
    first, second = clients
    assert first.ask("begin", number=FRESH, blocks=BLOCKS // 2)["status"] == ["yours"] * (BLOCKS // 2)
    assert second.ask("begin", number=FRESH, blocks=BLOCKS)["status"] == (
        ["being_written"] * (BLOCKS // 2) + ["yours"] * (BLOCKS // 2)
    )
    # The tail is there first, and is no prefix of anything before its head is.
    assert second.ask("finish", number=FRESH, blocks=BLOCKS)["committed"] == BLOCKS // 2
    assert resident_blocks(server, FRESH, BLOCKS) == 0
    assert first.ask("finish", number=FRESH, blocks=BLOCKS // 2)["committed"] == BLOCKS // 2
    assert resident_blocks(server, FRESH, BLOCKS) == BLOCKS
    assert second.ask("write", number=FRESH, blocks=BLOCKS)["status"] == ["present"] * BLOCKS
    check(server)


def test_a_dead_writer_s_blocks_are_another_s_to_write(server: Sidecar, clients: list[CrashClient]) -> None:
    first, second = clients
    assert first.ask("begin", number=FRESH, blocks=BLOCKS)["status"] == ["yours"] * BLOCKS
    assert second.ask("write", number=FRESH, blocks=BLOCKS)["status"] == ["being_written"] * BLOCKS
    first.kill()
    assert eventually(
        lambda: second.ask("write", number=FRESH, blocks=BLOCKS)["committed"] == BLOCKS, seconds=1.5
    ), "before the deadline of its write"
    check(server)


def test_two_writers_at_once_write_each_block_once(server: Sidecar, clients: list[CrashClient]) -> None:
    """Both begin with the same prompt at the same moment, and go on with the next ones in the same order."""
    prompts = range(100, 125)
    for client in clients:
        client.ask("read", number=WARM, blocks=BLOCKS)  # connects
        client.stop()
        for number in prompts:
            client.tell("write", number=number, blocks=BLOCKS)
    for client in clients:
        client.resume()
    answers = [[client.answer() for _ in prompts] for client in clients]
    for ours, theirs in zip(*answers, strict=True):
        for pair in zip(ours["status"], theirs["status"], strict=True):
            assert pair.count("yours") == 1
            assert set(pair) <= {"yours", "being_written", "present"}
        assert ours["committed"] + theirs["committed"] == BLOCKS
    samples = scrape(server)
    assert samples["kvstore_stored_blocks_total", ""] == len(prompts) * BLOCKS
    check(server)


def test_readers_keep_what_they_were_promised(server: Sidecar, clients: list[CrashClient]) -> None:
    """Under any pressure, as long as the lease is kept (LMCache #717 #911 #1686 #4133, vllm #42289)."""
    reader, writer = clients
    numbers = range(10, 16)
    for number in numbers:
        assert reader.ask("write", number=number, blocks=BLOCKS)["committed"] == BLOCKS
    assert reader.ask("hold", number=numbers[0], blocks=BLOCKS)["promised"] == BLOCKS
    runs_out_at = time.monotonic() + LEASE_SECONDS
    for round_, number in enumerate(numbers):
        for pressure in range(20):
            writer.tell("write", number=1000 + 100 * round_ + pressure, blocks=BLOCKS)
        answer = reader.ask("read", number=number, blocks=BLOCKS)
        for _ in range(20):
            assert writer.answer()["committed"] == BLOCKS
        assert (answer["outcome"], answer["wrong"]) == (Outcome.OK, 0)
        assert answer["valid"] == answer["promised"]
    time.sleep(max(0.0, runs_out_at - time.monotonic()))
    assert resident_blocks(server, numbers[0], BLOCKS) == BLOCKS, (
        "held, and renewed beyond its first deadline"
    )
    assert resident_blocks(server, numbers[1], BLOCKS) == 0, "pressed out"
    reader.ask("forget", number=numbers[0])
    check(server)


def test_a_client_that_never_releases() -> None:
    """Its leases end by their deadline, nobody else waits for them, and its requests are counted once."""
    prompts = [10, 11, 12]
    with sidecar(**POOL, lease_seconds=4) as server, CrashClient(server.address) as client:
        for number in prompts:
            assert client.ask("write", number=number, blocks=BLOCKS)["committed"] == BLOCKS
            assert client.ask("hold", number=number, blocks=BLOCKS)["promised"] == BLOCKS
        client.stop()  # or it would renew them for as long as it lives
        flood(server, 100)  # others have all but what is leased
        assert status_of(server).leases == len(prompts)
        assert [resident_blocks(server, number, BLOCKS) for number in prompts] == [BLOCKS] * len(prompts)
        status = settle(server)
        assert sum(status.hit_tokens.values()) == 2 * len(prompts) * BLOCKS * BLOCK_SIZE
        flood(server, 200)
        assert [resident_blocks(server, number, BLOCKS) for number in prompts] == [0] * len(prompts)
        check(server)


def test_a_client_that_streams_is_killed(server: Sidecar) -> None:
    """It has no lock on the file that would tell: what it held ends by its deadlines."""
    with fresh_client(server) as namespace:
        assert write_whole(namespace, WARM, BLOCKS) == BLOCKS
    with CrashClient(server.address, streams=True) as client:
        assert client.ask("read", number=WARM, blocks=BLOCKS)["valid"] == BLOCKS
        assert client.ask("hold", number=WARM, blocks=BLOCKS)["promised"] == BLOCKS
        assert client.ask("begin", number=FRESH, blocks=BLOCKS)["status"] == ["yours"] * BLOCKS
        client.kill()
    assert status_of(server).writes == 1
    settle(server, seconds=4.0)
    with fresh_client(server) as namespace:
        assert write_whole(namespace, FRESH, BLOCKS) == BLOCKS
    check(server)


def test_a_stopped_server_s_callers_come_back_in_time(server: Sidecar, clients: list[CrashClient]) -> None:
    """LMCache #4642: every call has a deadline, whatever the server does with it."""
    for client in clients:
        assert client.ask("read", number=WARM, blocks=BLOCKS)["outcome"] == Outcome.OK
    server.arm(Step.ACQUIRE_ADMITTED)
    began = time.monotonic()
    for client in clients:
        client.tell("read", number=WARM, blocks=BLOCKS)
        client.tell("write", number=FRESH, blocks=BLOCKS)
    outcomes = [client.answer()["outcome"] for client in clients for _ in range(2)]
    assert time.monotonic() - began < 5.0
    assert outcomes == [Outcome.UNREACHABLE] * 4
    server.resume()
    for client in clients:
        assert eventually(partial(can_write, client))
    check(server)


def can_write(client: CrashClient) -> bool:
    return bool(client.ask("write", number=FRESH, blocks=BLOCKS)["outcome"] == Outcome.OK)


def test_two_hundred_connections(server: Sidecar) -> None:
    """From four processes; each writes a prompt of its own and reads that and four common ones."""
    common = list(range(10, 14))
    with fresh_client(server) as namespace:
        for number in common:
            assert write_whole(namespace, number, BLOCKS) == BLOCKS
    before = settle(server)
    with ExitStack() as opened:
        crowd = [opened.enter_context(CrashClient(server.address)) for _ in range(PROCESSES)]
        for process in crowd:
            process.tell("gather", connections=CONNECTIONS)
        assert [process.answer() for process in crowd] == [{"connected": CONNECTIONS}] * PROCESSES
        assert scrape(server)["kvstore_clients", ""] >= PROCESSES * CONNECTIONS
        for place, process in enumerate(crowd):
            process.tell("swarm", first=1000 + place * CONNECTIONS, common=common, blocks=1)
        answers = [process.answer() for process in crowd]
    hits = PROCESSES * CONNECTIONS * (1 + len(common))
    assert [answer["wrong"] for answer in answers] == [0] * PROCESSES
    assert sum(answer["hits"] for answer in answers) == hits
    after = settle(server)
    assert after.asked_tokens - before.asked_tokens == hits * BLOCK_SIZE
    assert sum(after.hit_tokens.values()) - sum(before.hit_tokens.values()) == hits * BLOCK_SIZE
    assert pool_of(after).ready_bytes > pool_of(before).ready_bytes
    check(server)
