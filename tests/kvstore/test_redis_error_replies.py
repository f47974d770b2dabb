"""The redis tier on a server that answers, with errors: full, read-only, loading, or not allowed to us."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from kvstore.block import MissCause
from kvstore.tiers.base import SaveOutcome, TierMatch, TierStatus
from tests.support.redis_store import assert_loads, logged, opened, payloads_of, rows_of
from tests.support.valkey import ValkeyServer, eventually, start_valkey

__all__ = ["start_valkey"]

pytestmark = pytest.mark.redis

SIZE = 100_000
BLOCKS = 10


def test_a_full_server_refuses_and_is_still_read(
    start_valkey: Callable[..., ValkeyServer], caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache PR #3066."""
    server = start_valkey(maxmemory="12mb", maxmemory_policy="noeviction")
    rows, payloads = rows_of(20), payloads_of(20, 1_000_000)
    with opened(server) as store:
        outcomes = store.save(rows, payloads)
        stored = outcomes.index(SaveOutcome.FULL)
        assert 0 < stored < 15
        # One more was under way when the first was refused; there may have been room for that.
        assert outcomes[stored + 1] in {SaveOutcome.STORED, SaveOutcome.FULL}
        assert outcomes[stored + 2 :] == [SaveOutcome.FULL] * (18 - stored)
        assert store.match(rows) == stored
        assert_loads(store, rows.slice(0, stored), payloads[:stored])
        assert set(store.tier.errors()) == {"oom"}
        assert store.tier.status() == TierStatus(
            healthy=True, reason=f"redis 127.0.0.1:{server.port} answers with oom"
        )
        # Blocks after the first refusal are not even offered.
        assert server.calls()["set"] < 20
        store.save(rows, payloads)
    assert logged(caplog) == [(logging.WARNING, "has maxmemory-policy"), (logging.WARNING, "answers with")]
    assert "the error OOM: " in caplog.messages[-1]
    assert "maxmemory-policy allkeys-lru" in caplog.messages[-1]


def test_a_server_without_maxmemory_is_warned_of_once(
    start_valkey: Callable[..., ValkeyServer], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(start_valkey(maxmemory="0")) as store:
        for _ in range(3):
            store.match(rows_of(1))
            store.server.client.client_kill_filter(_type="normal", skipme=True)
            store.save(rows_of(1), payloads_of(1, 10))
    assert logged(caplog) == [(logging.WARNING, "has no")]


def test_a_read_only_server_is_read(start_valkey: Callable[..., ValkeyServer]) -> None:
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(start_valkey()) as store:
        store.save(rows, payloads)
        store.server.client.replicaof("127.0.0.1", 1)
        assert store.save(rows, payloads) == [SaveOutcome.UNAVAILABLE] * BLOCKS
        assert_loads(store, rows, payloads)
        assert set(store.tier.errors()) == {"readonly"}
        store.server.client.config_set("replica-serve-stale-data", "no")
        assert store.load(rows, SIZE)[0].causes == [MissCause.UNAVAILABLE] * BLOCKS
        assert store.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)
        assert store.tier.errors()["masterdown"] > 0
        assert store.tier.status().reason.endswith("answers with masterdown, readonly")
        store.server.client.replicaof("NO", "ONE")
        assert_loads(store, rows, payloads)


@pytest.mark.parametrize("commands", [["+exists"], ["+get", "+pttl"], []], ids=["look up", "read", "nothing"])
def test_a_user_that_may_do_too_little_is_told_so_once(
    start_valkey: Callable[..., ValkeyServer], caplog: pytest.LogCaptureFixture, commands: list[str]
) -> None:
    """It looked like a cold cache: no log line, healthy, and never a hit."""
    server = start_valkey()
    server.client.acl_setuser("kv", enabled=True, passwords=["+pw"], commands=commands, keys=["kv:*"])
    rows, payloads = rows_of(3), payloads_of(3, 10)
    known = MissCause.COLD if "+exists" in commands else MissCause.UNAVAILABLE
    with opened(server, server.url_of("kv:pw")) as store:
        for _ in range(3):
            assert store.find(rows) == TierMatch(0, known)
            assert store.save(rows, payloads) == [SaveOutcome.UNAVAILABLE] * 3
            assert store.load(rows, SIZE)[0].causes[0] is (
                MissCause.COLD if "+get" in commands else MissCause.UNAVAILABLE
            )
        assert set(store.tier.errors()) == {"noperm"}
        status = store.tier.status()
        assert (status.healthy, status.reason) == (
            True,
            f"redis 127.0.0.1:{server.port} answers with noperm",
        )
    assert logged(caplog) == [(logging.WARNING, "answers with")]
    assert "the error NOPERM: " in caplog.text
    assert "allow the user get, set, exists, pttl, pexpire and unlink" in caplog.text


def test_a_run_that_ends_at_an_error_is_kept_up_to_there(start_valkey: Callable[..., ValkeyServer]) -> None:
    """The keys of the second segment are out of bounds: what is behind the first is unknown, not cold."""
    server, rows = start_valkey(), rows_of(300)
    first = f"kv:{rows.namespace.hex()}:{rows.shard}:{{{rows.tag_at(0).hex()}}}:*"
    server.client.acl_setuser(
        "kv", enabled=True, passwords=["+pw"], categories=["+@all"], keys=[first.replace("{", r"\{")]
    )
    with opened(server) as owner, opened(server, server.url_of("kv:pw")) as store:
        owner.save(rows, payloads_of(1, 10) * 300)
        assert store.find(rows) == TierMatch(128, MissCause.UNAVAILABLE)
        owner.tier.discard(rows.slice(100, 101), time.monotonic() + 5)
        assert store.find(rows) == TierMatch(100, MissCause.COLD)


def test_a_server_that_still_loads_its_data_is_no_cold_cache(
    start_valkey: Callable[..., ValkeyServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_valkey(key_load_delay="2000", loading_process_events_interval_bytes="1024")
    rows = rows_of(500)
    with opened(server) as store:
        store.save(rows, payloads_of(1, 100) * 500)
        server.client.save()
        server.restart()
        assert store.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)
        assert store.load(rows.slice(0, 2), SIZE)[0].causes == [MissCause.UNAVAILABLE] * 2
        assert eventually(lambda: store.find(rows) == TierMatch(500, None), 10)
        assert set(store.tier.errors()) == {"loading"}
    assert logged(caplog) == [(logging.WARNING, "answers with")]
