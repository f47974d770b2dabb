"""What has to be true of a sidecar after a crash, by what anybody can see of it."""

from __future__ import annotations

import itertools
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvstore.block import TierName
from kvstore.service.client import Client, ClientNamespace, ClientOptions, Outcome
from kvstore.service.operator import Operator
from kvstore.service.reports import PoolReport, ServerStatus
from kvstore.table import SlotState
from tests.support.crash_blocks import BLOCK_SIZE, SPEC, chain, payloads_of
from tests.support.crash_census import take_census
from tests.support.sidecars import Sidecar

POOL = {"pool_bytes": "4MiB", "extent_bytes": "1MiB"}
"""Settings of a pool that is soon full."""
SETTLE_SECONDS = 6.0
FLOOD_PROMPTS, FLOOD_BLOCKS = 40, 16
ROUND_TRIP_BLOCKS = 2

_POLL_SECONDS = 0.05
_round_trips = itertools.count(900_000)


def status_of(server: Sidecar) -> ServerStatus:
    with Operator(server.address) as operator:
        return operator.status()


def pool_of(status: ServerStatus) -> PoolReport:
    found = next(tier.pool for tier in status.tiers if tier.tier is TierName.HOST)
    assert found is not None
    return found


def held_by(status: ServerStatus) -> dict[str, int]:
    """What somebody has in use; empty when nothing is."""
    pool = pool_of(status)
    held = {
        "leases": status.leases,
        "writes": status.writes,
        "staged bytes": pool.staged_bytes,
        "quarantined bytes": pool.quarantined_bytes,
        "leased bytes": pool.leased_bytes,
        "bytes to reserve": pool.limit_bytes - pool.reserved_bytes,
    }
    return {what: count for what, count in held.items() if count}


def settle(server: Sidecar, seconds: float = SETTLE_SECONDS) -> ServerStatus:
    """Wait until nobody has anything in use; AssertionError saying what is still there."""
    deadline = time.monotonic() + seconds
    with Operator(server.address) as operator:
        while held := held_by(status := operator.status()):
            assert time.monotonic() < deadline, f"in use after {seconds} s: {held}"
            time.sleep(_POLL_SECONDS)
    return status


def check(server: Sidecar) -> ServerStatus:
    """Let everything end, and compare the server's books, its file, its counters and its service."""
    status = settle(server)
    _check_books(server, status)
    _check_counts(server, status)
    _check_service(server)
    return status


def resident_blocks(server: Sidecar, number: int, blocks: int) -> int:
    """Leading blocks of a prompt that can be read, with every byte compared on the way."""
    with fresh_client(server) as namespace:
        return read_right(namespace, number, blocks)


@contextmanager
def fresh_client(server: Sidecar) -> Iterator[ClientNamespace]:
    """A client that has seen nothing yet, in this process."""
    with Client(server.address, options=ClientOptions(rpc_seconds=5.0)) as client:
        yield client.namespace(SPEC)


def read_right(namespace: ClientNamespace, number: int, blocks: int) -> int:
    """Leading blocks of a prompt that were read; AssertionError where a byte is not its writer's."""
    hashed = chain(number, blocks)
    copies = [np.zeros_like(payload) for payload in payloads_of(hashed)]
    with namespace.acquire(hashed) as lease:
        assert lease.outcome is Outcome.OK
        read = lease.copy_out(copies)
    for copy, meant in zip(copies[:read], payloads_of(hashed), strict=False):
        np.testing.assert_array_equal(copy, meant)
    return read


def write_whole(namespace: ClientNamespace, number: int, blocks: int) -> int:
    """Write what is missing of a prompt; blocks that became visible."""
    hashed = chain(number, blocks)
    with namespace.write(hashed) as staged:
        yours = [at for at, is_ in enumerate(staged.status) if str(is_) == "yours"]
        payloads = payloads_of(hashed)
        for at, place in zip(yours, staged.payloads, strict=True):
            np.copyto(place, payloads[at])
    assert staged.outcome is Outcome.OK
    return staged.committed_blocks


def flood(server: Sidecar, first: int) -> None:
    """Fill the pool of ``POOL`` several times over with prompts of others, from number ``first`` on."""
    with fresh_client(server) as namespace:
        for number in range(first, first + FLOOD_PROMPTS):
            assert write_whole(namespace, number, FLOOD_BLOCKS) == FLOOD_BLOCKS


def scrape(server: Sidecar) -> dict[tuple[str, str], float]:
    """Samples of /metrics by name and by the value of the label that tells them apart here, added up."""
    with urllib.request.urlopen(f"{server.serving['http']}/metrics", timeout=5.0) as page:
        text = page.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, sample.labels.get("state", sample.labels.get("cause", ""))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def _check_books(server: Sidecar, status: ServerStatus) -> None:
    pool, census = pool_of(status), take_census(server.pool_path)
    assert not census.wrong, f"{len(census.wrong)} rows are wrong: {census.wrong[:3]}"
    in_use = census.slots[SlotState.STAGED], census.slots[SlotState.QUARANTINED]
    assert in_use == (0, 0), f"slots that the file says are staged and quarantined: {in_use}"
    counted = census.bytes_in(SlotState.READY)
    assert counted == pool.ready_bytes, f"{counted} bytes are readable, the server says {pool.ready_bytes}"
    used = pool.free_bytes + pool.staged_bytes + pool.ready_bytes + pool.quarantined_bytes
    assert min(pool.free_bytes, pool.ready_bytes) >= 0, pool
    assert used == pool.reserved_bytes == pool.limit_bytes, pool


def _check_counts(server: Sidecar, status: ServerStatus) -> None:
    counts = (status.asked_tokens, *status.hit_tokens.values(), *status.miss_tokens.values())
    assert min(counts) >= 0, status
    answered = sum(status.hit_tokens.values()) + sum(status.miss_tokens.values())
    assert status.asked_tokens == answered, f"{status.asked_tokens} tokens asked, {answered} hit or missed"
    samples, pool = scrape(server), pool_of(status)
    totals = dict.fromkeys(("asked", "hit", "miss"), 0.0)
    for (name, _), value in samples.items():
        for what in totals:
            totals[what] += value * (name == f"kvstore_{what}_tokens_total")
    assert totals["asked"] == totals["hit"] + totals["miss"] == status.asked_tokens, totals
    for state in SlotState:
        name = state.name.lower()
        assert samples["kvstore_pool_bytes", name] == getattr(pool, f"{name}_bytes"), name
    for name in ("kvstore_leases", "kvstore_listener_failures_total"):
        assert samples[name, ""] == 0, f"{name} is {samples[name, '']:g}"


def _check_service(server: Sidecar) -> None:
    """A prompt that nobody has written yet is written and read, and counted to the token."""
    number = next(_round_trips)
    before = status_of(server)
    with fresh_client(server) as namespace:
        written = write_whole(namespace, number, ROUND_TRIP_BLOCKS)
        read = read_right(namespace, number, ROUND_TRIP_BLOCKS)
    after = settle(server)
    asked = after.asked_tokens - before.asked_tokens
    missed = sum(after.miss_tokens.values()) - sum(before.miss_tokens.values())
    expected = ROUND_TRIP_BLOCKS, ROUND_TRIP_BLOCKS, ROUND_TRIP_BLOCKS * BLOCK_SIZE, 0
    found = written, read, asked, missed
    assert found == expected, (
        f"blocks written and read, tokens asked and missed: {found}, expected {expected}"
    )
