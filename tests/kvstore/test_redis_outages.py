"""The redis tier on a server that is absent, dies, stalls, fills up or cuts connections."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from kvstore.block import BlockRows, MissCause
from kvstore.tiers.base import SaveOutcome, TierMatch, TierStatus
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_embedded import EmbeddedRedis
from tests.support.proxy import Behaviour, Fault, Proxy
from tests.support.redis_store import Store, assert_loads, logged, opened, payloads_of, rows_of
from tests.support.redis_traffic import AT_ONCE_SECONDS, LATE_SECONDS, Timed, Traffic
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, start_valkey, valkey

__all__ = ["shared_valkey", "start_valkey", "valkey"]

pytestmark = pytest.mark.redis

SIZE = 100_000
BLOCKS = 10


def causes(store: Store, rows: BlockRows, seconds: float = 5.0) -> list[MissCause | None]:
    destinations = [np.zeros(SIZE, dtype=np.uint8) for _ in range(len(rows))]
    return store.tier.load(rows, destinations, time.monotonic() + seconds).causes


def test_starts_without_a_server_and_attaches_by_itself() -> None:
    """LMCache #1491; seen in 0.5.6: look-ups never completed."""
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with EmbeddedRedis.start() as reserved:
        port = reserved.port
    tier = RedisTier(RedisOptions(f"redis://127.0.0.1:{port}"), time.monotonic)
    assert (tier.reached, tier.status().healthy) == (False, True), "nobody knows yet"
    with Timed() as timed:
        tier.reach(time.monotonic() + 5)
    assert (tier.reached, tier.status().healthy) == (False, False)
    assert timed.seconds < AT_ONCE_SECONDS
    checksums = [xxhash.xxh3_64_intdigest(payload.data) for payload in payloads]
    with Timed() as timed:
        assert tier.match(rows, time.monotonic() + 5) == TierMatch(0, MissCause.UNAVAILABLE)
    assert timed.seconds < AT_ONCE_SECONDS
    with EmbeddedRedis.start(port=port):

        def reached() -> bool:
            tier.reach(time.monotonic() + 5)
            return tier.reached

        assert eventually(reached), "also where nobody asks for a block"
        assert tier.status().healthy
        saved = [SaveOutcome.STORED] * BLOCKS
        assert eventually(lambda: tier.save(rows, payloads, checksums, time.monotonic() + 5) == saved)
        assert tier.match(rows, time.monotonic() + 5) == TierMatch(BLOCKS, None)
    tier.close()


def test_killed_then_given_up_then_back(
    start_valkey: Callable[..., ValkeyServer], caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache #3565: after a restart of Redis, the engine had to be restarted too."""
    caplog.set_level(logging.INFO)
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(start_valkey()) as store:
        store.save(rows, payloads)
        store.server.kill()
        for call in range(3):
            assert store.tier.status().healthy, f"before call {call}"
            with Timed() as timed:
                assert causes(store, rows) == [MissCause.UNAVAILABLE] * BLOCKS
            assert timed.seconds < AT_ONCE_SECONDS
        assert not store.tier.status().healthy
        assert "127.0.0.1" in store.tier.status().reason
        with Timed() as timed:
            for _ in range(100):
                assert store.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)
                assert store.save(rows, payloads) == [SaveOutcome.UNAVAILABLE] * BLOCKS
                assert store.tier.discard(rows, time.monotonic() + 5) == 0
        assert timed.seconds < AT_ONCE_SECONDS
        assert store.tier.errors() == {"connection": 3}
        store.server.restart()
        assert eventually(lambda: store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS)
        assert_loads(store, rows, payloads)
        assert store.tier.status() == TierStatus(healthy=True)
        assert store.tier.errors() == {"connection": 3}
    assert logged(caplog) == [(logging.WARNING, "is given"), (logging.INFO, "answers again")]


def test_a_restart_between_two_calls_costs_neither(start_valkey: Callable[..., ValkeyServer]) -> None:
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(start_valkey()) as store:
        store.save(rows, payloads)
        store.match(rows)
        store.server.kill()
        store.server.restart()
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        assert store.match(rows) == BLOCKS
        store.server.client.client_kill_filter(_type="normal", skipme=True)
        assert_loads(store, rows, payloads)
        assert store.tier.errors() == {}


