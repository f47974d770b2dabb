"""Metrics and health over real sockets: what each page says, and that no client costs anything."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import pytest

from kvstore.address import Address
from kvstore.block import TierName
from kvstore.errors import ConfigError
from kvstore.tiers.base import TierStatus
from kvstore.web import Live, Past, Questions, Readiness, State, WebLimits, WebServer
from kvstore.web.assets import FILES

LOOPBACK = Address(host="127.0.0.1")
KNOWN = b"/, /metrics, /healthz, /readyz, /live.json, /history.json\n"
ROOMY = WebLimits(owner_seconds=10.0)
"""For tests in which the owner answers: on a busy machine that takes as long as it takes."""


@dataclass
class Owner:
    """An event loop on a thread, and what it says when it is asked."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    readiness: Readiness = field(default_factory=lambda: Readiness(State.SERVING, {}))
    asked_on: list[int | None] = field(default_factory=list)
    failure: BaseException | None = None

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        self.asked_on.append(threading.current_thread().ident)
        if self.failure:
            raise self.failure
        return f"accept {accept}\n".encode(), "text/x-metrics"

    async def ready(self) -> Readiness:
        return self.readiness

    async def live(self) -> Live:
        return Live("instance", "1.2", 3.5, self.readiness, {}, ())

    async def past(self) -> tuple[str, Past]:
        return "instance", Past()

    @property
    def questions(self) -> Questions:
        return Questions(self.metrics, self.ready, self.live, self.past)

    @contextmanager
    def stuck(self) -> Iterator[None]:
        """Inside, the loop does one thing and nothing else."""
        begun, release = threading.Event(), threading.Event()

        def block() -> None:
            begun.set()
            release.wait(60)

        self.loop.call_soon_threadsafe(block)
        assert begun.wait(60)
        yield
        release.set()


@pytest.fixture(name="owner")
def _owner() -> Iterator[Owner]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Owner(loop, thread)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def serving(owner: Owner, limits: WebLimits = ROOMY, address: Address = LOOPBACK) -> Iterator[WebServer]:
    server = WebServer(address, owner.questions, owner.loop, clock=time.monotonic, limits=limits)
    server.start()
    try:
        yield server
    finally:
        server.close()


@dataclass(frozen=True)
class Reply:
    status: int
    content_type: str | None
    body: bytes


def connection_to(server: WebServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)


