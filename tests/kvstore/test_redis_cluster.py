"""The redis tier on a Cluster: slots that move, nodes that fail, and what each of that costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvstore.block import SEGMENT_BLOCKS, BlockRows, MissCause
from kvstore.tiers.base import Payload, SaveOutcome, TierMatch, TierStatus
from kvstore.tiers.redis_connection import slot_of
from kvstore.tiers.redis_value import block_key
from tests.support.proxy import Behaviour, Proxy
from tests.support.redis_fleets import ClusterFleet, cluster_settings
from tests.support.redis_store import Store, assert_loads, opened, payloads_of, rows_of
from tests.support.redis_tls import start_tls
from tests.support.redis_traffic import AT_ONCE_SECONDS, LATE_SECONDS, Timed, Traffic
from tests.support.redis_ways import NEEDED_COMMANDS, shared_cluster
from tests.support.valkey import ValkeyServer, eventually, start_valkey

__all__ = ["shared_cluster", "start_valkey"]

pytestmark = pytest.mark.redis

SIZE = 1000
RECOVERY_SECONDS = 15.0
"""The cluster's own part of that is two seconds on an idle machine."""


@pytest.fixture
def cluster(shared_cluster: ClusterFleet) -> ClusterFleet:
    """One that is empty, and that the test leaves running and whole."""
    shared_cluster.clear()
    return shared_cluster


@pytest.fixture
def store(cluster: ClusterFleet) -> Iterator[Store]:
    with opened(None, cluster.url) as store:
        yield store


def keys_of(rows: BlockRows, start: int, stop: int) -> list[bytes]:
    return [block_key("kv", rows, block) for block in range(start, stop)]


def many_payloads(blocks: int) -> list[Payload]:
    return payloads_of(1, SIZE) * blocks


def test_blocks_are_spread_and_a_look_up_costs_what_it_costs_on_one_server(
    cluster: ClusterFleet, store: Store
) -> None:
    """LMCache PR #3955 #499."""
    rows = rows_of(1024)
    store.save(rows, many_payloads(1024))
    assert sum(node.client.dbsize() for node in cluster.nodes) == 1024
    assert sum(node.client.dbsize() > 0 for node in cluster.nodes) > 1
    for asked, found, expected in (
        (rows, 1024, {"exists": 8, "keys": 1024}),
        (rows_of(1024, model="cold"), 0, {"exists": 1, "keys": SEGMENT_BLOCKS}),
    ):
        for node in cluster.nodes:
            node.client.config_resetstat()
        assert store.match(asked) == found
        spent = sum((Counter(node.calls()) for node in cluster.nodes), Counter())
        assert {name: spent[name] for name in expected} == expected
    assert store.tier.errors() == {}


def test_the_nodes_of_a_look_up_are_all_asked_before_one_is_heard(cluster: ClusterFleet) -> None:
    """Each answers a tenth of a second late: three of them one after the other would take three tenths."""
    rows, delay = rows_of(1024), 0.1
    with ExitStack() as stack:
        for node in cluster.nodes:
            proxy = stack.enter_context(Proxy(node.port, Behaviour(delay_seconds=delay)))
            node.client.config_set("cluster-announce-port", proxy.port)
            stack.callback(node.client.config_set, "cluster-announce-port", 0)
        with opened(None, f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}") as store:
            assert eventually(
                lambda: store.save(rows, many_payloads(1024)) == [SaveOutcome.STORED] * 1024, 20
            )
            assert eventually(lambda: store.match(rows) == 1024)
            assert len(store.tier.breakers()) == 3
            with Timed() as timed:
                assert store.match(rows) == 1024
            assert timed.seconds < 2 * delay
            assert store.tier.errors() == {}


