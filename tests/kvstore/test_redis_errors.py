"""Which error replies are counted under which name, and how often the log hears of them."""

from __future__ import annotations

import pytest

from kvstore.tiers.redis_errors import QUIET_SECONDS, ErrorLog
from tests.support.stores import FakeClock


def test_kinds_are_a_closed_set_whatever_a_server_says() -> None:
    log = ErrorLog("host:1", FakeClock())
    log.add("timeout")
    log.add_replies(["OOM", "MADEUP", "EXECABORT", "OOM"])
    assert log.counts() == {"timeout": 1, "oom": 2, "other": 2}
    assert set(log.current()) == {"oom", "other"}, "an exchange that failed is the breaker's to tell"


def test_an_error_is_news_once_until_it_was_gone_for_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = ErrorLog("host:1", clock)
    for _ in range(10):
        log.add_replies(["NOPERM"] * 5)
        clock.advance(QUIET_SECONDS - 1)
    assert len(caplog.messages) == 1
    assert log.current() == ["noperm"]
    clock.advance(1)
    assert log.current() == []
    log.add_replies(["NOPERM"])
    assert len(caplog.messages) == 2


def test_each_code_is_news_of_its_own_and_the_latest_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = ErrorLog("host:1", clock)
    for code in ("READONLY", "MISCONF", "READONLY", "X" * 10_000):
        log.add_replies([code])
        clock.advance(1)
    assert log.current() == ["other", "readonly", "misconf"]
    assert ["READONLY" in caplog.messages[0], "MISCONF" in caplog.messages[1]] == [True, True]
    assert "name the primary in redis_url" in caplog.messages[0]
    assert len(caplog.messages) == 3
    assert len(caplog.messages[2]) < 300


def test_no_errors_no_words(caplog: pytest.LogCaptureFixture) -> None:
    log = ErrorLog("host:1", FakeClock())
    log.add_replies([])
    assert (log.counts(), log.current(), caplog.messages) == ({}, [], [])