def ask(server: WebServer, path: str, method: str = "GET", **headers: str) -> Reply:
    with closing(connection_to(server)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Reply(response.status, response.headers["Content-Type"], response.read())


def send(server: WebServer, text: bytes) -> bytes:
    """All that comes back for some bytes."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(text)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:  # it had not read all that was sent
        pass
    return received


def drip(place: tuple[str, int]) -> None:
    """Send a header that never ends, one byte now and then, until the server hangs up."""
    deadline = time.monotonic() + 30
    with closing(socket.create_connection(place, timeout=30)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nname: ")
        try:
            while time.monotonic() < deadline:
                connection.sendall(b"a")
                time.sleep(0.01)
        except (BrokenPipeError, ConnectionResetError):
            return
    pytest.fail("the server listens for ever")


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_metrics_are_rendered_on_the_owners_thread(owner: Owner) -> None:
    with serving(owner) as server:
        assert ask(server, "/metrics", Accept="application/x") == Reply(
            200, "text/x-metrics", b"accept application/x\n"
        )
        assert ask(server, "/metrics?name=a") == Reply(200, "text/x-metrics", b"accept \n")
    assert set(owner.asked_on) == {owner.thread.ident}


@pytest.mark.parametrize(
    ("state", "status"), [(State.LOADING, 503), (State.SERVING, 200), (State.DRAINING, 503)]
)
def test_ready_is_who_takes_requests(owner: Owner, state: State, status: int) -> None:
    """A redis that is down is named, and takes nobody out of service."""
    down = TierStatus(healthy=False, reason="redis cache:6379 has not answered for 3.0 s")
    owner.readiness = Readiness(state, {TierName.HOST: TierStatus(healthy=True), TierName.REDIS: down})
    with serving(owner) as server:
        reply = ask(server, "/readyz")
    assert (reply.status, reply.content_type) == (status, "application/json")
    assert json.loads(reply.body) == {
        "ready": state is State.SERVING,
        "state": state.value,
        "tiers": {
            "host": {"healthy": True, "reason": ""},
            "redis": {"healthy": False, "reason": "redis cache:6379 has not answered for 3.0 s"},
        },
    }


def test_health_is_that_the_owner_answers(owner: Owner) -> None:
    with serving(owner) as server:
        assert ask(server, "/healthz") == Reply(200, "text/plain; charset=utf-8", b"ok\n")


@pytest.mark.parametrize("path", FILES)
def test_the_page_comes_from_memory_and_may_load_nothing_from_elsewhere(owner: Owner, path: str) -> None:
    with serving(owner) as server, owner.stuck(), closing(connection_to(server)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    policy = response.headers["Content-Security-Policy"]
    assert (response.status, response.headers["Content-Type"]) == (200, FILES[path][1])
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert body
    outside = body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"//" not in outside.replace(b"// ", b""), "an address"


def test_the_present_and_the_past_are_json(owner: Owner) -> None:
    with serving(owner) as server:
        live, past = ask(server, "/live.json"), ask(server, "/history.json")
    assert [reply.content_type for reply in (live, past)] == ["application/json"] * 2
    assert json.loads(live.body) == {
        "instance": "instance",
        "version": "1.2",
        "uptime_seconds": 3.5,
        "ready": True,
        "state": "serving",
        "tiers": {},
        "samples": [],
        "namespaces": [],
    }
    assert json.loads(past.body) == {"instance": "instance", "ages_seconds": [], "series": []}


def test_a_stuck_owner_is_seen(owner: Owner) -> None:
    with serving(owner, WebLimits(owner_seconds=0.05)) as server:
        with owner.stuck():
            silent = b"the store has not answered within 0.05 s\n"
            assert ask(server, "/healthz") == Reply(503, "text/plain; charset=utf-8", silent)
            assert ask(server, "/metrics").status == 503
            ready = ask(server, "/readyz")
            assert (ready.status, json.loads(ready.body)["state"]) == (503, "stalled")
        eventually(lambda: ask(server, "/healthz").status == 200)


def test_an_owner_that_is_gone_is_seen() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with serving(Owner(loop, threading.current_thread())) as server:
        asked = ("/healthz", "/readyz", "/metrics", "/live.json", "/history.json")
        assert [ask(server, path).status for path in asked] == [503] * len(asked)
        assert ask(server, "/").status == 200, "the page itself says that nobody answers"


def test_a_question_that_is_given_up_is_answered(owner: Owner) -> None:
    """As when the owner's loop ends with a question on it."""
    with serving(owner) as server:
        owner.failure = asyncio.CancelledError()
        assert ask(server, "/metrics").status == 503


def test_an_answer_that_fails_is_logged(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    owner.failure = ZeroDivisionError("a bug")
    with serving(owner) as server:
        reply = ask(server, "/metrics")
        assert (reply.status, reply.body) == (500, b"/metrics failed; the log says why\n")
        assert ask(server, "/healthz").status == 200
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[1] is owner.failure


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("HEAD", "/healthz", 200, b""),
        ("GET", "/healthz/", 404, b"there is no /healthz/, expected one of " + KNOWN),
        ("GET", "/../metric_table.py", 404, b"there is no /../metric_table.py, expected one of " + KNOWN),
        ("GET", "/%2e%2e/pages.py", 404, b"there is no /%2e%2e/pages.py, expected one of " + KNOWN),
        ("GET", "http://elsewhere/", 404, b"there is no http://elsewhere/, expected one of " + KNOWN),
        ("GET", "/" + "a" * 999, 404, b"there is no /" + b"a" * 99 + b", expected one of " + KNOWN),
        ("POST", "/metrics", 405, b"405 nothing can be changed here; use GET\n"),
        ("DELETE", "/metrics", 405, b"405 nothing can be changed here; use GET\n"),
        ("PUT", "/", 405, b"405 nothing can be changed here; use GET\n"),
        ("BREW", "/metrics", 501, b"501 Unsupported method ('BREW')\n"),
    ],
)
def test_other_paths_and_methods(owner: Owner, method: str, path: str, status: int, body: bytes) -> None:
    with serving(owner) as server:
        reply = ask(server, path, method)
    assert (reply.status, reply.body) == (status, body)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/9.9\r\n\r\n", b"505"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nAccept: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /\0\xff\x1b[2J HTTP/1.1\r\n\r\n", b"404"),
    ],
)
def test_a_bad_request_is_refused(owner: Owner, request_bytes: bytes, status: bytes) -> None:
    with serving(owner) as server:
        received = send(server, request_bytes)
        assert ask(server, "/healthz").status == 200
    assert not received or status in received.splitlines()[0]
    assert b"Traceback" not in received


