"""The redis tier behind Sentinel: real failovers, under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.block import MissCause
from kvstore.tiers.base import SaveOutcome, TierMatch, TierStatus
from tests.support.redis_fleets import SERVICE, SentinelFleet
from tests.support.redis_store import assert_loads, opened, payloads_of, rows_of
from tests.support.redis_traffic import Traffic
from tests.support.valkey import ValkeyServer, eventually

pytestmark = pytest.mark.redis

BLOCKS = 10
SIZE = 100_000
RECOVERY_SECONDS = 8.0
"""The sentinel's own part of that is a second or two on an idle machine."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SentinelFleet]:
    with SentinelFleet(tmp_path) as fleet:
        yield fleet


@pytest.mark.parametrize("fail", [ValkeyServer.kill, ValkeyServer.stop])
def test_a_failover_under_load_ends_by_itself(
    fleet: SentinelFleet, fail: Callable[[ValkeyServer], None]
) -> None:
    """LMCache PR #5162: its Sentinel connector had never worked."""
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(None, fleet.url) as store:
        with Traffic(store.tier, rows, payloads) as traffic:
            assert eventually(lambda: store.match(rows) == BLOCKS)
            fail(fleet.primary)
            promoted = eventually(lambda: fleet.role_of_replica() == "master", RECOVERY_SECONDS)
            fleet.replica.client.flushall()
            stored = eventually(lambda: fleet.replica.client.dbsize() == BLOCKS, RECOVERY_SECONDS)
        assert (promoted, stored) == (True, True)
        assert traffic.wrong == []
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        assert_loads(store, rows, payloads)
        assert store.tier.status().healthy
        assert store.tier.breakers() == {SERVICE: False}
        assert set(store.tier.errors()) <= {"connection", "timeout", "busy", "readonly"}


def test_a_failover_where_everybody_speaks_tls(tmp_path: Path) -> None:
    """Sentinel, primary and replica have no port without it, and one private authority."""
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with SentinelFleet(tmp_path, tls=True) as fleet, opened(None, fleet.url) as store:
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        assert_loads(store, rows, payloads)
        assert eventually(lambda: fleet.replica.client.dbsize() == BLOCKS), "replicated"
        with Traffic(store.tier, rows, payloads) as traffic:
            fleet.primary.kill()
            promoted = eventually(lambda: fleet.role_of_replica() == "master", RECOVERY_SECONDS)
            recovered = eventually(lambda: store.match(rows) == BLOCKS, RECOVERY_SECONDS)
        assert (promoted, recovered, traffic.wrong) == (True, True, [])
        assert_loads(store, rows, payloads)
        assert store.tier.breakers() == {SERVICE: False}
    with opened(None, fleet.url.replace("rediss+", "redis+").partition("?")[0]) as stranger:
        assert stranger.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)


def test_a_primary_that_became_a_replica_is_left_at_its_first_refusal(fleet: SentinelFleet) -> None:
    """Connections outlive a failover that nobody told the clients of: one reply says so, once."""
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(None, fleet.url) as store:
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        # What a failover does, without the CLIENT KILL by which a sentinel ends it.
        fleet.replica.client.replicaof("NO", "ONE")
        fleet.primary.client.replicaof("127.0.0.1", fleet.replica.port)
        fleet.point_sentinel_at(fleet.replica)
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        # As many as were under way when the first came back.
        assert set(store.tier.errors()) == {"readonly"}
        assert store.tier.errors()["readonly"] <= BLOCKS
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * BLOCKS
        assert_loads(store, rows, payloads)


def test_what_is_connected_needs_no_sentinel(fleet: SentinelFleet) -> None:
    rows, payloads = rows_of(BLOCKS), payloads_of(BLOCKS, SIZE)
    with opened(None, fleet.url) as store:
        store.save(rows, payloads)
        store.match(rows)
        fleet.stop_sentinel()
        assert_loads(store, rows, payloads)
        assert store.match(rows) == BLOCKS
        assert store.tier.errors() == {}
        fleet.primary.client.client_kill_filter(_type="normal", skipme=True)
        assert store.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)
        assert store.tier.errors() == {"connection": 1}
        for _ in range(2):
            store.find(rows)
        status = store.tier.status()
        assert not status.healthy
        assert f"redis {SERVICE} has not answered" in status.reason
        assert "no sentinel names a primary" in status.reason


def test_a_service_that_no_sentinel_knows_is_named(fleet: SentinelFleet) -> None:
    with opened(None, fleet.url.replace(SERVICE, "misspelt")) as store:
        for _ in range(3):
            assert store.find(rows_of(1)) == TierMatch(0, MissCause.UNAVAILABLE)
        assert "'misspelt'" in store.tier.status().reason


def test_sentinels_with_a_password_of_their_own(fleet: SentinelFleet) -> None:
    fleet.sentinel.acl_setuser("watcher", enabled=True, passwords=["+s3cret"], categories=["+@all"])
    fleet.sentinel.acl_setuser("default", enabled=False)
    fleet.primary.client.acl_setuser("kv", enabled=True, passwords=["+pw"], categories=["+@all"], keys=["*"])
    url = fleet.url.replace("://", "://kv:pw@")
    with opened(None, url) as store:
        assert store.find(rows_of(1)) == TierMatch(0, MissCause.UNAVAILABLE)
    with opened(None, f"{url}?sentinel_username=watcher&sentinel_password=s3cret") as store:
        assert store.find(rows_of(1)) == TierMatch(0, MissCause.COLD)
        assert store.tier.status() == TierStatus(healthy=True)