class TestAMovingSlot:
    """A segment whose slot goes from one node to another, key by key."""

    @pytest.fixture
    def rows(self, cluster: ClusterFleet, store: Store) -> BlockRows:
        """Three segments, stored and found by ``store``; the middle one is going to move."""
        rows, stored = rows_of(300), [SaveOutcome.STORED] * 300
        with opened(None, cluster.url) as writer:
            assert eventually(lambda: writer.save(rows, many_payloads(300)) == stored, RECOVERY_SECONDS)
        assert store.match(rows) == 300
        return rows

    @pytest.fixture
    def move(self, cluster: ClusterFleet, rows: BlockRows) -> Iterator[Callable[[int], None]]:
        """Begins to move the slot and moves its first so many keys; at the end of the test, the rest."""
        tag = rows.tag_at(SEGMENT_BLOCKS)
        source = cluster.node_of(tag)
        target = next(node for node in cluster.nodes if node is not source)
        keys = keys_of(rows, SEGMENT_BLOCKS, 2 * SEGMENT_BLOCKS)

        def move(count: int) -> None:
            cluster.begin_move(slot_of(tag), source, target)
            if count:
                cluster.move_keys(keys[:count], source, target)
            if count == len(keys):
                cluster.end_move(slot_of(tag), source, target)

        yield move
        if cluster.node_of(tag) is source:
            cluster.move_keys(keys, source, target)
            cluster.end_move(slot_of(tag), source, target)

    @pytest.mark.parametrize("moved", [0, 1, 50, 127])
    def test_on_its_way_every_block_is_found_read_and_written(
        self,
        cluster: ClusterFleet,
        store: Store,
        rows: BlockRows,
        move: Callable[[int], None],
        moved: int,
    ) -> None:
        move(moved)
        assert store.match(rows) == 300
        # One EXISTS over all keys, then one for each, and those that have moved once more.
        expected = {"tryagain": 1, "ask": moved} if moved else {}
        assert store.tier.errors() == expected
        assert_loads(store, rows, many_payloads(300))
        # GET and PTTL are two commands.
        expected = {"tryagain": 1, "ask": 3 * moved} if moved else {}
        assert store.tier.errors() == expected
        assert store.save(rows, many_payloads(300)) == [SaveOutcome.STORED] * 300
        assert store.match(rows) == 300
        assert sum(node.client.dbsize() for node in cluster.nodes) == 300, "no key is on two nodes"
        assert set(store.tier.errors()) <= {"tryagain", "ask"}
        assert store.tier.status() == TierStatus(healthy=True), "what a healthy cluster says is no trouble"

    def test_a_block_that_is_missing_is_a_gap_on_either_node(
        self, cluster: ClusterFleet, store: Store, rows: BlockRows, move: Callable[[int], None]
    ) -> None:
        move(50)
        for gap in (250, 200, 150):
            assert store.tier.discard(rows.slice(gap, gap + 1), time.monotonic() + 5) == 1
            assert store.find(rows) == TierMatch(gap, MissCause.COLD)
            assert store.load(rows.slice(gap, gap + 1), SIZE)[0].causes == [MissCause.COLD]

    def test_a_prompt_that_nobody_stored_is_cold(
        self, store: Store, rows: BlockRows, move: Callable[[int], None]
    ) -> None:
        """None of its keys is there: the answer is ASK, and TRYAGAIN where that leads."""
        store.tier.discard(rows, time.monotonic() + 5)
        move(0)
        assert store.find(rows.slice(SEGMENT_BLOCKS, 300)) == TierMatch(0, MissCause.COLD)
        assert store.save(rows, many_payloads(300)) == [SaveOutcome.STORED] * 300
        assert store.match(rows) == 300

    def test_when_it_has_moved_one_answer_says_so_and_no_other_has_to(
        self, store: Store, rows: BlockRows, move: Callable[[int], None]
    ) -> None:
        move(SEGMENT_BLOCKS)
        assert store.match(rows) == 300
        assert store.tier.errors() == {"moved": 1}
        for _ in range(3):
            assert store.match(rows) == 300
            assert_loads(store, rows, many_payloads(300))
        assert store.tier.errors() == {"moved": 1}

    def test_moved_behind_a_load_and_a_save(
        self, store: Store, rows: BlockRows, move: Callable[[int], None]
    ) -> None:
        move(SEGMENT_BLOCKS)
        assert_loads(store, rows, many_payloads(300))
        # GET and PTTL of each block of the segment: they were under way when the first came back.
        assert store.tier.errors() == {"moved": 2 * SEGMENT_BLOCKS}
        assert store.save(rows, many_payloads(300)) == [SaveOutcome.STORED] * 300
        assert store.tier.errors() == {"moved": 2 * SEGMENT_BLOCKS}

    def test_for_a_user_that_may_do_no_more_than_needed(
        self, cluster: ClusterFleet, rows: BlockRows, move: Callable[[int], None]
    ) -> None:
        needed = [*NEEDED_COMMANDS, "+asking", "+cluster|slots"]
        for node in cluster.nodes:
            node.client.acl_setuser("kv", enabled=True, passwords=["+pw"], commands=needed, keys=["kv:*"])
        with opened(None, cluster.url.replace("://", "://kv:pw@")) as store:
            move(50)
            assert store.match(rows) == 300
            assert_loads(store, rows, many_payloads(300))
            assert store.save(rows, many_payloads(300)) == [SaveOutcome.STORED] * 300
            assert set(store.tier.errors()) == {"ask", "tryagain"}

    def test_under_load(
        self, cluster: ClusterFleet, store: Store, rows: BlockRows, move: Callable[[int], None]
    ) -> None:
        payloads = many_payloads(300)
        with Traffic(store.tier, rows, payloads) as traffic:
            for moved in (10, 60, SEGMENT_BLOCKS):
                move(moved)
                time.sleep(0.1)
        assert traffic.wrong == []
        assert traffic.causes["None"] > 0
        assert set(traffic.causes) == {"None"}, "no block is ever missing"
        assert_loads(store, rows, payloads)