def test_clients_that_are_slow_or_leave_cost_nothing(owner: Owner, capfd: pytest.CaptureFixture[str]) -> None:
    """Silent ones, one that goes on sending for ever, and one that leaves before it is answered."""
    threads = threading.active_count()
    with serving(owner, WebLimits(request_seconds=0.3, owner_seconds=10.0)) as server:
        place = ("127.0.0.1", server.port)
        silent = [socket.create_connection(place, timeout=30) for _ in range(3)]
        leaving = socket.create_connection(place)
        leaving.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        leaving.close()
        drip(place)
        for connection in silent:
            assert read_all(connection) == b""
            connection.close()
        assert ask(server, "/healthz").status == 200
    eventually(lambda: threading.active_count() == threads)
    assert capfd.readouterr() == ("", "")


def test_connections_are_bounded(owner: Owner) -> None:
    """The one too many is told so at once; there is room again when another goes."""
    with serving(owner, WebLimits(connections=2, request_seconds=600.0, owner_seconds=10.0)) as server:
        place = ("127.0.0.1", server.port)
        held = [socket.create_connection(place) for _ in range(2)]
        assert send(server, b"").startswith(b"HTTP/1.0 503 ")
        held.pop().close()
        eventually(lambda: not send(server, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 503 "))
        held.pop().close()


def test_close_waits_for_nobody(owner: Owner) -> None:
    """Neither for a client that is silent nor for an owner that is stuck, whom a request waits for."""
    replies: Future[bytes] = Future()
    with serving(owner, WebLimits(request_seconds=600.0, owner_seconds=600.0)) as server:
        silent = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        with owner.stuck():
            asking = threading.Thread(
                target=lambda: replies.set_result(send(server, b"GET /healthz HTTP/1.0\r\n\r\n"))
            )
            asking.start()
            time.sleep(0.05)
            server.close()
            assert replies.result(30) == b""
            assert read_all(silent) == b""
        asking.join()
        silent.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=30)


def test_an_address_in_use_is_named(owner: Owner) -> None:
    with serving(owner) as first:
        address = Address(host="127.0.0.1", port=first.port)
        with pytest.raises(
            ConfigError, match=rf"http_listen {address} cannot be listened on: Address already"
        ):
            WebServer(address, owner.questions, owner.loop, clock=time.monotonic).start()


def test_an_ipv6_address(owner: Owner) -> None:
    """Served where the machine has one, else refused by name."""
    address = Address(host="::1")
    if not has_ipv6():
        with pytest.raises(ConfigError, match=r"http_listen \[::1\]:0 cannot be listened on"):
            WebServer(address, owner.questions, owner.loop, clock=time.monotonic).start()
        return
    with (
        serving(owner, address=address) as server,
        closing(http.client.HTTPConnection("::1", server.port, timeout=30)) as connection,
    ):
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
