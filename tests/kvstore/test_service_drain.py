"""The end of a sidecar, and its beginning where another one is there already."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.v1 import admin_pb2, block_pb2
from tests.support.serve_command import fails_to_serve
from tests.support.sidecars import STOP_SECONDS, Sidecar, sidecar
from tests.support.stubs import (
    PIECE_BYTES,
    YOURS,
    Peer,
    Raw,
    checksum,
    dialled,
    refused,
    spec,
    tokens_of,
)
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, valkey

__all__ = ["shared_valkey", "valkey"]

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
PROMPT = tokens_of(16)
BIG = spec("big", payload_bytes=1_500_000)
QUICK_SECONDS = 3.0
"""For a server that has nothing to wait for, on a busy machine."""


def health(raw: Raw) -> Any:
    return health_pb2_grpc.HealthStub(raw.channel)


def not_serving(raw: Raw) -> bool:
    answer = health(raw).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


def http_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def await_end(server: Sidecar) -> None:
    assert server.process.wait(STOP_SECONDS) == 0
    assert server.process.stdout is not None
    server.process.stdout.close()


@contextmanager
def draining(server: Sidecar, raw: Raw) -> Iterator[None]:
    """The server was told to end, and a client still holds something; afterwards it has ended in order."""
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: not_serving(raw))
    yield
    await_end(server)
    assert not Path(server.address.removeprefix("unix:")).exists(), "the socket file is still there"


def seconds_to_stop(server: Sidecar) -> float:
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await_end(server)
    return time.monotonic() - began


class TestNothingToWaitFor:
    def test_it_ends_at_once(self) -> None:
        with sidecar() as server, dialled(server.address) as raw:
            raw.register(spec("m")).write(PROMPT)
            began = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            await_end(server)
            assert time.monotonic() - began < QUICK_SECONDS
            assert not Path(server.address.removeprefix("unix:")).exists()
            assert Path(server.serving["pool_path"]).exists(), "what is stored stays for the next server"

    def test_watchers_are_told_and_do_not_hold_it_up(self) -> None:
        """Streams that never end by themselves are no work that has to be finished."""
        with sidecar() as server, dialled(server.address) as raw:
            events = raw.admin.WatchEvents(admin_pb2.WatchEventsRequest())
            states = health(raw).Watch(health_pb2.HealthCheckRequest(), timeout=30)
            next(events)
            assert next(states).status == health_pb2.HealthCheckResponse.SERVING
            assert seconds_to_stop(server) < QUICK_SECONDS
            assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError):
                list(events)


class TestWhoHoldsSomething:
    """A second or two to finish; the pool outlives the server."""

    @pytest.fixture
    def server(self) -> Iterator[Sidecar]:
        with sidecar(drain_seconds=2, pool_bytes="64MiB", extent_bytes="32MiB") as server:
            yield server

    @pytest.fixture
    def raw(self, server: Sidecar) -> Iterator[Raw]:
        with dialled(server.address) as raw:
            yield raw

    @pytest.fixture
    def peer(self, raw: Raw) -> Peer:
        peer = raw.register(BIG)
        assert peer.write(PROMPT) == [YOURS] * 16
        return peer

    def test_new_calls_are_turned_away_and_told_so(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        lease = peer.hold(PROMPT, "r")
        with draining(server, raw):
            for call in (
                lambda: peer.look_up(PROMPT),
                lambda: peer.explain(PROMPT),
                lambda: peer.acquire(PROMPT, "s"),
                lambda: peer.begin(tokens_of(2, seed=2)),
                lambda: raw.register(spec("late")),
                raw.status,
            ):
                with refused(UNAVAILABLE, "shutting down"):
                    call()
            assert http_status(server.serving["http"] + "/readyz") == 503
            assert http_status(server.serving["http"] + "/healthz") == 200, "it lives, and is not restarted"
            with dialled(server.address) as late, refused(UNAVAILABLE):
                late.register(spec("late"))
            peer.release(lease)
        with refused(UNAVAILABLE):
            peer.look_up(PROMPT)

    def test_a_stream_is_finished(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        lease = peer.hold(PROMPT, "r")
        pieces = raw.blocks.ReadBlocks(block_pb2.ReadBlocksRequest(**peer.me, lease_id=lease))
        data = next(pieces).data
        with draining(server, raw):
            data += b"".join(piece.data for piece in pieces)
            assert data == b"".join(peer.payloads(PROMPT))
            assert peer.read(lease, blocks=1)[0] == peer.payloads(PROMPT)[0], "what is held can be read"
            peer.release(lease)

    def test_a_write_is_finished_and_kept(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        new = tokens_of(3, seed=2)
        begun, payloads = peer.begin(new), peer.payloads(new)
        with draining(server, raw):
            peer.send(
                begun.write_id,
                [part for each in payloads for part in (each[:PIECE_BYTES], each[PIECE_BYTES:])],
            )
            assert peer.commit(begun.write_id, [checksum(each) for each in payloads]) == 3
        server.start()
        with dialled(server.address) as again:
            found = again.register(BIG)
            assert [found.matched(each) for each in (new, PROMPT)] == [48, 256]

    def test_nobody_waits_for_the_last_client_to_let_go(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        """A lease that nobody releases, and a stream that nobody reads, cost drain_seconds and no more."""
        lease = peer.hold(PROMPT, "r")
        pieces = raw.blocks.ReadBlocks(block_pb2.ReadBlocksRequest(**peer.me, lease_id=lease))
        next(pieces)
        assert 2 <= seconds_to_stop(server) < 2 + QUICK_SECONDS
        with pytest.raises(grpc.RpcError) as caught:
            for _ in pieces:
                pass
        assert caught.value.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)


@pytest.mark.redis
def test_a_request_that_waits_for_redis_is_answered_in_time(valkey: ValkeyServer) -> None:
    settings = {"redis_url": valkey.url, "redis_probe_seconds": 20, "redis_acquire_seconds": 20}
    with sidecar(drain_seconds=1, **settings) as server, dialled(server.address) as raw:
        peer = raw.register(spec("waits"))
        valkey.stop()
        with ThreadPoolExecutor(1) as thread:
            try:
                waiting = thread.submit(peer.acquire, PROMPT, "r", wait_seconds=15)
                assert eventually(lambda: raw.status().leases == 1)
                began = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                ended: Any = waiting.exception(10)
                assert time.monotonic() - began < 1 + QUICK_SECONDS
            finally:
                valkey.resume()
        if ended is not None:
            assert ended.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert server.process.wait(STOP_SECONDS) == 0


class TestAnotherServer:
    @pytest.fixture(scope="class")
    @classmethod
    def first(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
        folder = tmp_path_factory.mktemp("first")
        with sidecar(listen=f"unix:{folder}/socket,127.0.0.1:0") as server:
            yield server

    @pytest.fixture
    def peer(self, first: Sidecar, request: pytest.FixtureRequest) -> Iterator[Peer]:
        """Of the first server: served as before, in the end."""
        with dialled(first.address) as raw:
            peer = raw.register(spec(request.node.name))
            peer.write(PROMPT)
            yield peer
            assert peer.matched(PROMPT) == 256
            lease = peer.hold(PROMPT, "r")
            assert peer.read(lease)[0] == b"".join(peer.payloads(PROMPT))
            peer.release(lease)
            assert not first.process.poll()

    def test_on_the_same_pool(self, first: Sidecar, peer: Peer) -> None:
        path = first.serving["pool_path"]
        said = fails_to_serve(pool_path=path)
        assert f"pool file {path} is in use by another server" in said
        assert "another pool_path" in said

    def test_on_the_same_socket(self, first: Sidecar, peer: Peer) -> None:
        said = fails_to_serve(listen=first.address)
        assert f"{first.address} is in use by another server" in said
        assert "listen" in said

    def test_on_the_same_port(self, first: Sidecar, peer: Peer) -> None:
        address = first.serving["addresses"][1]
        said = fails_to_serve(listen=address)
        assert f"cannot listen on {address}" in said
        assert "in use" in said

    def test_on_the_same_http_port(self, first: Sidecar, peer: Peer) -> None:
        address = first.serving["http"].removeprefix("http://")
        said = fails_to_serve(http_listen=address)
        assert address in said
        assert "http_listen" in said


class TestSocketFiles:
    def test_one_that_a_crash_left_is_replaced(self) -> None:
        with sidecar() as server:
            path = Path(server.address.removeprefix("unix:"))
            server.kill()
            assert path.is_socket()
            server.start()
            with dialled(server.address) as raw:
                assert raw.register(spec("m")).write(PROMPT) == [YOURS] * 16
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600, "whoever may open it is the admin"

    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_what_is_no_socket_is_left_alone(self, tmp_path: Path, kind: str) -> None:
        path, other = tmp_path / "socket", tmp_path / "other"
        other.write_text("mine", encoding="utf-8")
        if kind == "file":
            other.rename(path)
        else:
            path.symlink_to(other)
        said = fails_to_serve(listen=f"unix:{path}")
        assert f"unix:{path}" in said
        assert "no socket" in said
        assert path.read_text(encoding="utf-8") == "mine"

    def test_a_socket_that_listens_for_something_else(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            assert "in use" in fails_to_serve(listen=f"unix:{path}")
            assert path.is_socket()

    def test_the_socket_of_the_next_server_is_not_removed(self) -> None:
        """One that ends late takes away its own only."""
        with sidecar() as server:
            path = Path(server.address.removeprefix("unix:"))
            path.unlink()
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(path))
                assert server.stop() == 0
                assert path.is_socket()


class TestMemory:
    """The exact numbers and the fix before anything starts, not a SIGBUS later (cases 42)."""

    def test_a_tmpfs_that_is_too_small(self) -> None:
        with small_tmpfs(8 << 20) as folder:
            system = os.statvfs(folder)
            free = system.f_bavail * system.f_frsize
            # Where no tmpfs can be mounted the machine's own is asked for more than there is in all.
            asked = max(16 << 20, (system.f_blocks * system.f_frsize >> 20) + 1 << 20)
            said = fails_to_serve(pool_path=f"{folder}/pool", pool_bytes=asked)
            assert f"pool_bytes is {asked}, but" in said
            if free == 8 << 20:
                assert f"{folder} has {free} bytes free; lower pool_bytes to at most {free}" in said
                assert "--shm-size" in said
            assert "lower pool_bytes" in said
            assert not list(folder.iterdir()), "nothing was left behind"


@contextmanager
def small_tmpfs(size: int) -> Iterator[Path]:
    """A folder that is a tmpfs of that size, or one of the machine's where mounting is not allowed."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
        mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
        try:
            yield Path(folder)
        finally:
            if mounted:
                subprocess.run(["umount", folder], check=True)