def test_a_primary_that_dies_is_replaced_by_its_replica(tmp_path: Path) -> None:
    """LMCache #3565: hits and stores resume within seconds, no process restart."""
    with (
        ClusterFleet(tmp_path / "fleet", replicas=1, timeout_ms=500) as cluster,
        opened(None, cluster.url) as store,
    ):
        doomed, rows = cluster.nodes[0], rows_of(300)
        first = next(
            number
            for number in range(0, 100_000, 100)
            if cluster.node_of(rows_of(1, first_token=number).tag_at(0)) is doomed
        )
        rows, payloads = rows_of(300, first_token=first), payloads_of(300, SIZE)
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * 300
        place = f"127.0.0.1:{doomed.port}"
        assert place in store.tier.breakers()
        assert eventually(lambda: cluster.nodes[3].client.dbsize() == doomed.client.dbsize())
        with Traffic(store.tier, rows, payloads) as traffic:
            doomed.kill()
            recovered = eventually(lambda: store.match(rows) == 300, RECOVERY_SECONDS)
        assert recovered
        assert traffic.wrong == []
        assert_loads(store, rows, payloads)
        assert store.save(rows, payloads) == [SaveOutcome.STORED] * 300
        assert eventually(lambda: place not in store.tier.breakers(), RECOVERY_SECONDS)
        assert store.tier.status() == TierStatus(healthy=True)
        assert set(store.tier.errors()) <= {"connection", "clusterdown", "moved", "timeout", "busy"}


def test_a_node_that_stops_answering_holds_up_nobody_else(cluster: ClusterFleet, store: Store) -> None:
    """LMCache #4945 #5255."""
    prompts = [rows_of(2, first_token=number * 100) for number in range(12)]
    for rows in prompts:
        store.save(rows, many_payloads(2))
    stopped = cluster.node_of(prompts[0].tag_at(0))
    theirs = [rows for rows in prompts if cluster.node_of(rows.tag_at(0)) is not stopped]
    others = [node for node in cluster.nodes if node is not stopped]
    for node in others:
        node.client.config_resetstat()
    begun = time.monotonic()
    with stopped.frozen():
        for _ in range(4):
            with Timed() as timed:
                found = store.tier.match(prompts[0], time.monotonic() + 0.05)
            assert found in (TierMatch(0, MissCause.TIMEOUT), TierMatch(0, MissCause.UNAVAILABLE))
            assert timed.seconds < 0.05 + LATE_SECONDS
            for rows in theirs:
                assert store.match(rows) == 2
        assert store.tier.breakers()[f"127.0.0.1:{stopped.port}"]
        assert not store.tier.status().healthy
        while time.monotonic() - begun < 0.8:
            store.tier.match(prompts[0], time.monotonic() + 0.05)
        asked = sum(node.calls().get("cluster|slots", 0) for node in others)
        assert 1 <= asked <= 1 + (time.monotonic() - begun) / 0.5, "who fails has the slots asked for"
        assert not store.tier.reached

    def reached() -> bool:
        store.tier.reach(time.monotonic() + 1)
        return store.tier.reached

    assert eventually(reached, RECOVERY_SECONDS)
    assert eventually(lambda: store.match(prompts[0]) == 2, RECOVERY_SECONDS)
    assert eventually(lambda: store.tier.status() == TierStatus(healthy=True))
    for rows in prompts:
        assert_loads(store, rows, many_payloads(2))


def test_of_a_prompt_on_several_nodes_what_comes_before_a_dead_one_is_kept(
    cluster: ClusterFleet, store: Store
) -> None:
    rows, payloads = rows_of(600), payloads_of(600, SIZE)
    store.save(rows, payloads)
    owners = [cluster.node_of(rows.tag_at(block)) for block in range(0, 600, SEGMENT_BLOCKS)]
    other = next(number for number, owner in enumerate(owners) if owner is not owners[0])
    known = other * SEGMENT_BLOCKS
    destinations = [np.zeros(SIZE, dtype=np.uint8) for _ in range(600)]
    with owners[other].frozen():
        assert store.tier.match(rows, time.monotonic() + 0.5) == TierMatch(known, MissCause.TIMEOUT)
        causes = store.tier.load(rows, destinations, time.monotonic() + 0.5).causes
    assert causes[:known] == [None] * known
    assert set(causes) == {None, MissCause.TIMEOUT}
    assert all(
        np.array_equal(mine, theirs)
        for cause, mine, theirs in zip(causes, destinations, payloads, strict=True)
        if cause is None
    )
    assert eventually(lambda: store.match(rows) == 600, RECOVERY_SECONDS)