def test_stopped_every_call_ends_by_its_deadline_and_nothing_comes_late(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    """LMCache #4945 #5255."""
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    others, other_payloads = rows_of(BLOCKS, first_token=5000), payloads_of(BLOCKS, SIZE, seed=1)
    with opened(start_valkey()) as store:
        store.save(rows, payloads)
        store.save(others, other_payloads)
        store.match(rows)
        destinations = [np.zeros(SIZE, dtype=np.uint8) for _ in range(BLOCKS)]
        store.server.stop()
        with Timed() as timed:
            result = store.tier.load(rows, destinations, time.monotonic() + 0.1)
        assert result.causes == [MissCause.TIMEOUT] * BLOCKS
        assert timed.seconds < 0.1 + LATE_SECONDS
        with Timed() as timed:
            assert store.tier.match(rows, time.monotonic() + 0.05) == TierMatch(0, MissCause.TIMEOUT)
        assert timed.seconds < 0.05 + LATE_SECONDS
        assert store.tier.errors() == {"timeout": 2}
        store.server.resume()
        assert_loads(store, others, other_payloads)
        assert store.match(rows) == BLOCKS
        assert not any(destination.any() for destination in destinations)


def test_stopped_for_long_it_is_given_up(start_valkey: Callable[..., ValkeyServer]) -> None:
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    checksums = [xxhash.xxh3_64_intdigest(payload.data) for payload in payloads]
    with opened(start_valkey()) as store:
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        store.server.stop()
        for _ in range(3):
            outcomes = store.tier.save(rows, payloads, checksums, time.monotonic() + 0.05)
            assert outcomes == [SaveOutcome.TIMEOUT] * BLOCKS
        with Timed() as timed:
            assert causes(store, rows) == [MissCause.UNAVAILABLE] * BLOCKS
        assert timed.seconds < AT_ONCE_SECONDS
        store.server.resume()
        assert eventually(lambda: store.match(rows) == BLOCKS)
        assert_loads(store, rows, payloads)


def test_no_connection_free_is_a_timeout_that_does_not_blame_the_server(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    rows = rows_of(BLOCKS)
    with opened(start_valkey(), connections=1) as store:
        store.save(rows, payloads_of(BLOCKS, SIZE))
        store.server.stop()
        holder = threading.Thread(target=causes, args=(store, rows, 0.5))
        holder.start()
        time.sleep(0.05)
        for _ in range(4):
            with Timed() as timed:
                assert causes(store, rows, 0.05) == [MissCause.TIMEOUT] * BLOCKS
            assert timed.seconds < 0.05 + LATE_SECONDS
        assert store.tier.errors() == {"busy": 4}
        assert store.tier.status().healthy
        store.server.resume()
        holder.join()


@pytest.mark.parametrize("fault", Fault)
def test_cut_off_in_a_payload_what_came_before_is_kept(valkey: ValkeyServer, fault: Fault) -> None:
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(valkey) as direct:
        direct.save(rows, payloads)
    behaviour = Behaviour(bytes_before_fault=int(3.5 * SIZE), fault=fault)
    with Proxy(valkey.port, behaviour) as proxy, opened(valkey, f"redis://127.0.0.1:{proxy.port}") as store:
        destinations = [np.zeros(SIZE, dtype=np.uint8) for _ in range(BLOCKS)]
        with Timed() as timed:
            result = store.tier.load(rows, destinations, time.monotonic() + 1)
        rest = MissCause.TIMEOUT if fault is Fault.STALL else MissCause.UNAVAILABLE
        assert result.causes == [None] * 3 + [rest] * 7
        assert all(np.array_equal(destinations[block], payloads[block]) for block in range(3))
        assert timed.seconds < 1 + LATE_SECONDS
        assert store.tier.errors() == {"timeout" if fault is Fault.STALL else "connection": 1}


def test_a_connection_too_slow_for_one_budget_is_there_for_the_next(valkey: ValkeyServer) -> None:
    rows = rows_of(BLOCKS)
    with opened(valkey) as direct:
        direct.save(rows, payloads_of(BLOCKS, SIZE))
    proxy = Proxy(valkey.port, Behaviour(delay_seconds=0.03))
    with proxy, opened(valkey, f"redis://127.0.0.1:{proxy.port}") as store:
        assert store.tier.match(rows, time.monotonic() + 0.05) == TierMatch(0, MissCause.TIMEOUT)
        assert eventually(lambda: store.tier.match(rows, time.monotonic() + 0.2).blocks == BLOCKS)
        assert store.tier.status().healthy


def test_a_look_up_that_runs_out_of_time_keeps_what_it_knows(valkey: ValkeyServer) -> None:
    """LMCache #4945 #5255. The first segment is one round, the rest another, and each takes 0.1 s."""
    rows = rows_of(300)
    with opened(valkey) as direct:
        direct.save(rows, payloads_of(1, 10) * 300)
    proxy = Proxy(valkey.port, Behaviour(delay_seconds=0.1))
    with proxy, opened(valkey, f"redis://127.0.0.1:{proxy.port}") as store:
        assert store.find(rows_of(1, first_token=100_000)) == TierMatch(0, MissCause.COLD), "it is connected"
        assert store.tier.match(rows, time.monotonic() + 0.15) == TierMatch(128, MissCause.TIMEOUT)


def test_a_dripping_server_cannot_hold_a_look_up(valkey: ValkeyServer) -> None:
    rows = rows_of(BLOCKS)
    with opened(valkey) as direct:
        direct.save(rows, payloads_of(BLOCKS, SIZE))
    proxy = Proxy(valkey.port, Behaviour(delay_seconds=0.001, piece_bytes=300))
    with proxy, opened(valkey, f"redis://127.0.0.1:{proxy.port}") as store:
        assert store.match(rows) == BLOCKS
        with Timed() as timed:
            got = causes(store, rows, 0.2)
        assert timed.seconds < 0.2 + LATE_SECONDS
        assert got[-1] is MissCause.TIMEOUT


def test_a_wrong_password_later_on_is_an_outage_that_ends(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey()
    server.client.acl_setuser("kv", enabled=True, passwords=["+first"], categories=["+@all"], keys=["*"])
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(server, server.url_of("kv:first")) as store:
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        server.client.acl_setuser("kv", enabled=True, passwords=["-first", "+second"])
        server.client.client_kill_filter(_type="normal", skipme=True)
        for _ in range(3):
            assert causes(store, rows) == [MissCause.UNAVAILABLE] * BLOCKS
        assert store.tier.errors() == {"refused": 3}
        assert "invalid username-password pair" in store.tier.status().reason
        assert "first" not in store.tier.status().reason
        server.client.acl_setuser("kv", enabled=True, passwords=["+first"])
        assert eventually(lambda: store.match(rows) == BLOCKS)


def test_a_server_with_too_many_clients_is_an_outage_that_ends(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    with opened(start_valkey()) as store:
        store.server.client.config_set("maxclients", 1)
        assert causes(store, rows_of(1)) == [MissCause.UNAVAILABLE]
        assert store.tier.errors() == {"connection": 1}
        store.server.client.config_set("maxclients", 100)
        assert causes(store, rows_of(1)) == [MissCause.COLD]


def test_a_mixture_of_everything_never_yields_a_wrong_byte(start_valkey: Callable[..., ValkeyServer]) -> None:
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(start_valkey()) as store:
        with Traffic(store.tier, rows, payloads, threads=3) as traffic:
            for _ in range(2):
                time.sleep(0.1)
                store.server.client.client_kill_filter(_type="normal", skipme=True)
                store.server.client.flushall()
                time.sleep(0.1)
                store.server.stop()
                time.sleep(0.1)
                store.server.resume()
                time.sleep(0.1)
                store.server.kill()
                store.server.restart()
            recovered = eventually(lambda: store.match(rows) == BLOCKS)
        assert recovered
        assert traffic.wrong == []
        assert traffic.causes["None"] > 0
        assert_loads(store, rows, payloads)
