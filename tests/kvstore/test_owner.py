"""The event loop as the owner of a store: what happens when a background task dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.evict.lru import LRU
from kvstore.service.owner import Owner, Wake
from kvstore.store import TieredStore, Tiers
from kvstore.tiers.host import HostTier
from tests.support.stores import EXTENT_BYTES


class SweepError(Exception):
    """What a defect in the sweep would raise."""


def test_a_task_that_dies_turns_health_red_and_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache #4817 #4676: a dead background thread, and a server that calls itself healthy."""
    asyncio.run(_dies_once(tmp_path))
    assert "tick died and is started again" in caplog.text


async def _dies_once(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    host = HostTier(
        folder / "pool",
        pool_bytes=4 * EXTENT_BYTES,
        extent_bytes=EXTENT_BYTES,
        make_evictor=LRU,
        clock=loop.time,
    )
    wake = Wake()
    store = TieredStore(Tiers(host), clock=loop.time, wake=wake)
    sweeps, told = 0, []

    def sweep() -> None:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 1:
            raise SweepError

    async def changed() -> None:
        told.append(set(owner.failing))

    owner = Owner(store, wake, sweep, loop.time, changed)
    owner.start()
    deadline = loop.time() + 20
    while len(told) < 2 and loop.time() < deadline:
        await asyncio.sleep(0.01)
    await owner.stop()
    store.close()
    assert told == [{"tick"}, set()]
    assert owner.failures == {"tick": 1}
    assert sweeps >= 2
