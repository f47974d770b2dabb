"""Servers that the tests of a module share, each test with an empty one: a start costs more than a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import KVStoreError
from kvstore.service.operator import Operator
from tests.support.crash_checks import settle
from tests.support.sidecars import Sidecar, sidecar


class Servers:
    """One server for each set of settings. One that a failed test has left in a bad state is replaced."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Sidecar, ExitStack]] = {}

    def empty(self, **settings: Any) -> Sidecar:
        """A server that nobody uses and that holds no blocks."""
        key = repr(sorted(settings.items()))
        if key in self._running and not _emptied(self._running[key][0]):
            self._running.pop(key)[1].close()
        if key not in self._running:
            opened = ExitStack()
            self._running[key] = opened.enter_context(sidecar(**settings)), opened
        return self._running[key][0]

    def close(self) -> None:
        for _, opened in self._running.values():
            opened.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


def _emptied(server: Sidecar) -> bool:
    Path(f"{server.pool_path}.step").unlink(missing_ok=True)
    if server.process.poll() is not None:
        return False
    try:
        settle(server)
        with Operator(server.address) as operator:
            return operator.clear().held_blocks == 0
    except (AssertionError, KVStoreError):
        return False
