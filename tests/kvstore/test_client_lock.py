"""A server sees that a client lives by a lock that only the kernel can take away."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.client_lock import MOST_CLIENTS, is_locked, lock
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool_view import PoolView
from tests.support.pool_processes import kill, mapping
from tests.support.stores import FakeClock, make_host, pool_folder


@pytest.fixture
def host() -> Iterator[HostTier]:
    with pool_folder() as folder:
        made = make_host(folder, FakeClock())
        yield made
        made.close()


def open_view(host: HostTier, client: int) -> PoolView:
    return PoolView(host.file.path, host.file.epoch, client)


class TestLock:
    def test_one_open_file_excludes_another_and_numbers_do_not_touch_each_other(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.touch()
        ours, theirs = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
        for number in (0, 5, MOST_CLIENTS):
            assert not is_locked(ours, number)
            assert lock(theirs, number)
            assert is_locked(ours, number)
            assert not is_locked(theirs, number), "one's own lock is nobody else's"
            assert not lock(ours, number)
            assert lock(ours, number + 1)
        os.close(theirs)
        assert lock(ours, 5)
        os.close(ours)


class TestClient:
    def test_one_that_was_killed_is_gone(self, host: HostTier) -> None:
        """LMCache #987 #1034: what a dead client held must not be held for ever."""
        assert not host.client_alive(7)
        with mapping(host.file.path, host.file.epoch, client=7) as process:
            assert host.client_alive(7)
            assert not host.client_alive(8)
            kill(process)
            assert not host.client_alive(7)

    def test_a_forked_child_can_still_write(self, host: HostTier) -> None:
        """Workers of an engine are forked: the mapping is theirs too."""
        fork = "\nchild = os.fork()\nif not child:\n    time.sleep(60)\nprint(child, flush=True)"
        with mapping(host.file.path, host.file.epoch, 7, "print('mapped', flush=True)" + fork) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            kill(process)
            assert host.client_alive(7)
            os.kill(child, 9)
            deadline = time.monotonic() + 10
            while host.client_alive(7):
                assert time.monotonic() < deadline, "the lock outlives all processes"
                time.sleep(0.001)

    def test_a_view_of_the_memory_keeps_a_closed_client_alive(self, host: HostTier) -> None:
        client = open_view(host, 7)
        memory = client.memory[:10]
        client.close()
        client.close()
        assert host.client_alive(7)
        del memory
        assert not host.client_alive(7)