def test_starts_without_a_cluster_and_attaches_by_itself(start_valkey: Callable[..., ValkeyServer]) -> None:
    """LMCache #1491. A cluster of one, that at first is not there, and then has no slots."""
    server = start_valkey(**cluster_settings())
    server.kill()
    rows = rows_of(3)
    with opened(None, f"redis+cluster://127.0.0.1:{server.port}") as store:
        assert store.tier.status() == TierStatus(healthy=True), "nobody has asked for anything yet"
        with Timed() as timed:
            assert store.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)
        assert timed.seconds < AT_ONCE_SECONDS
        assert store.save(rows, many_payloads(3)) == [SaveOutcome.UNAVAILABLE] * 3
        assert store.tier.errors() == {"connection": 1}
        status = store.tier.status()
        assert not status.healthy
        assert "nobody told which node has which slots" in status.reason
        server.restart()
        assert eventually(lambda: not store.match(rows) and "no slots" in store.tier.status().reason)
        server.run("CLUSTER ADDSLOTSRANGE", 0, 16383)
        assert eventually(lambda: store.save(rows, many_payloads(3)) == [SaveOutcome.STORED] * 3)
        assert_loads(store, rows, many_payloads(3))
        assert store.tier.status().healthy


def test_a_wrong_password_later_on_is_an_outage_that_ends(start_valkey: Callable[..., ValkeyServer]) -> None:
    server, rows = start_valkey(**cluster_settings()), rows_of(3)
    server.run("CLUSTER ADDSLOTSRANGE", 0, 16383)
    server.client.acl_setuser("kv", enabled=True, passwords=["+first"], categories=["+@all"], keys=["*"])
    with opened(None, f"redis+cluster://kv:first@127.0.0.1:{server.port}") as store:
        assert eventually(lambda: store.save(rows, many_payloads(3)) == [SaveOutcome.STORED] * 3)
        before = store.tier.errors()
        server.client.acl_setuser("kv", enabled=True, passwords=["-first", "+second"])
        server.client.client_kill_filter(_type="normal", skipme=True)
        for _ in range(3):
            assert store.load(rows, SIZE)[0].causes == [MissCause.UNAVAILABLE] * 3
        # Somebody asked for the slots, too.
        assert set(store.tier.errors() - before) == {"refused"}
        assert "invalid username-password pair" in store.tier.status().reason
        server.client.acl_setuser("kv", enabled=True, passwords=["+first"])
        assert eventually(lambda: store.match(rows) == 3)
        assert store.tier.status().healthy


def test_a_cluster_with_tls(tmp_path: Path) -> None:
    server, query = start_tls(tmp_path, None, **cluster_settings(), **{"tls-cluster": "yes"})
    server.run("CLUSTER ADDSLOTSRANGE", 0, 16383)
    place = f"127.0.0.1:{server.setting('tls-port')}"
    with opened(None, f"rediss+cluster://{place}?{query}") as store:
        rows = rows_of(300)
        assert eventually(lambda: store.save(rows, many_payloads(300)) == [SaveOutcome.STORED] * 300)
        assert_loads(store, rows, many_payloads(300))
        assert store.tier.breakers() == {place: False}
    server.close()


def test_closed_it_refuses_and_leaves_nothing_open(cluster: ClusterFleet) -> None:
    def connections() -> int:
        return sum(len(node.client.client_list(_type="normal")) for node in cluster.nodes)

    before, rows = connections(), rows_of(600)
    with opened(None, cluster.url) as store:
        store.save(rows, many_payloads(600))
        assert store.match(rows) == 600
        assert connections() > before
        store.tier.close()
        store.tier.close()
        assert eventually(lambda: connections() <= before)
        assert store.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)
        assert store.save(rows, many_payloads(600)) == [SaveOutcome.UNAVAILABLE] * 600
        assert store.load(rows, SIZE)[0].causes == [MissCause.UNAVAILABLE] * 600
        assert store.tier.status() == TierStatus(healthy=False, reason="redis cluster: closed")
        assert store.tier.errors() == {}
