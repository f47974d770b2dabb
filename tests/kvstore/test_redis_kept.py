"""An embedded server that is killed comes back, empty and not too often."""

from __future__ import annotations

import logging
import os
import signal
import socket
from pathlib import Path

import pytest
import redis

from kvstore.tiers.redis_kept import KeptRedis
from tests.support.valkey import eventually

pytestmark = pytest.mark.redis


class Looking:
    """Looks at a server that may be away."""

    def __init__(self, url: str) -> None:
        self.url = url

    def pid(self) -> int | None:
        try:
            with redis.Redis.from_url(self.url, protocol=2) as client:
                return int(client.info("server")["process_id"])
        except redis.ConnectionError:
            return None

    def kill(self) -> int:
        pid = self.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not Path(f"/proc/{pid}").exists()), "nobody reaped it"
        return pid


def test_killed_it_comes_back_empty_after_longer_and_longer_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with KeptRedis.start(first_pause_seconds=0.05) as kept:
        looking = Looking(kept.url)
        with redis.Redis.from_url(kept.url, protocol=2) as client:
            client.set("a", "b")
        for times in (1, 2):
            looking.kill()
            assert eventually(lambda times=times: caplog.text.count("runs again") == times)  # type: ignore[misc]
        assert kept.url == looking.url
        with redis.Redis.from_url(kept.url, protocol=2) as client:
            assert client.dbsize() == 0
        last = looking.pid()
    assert not Path(f"/proc/{last}").exists()
    told = [record.getMessage().rpartition("lost, ")[2] for record in caplog.records]
    again = "the embedded redis runs again, and is empty"
    assert told == ["another is started in 0.05 s", again, "another is started in 0.1 s", again]
    assert "was ended by signal 9" in caplog.text


def test_a_port_that_was_taken_meanwhile_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with KeptRedis.start(first_pause_seconds=0.3) as kept:
        looking = Looking(kept.url)
        host, _, port = kept.url.removeprefix("redis://").removesuffix("/0").partition(":")
        looking.kill()
        with socket.create_server((host, int(port))):
            assert eventually(lambda: "was not started again" in caplog.text)
        assert eventually(lambda: looking.pid() is not None)


def test_closed_while_it_pauses_it_starts_no_more(caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptRedis.start(first_pause_seconds=600)
    looking = Looking(kept.url)
    looking.kill()
    assert eventually(lambda: "started in 600 s" in caplog.text)
    kept.close()
    assert looking.pid() is None
