"""A cluster reached by the URL of a single server, and a single server by the URL of a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from kvstore.block import MissCause
from kvstore.tiers.base import Payload, SaveOutcome, TierMatch
from tests.support.redis_fleets import ClusterFleet, cluster_settings
from tests.support.redis_store import assert_loads, logged, opened, payloads_of, rows_of
from tests.support.redis_ways import shared_cluster
from tests.support.valkey import ValkeyServer, eventually, start_valkey

__all__ = ["shared_cluster", "start_valkey"]

pytestmark = pytest.mark.redis


def payloads(blocks: int) -> list[Payload]:
    return payloads_of(1, 1000) * blocks


def test_a_server_that_is_no_cluster_is_told_apart(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey()
    with opened(None, f"redis+cluster://127.0.0.1:{server.port}") as store:
        assert store.find(rows_of(1)) == TierMatch(0, MissCause.UNAVAILABLE)
        assert "cluster support disabled" in store.tier.status().reason


def test_a_node_of_a_cluster_asked_as_if_it_were_alone(
    shared_cluster: ClusterFleet, caplog: pytest.LogCaptureFixture
) -> None:
    shared_cluster.clear()
    rows = rows_of(600)
    with opened(None, shared_cluster.nodes[0].url) as store:
        outcomes = store.save(rows, payloads(600))
        assert set(outcomes) <= {SaveOutcome.STORED, SaveOutcome.UNAVAILABLE}
        assert outcomes[-1] is SaveOutcome.UNAVAILABLE
        assert store.find(rows).cause is MissCause.UNAVAILABLE
        assert set(store.tier.errors()) == {"moved"}
    assert (logging.WARNING, "answers with") in logged(caplog)
    assert "write redis+cluster:// in redis_url" in caplog.text


def test_all_of_a_cluster_behind_one_address_is_asked_a_segment_at_a_time(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    """As some proxies are: each key is served there, but no command may span two slots."""
    server, rows = start_valkey(**cluster_settings()), rows_of(600)
    server.run("CLUSTER ADDSLOTSRANGE", 0, 16383)
    with opened(server) as store:
        assert eventually(lambda: store.save(rows, payloads(600)) == [SaveOutcome.STORED] * 600)
        for number in (1, 2):
            assert store.match(rows) == 600
            assert store.tier.errors()["crossslot"] == number
        store.tier.discard(rows.slice(300, 600), time.monotonic() + 5)
        assert store.match(rows) == 300
        assert_loads(store, rows.slice(0, 300), payloads(300))
