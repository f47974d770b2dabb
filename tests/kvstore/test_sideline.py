"""Work beside the owner: in order, bounded in bytes, never in the owner's way."""

from __future__ import annotations

import logging
import threading

import pytest

from kvstore.sideline import Sideline


def test_items_are_done_in_order_and_the_end_waits_for_them() -> None:
    done: list[int] = []
    idle: list[int] = []
    line: Sideline[int] = Sideline("numbers", done.append, idle=lambda: idle.append(len(done)))
    for number in range(100):
        line.put(number, 1)
    assert line.close()
    assert line.close()
    assert done == list(range(100))
    assert idle[-1] == 100


def test_what_does_not_fit_is_counted_and_the_owner_goes_on() -> None:
    started, gate, done = threading.Event(), threading.Event(), list[int]()

    def work(number: int) -> None:
        started.set()
        assert gate.wait(10)
        done.append(number)

    line = Sideline("slow", work, queue_bytes=30)
    for number in range(5):
        line.put(number, 10)
    assert started.wait(10)
    assert (line.dropped, line.idle, done) == (2, False, [])
    gate.set()
    assert line.close()
    assert (done, line.idle) == ([0, 1, 2], True)


def test_it_is_idle_again_and_again_while_nothing_comes() -> None:
    """Whoever has something to do after a time does it then."""
    seen = threading.Semaphore(0)
    line: Sideline[int] = Sideline("quiet", lambda _: None, idle=seen.release)
    line.put(1, 1)
    assert all(seen.acquire(timeout=10) for _ in range(3))
    assert line.close()


def test_an_item_that_fails_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    line: Sideline[int] = Sideline("divider", lambda number: done.append(1 // number))
    for number in (1, 0, 1):
        line.put(number, 1)
    assert line.close()
    assert (done, line.failures, line.skipped) == ([1, 1], 1, 1)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, "divider failed")
    ]


def test_an_end_that_takes_too_long_is_told() -> None:
    gate = threading.Event()

    def work(_: int) -> None:
        assert gate.wait(10)

    line = Sideline("stuck", work)
    line.put(1, 1)
    assert not line.close(0.05)
    gate.set()
    assert line.close()
