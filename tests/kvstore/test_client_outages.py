"""A server that is away, goes away, comes back or turns out to be another costs hits and nothing else."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.block import WHOLE, MissCause
from kvstore.service.client import BlockStatus, Client, ClientOptions, Outcome
from kvstore.service.operator import Operator
from kvstore.tiers.pool_view import PoolView
from tests.support.clients import (
    FAST,
    MAPPED,
    OPPOSITES,
    Kind,
    assert_right,
    client_of,
    empty_payload,
    eventually,
    put,
    resident,
)
from tests.support.proxy import Behaviour, Fault, Proxy
from tests.support.sidecars import REPOSITORY, Sidecar, sidecar
from tests.support.stores import PAYLOAD_BYTES, make_chain, make_spec, payload_of

SPEC = make_spec()
CHAIN = make_chain(SPEC, "abcdefgh")

by_kind = pytest.mark.parametrize("kind", OPPOSITES, ids=str)


@contextmanager
def stopped(server: Sidecar) -> Iterator[None]:
    """A server that is connected and says nothing."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.resume()


@by_kind
def test_without_a_server_everything_is_a_miss_at_once(kind: Kind, tmp_path: Path) -> None:
    with client_of(kind, f"unix:{tmp_path}/nobody") as client:
        namespace = client.namespace(SPEC)
        began = time.monotonic()
        for _ in range(50):
            with namespace.acquire(CHAIN) as lease:
                assert (lease.outcome, lease.blocks, lease.cause) == (
                    Outcome.UNREACHABLE,
                    0,
                    MissCause.UNAVAILABLE,
                )
                assert lease.copy_out([empty_payload()]) == 0
            with namespace.write(CHAIN, first_block=3) as write:
                assert (write.status, write.payloads) == ([BlockStatus.REFUSED] * 5, [])
            assert write.outcome is Outcome.UNREACHABLE
            assert namespace.lookup([1] * 9).outcome is Outcome.UNREACHABLE
            assert namespace.prefetch(CHAIN).outcome is Outcome.UNREACHABLE
            assert namespace.register() is Outcome.UNREACHABLE
        assert time.monotonic() - began < 1.0, "calls without a server are not cheap"
        assert client.failures == {Outcome.UNREACHABLE: 250}


def test_a_host_that_drops_packets_delays_three_calls(caplog: pytest.LogCaptureFixture) -> None:
    """Calls have a deadline (LMCache #4642): a full backlog is a server that never accepts."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        options = ClientOptions(rpc_seconds=0.3, reconnect_seconds=30)
        with Client(f"127.0.0.1:{port}", options=options) as client:
            namespace = client.namespace(SPEC)
            began = time.monotonic()
            for _ in range(3):
                assert namespace.acquire(CHAIN).outcome is Outcome.UNREACHABLE
            waited = time.monotonic() - began
            for _ in range(100):
                assert namespace.acquire(CHAIN).outcome is Outcome.UNREACHABLE
            assert waited < 4.0
            assert time.monotonic() - began - waited < 0.3
    assert len(caplog.records) == 1, "an outage is logged once"
    assert caplog.records[0].exc_info is None


@by_kind
def test_a_killed_server_gets_its_clients_back_with_their_blocks(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted server gets its clients back without restarting the engine (LMCache #4642)."""
    caplog.set_level(logging.WARNING, "kvstore.service.client")
    with sidecar() as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        held = namespace.acquire(CHAIN)
        assert_right(held, CHAIN, 8)
        assert held.valid() == 8
        server.kill()
        assert namespace.acquire(CHAIN).outcome is Outcome.UNREACHABLE
        server.restart()
        assert server.serving["adopted_blocks"] == 8
        assert held.valid() == (0 if kind.mapped else 8), "streamed payloads are the client's own"
        eventually(lambda: bool(namespace.acquire(CHAIN).blocks))
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 8)
        assert held.outcome is Outcome.LOST
        assert namespace.mapped == kind.mapped
        held.release()
        put(namespace, make_chain(SPEC, "abcdefghij"))
    assert client.failures[Outcome.LOST] == 1
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(": ")[0].split(" ", 3)[-1] for message in messages] == [
        "is unreachable",
        "answers again",
    ]


@by_kind
def test_a_server_that_starts_late_is_found(kind: Kind) -> None:
    with sidecar() as server:
        server.kill()
        with client_of(kind, server.address) as client:
            namespace = client.namespace(SPEC)
            assert put(namespace, CHAIN).outcome is Outcome.UNREACHABLE
            server.restart()
            eventually(lambda: put(namespace, CHAIN).outcome is Outcome.OK)
            with namespace.acquire(CHAIN) as lease:
                assert_right(lease, CHAIN, 8)


@by_kind
def test_a_server_with_an_empty_pool_starts_over(kind: Kind) -> None:
    with sidecar() as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        server.kill()
        Path(server.serving["pool_path"]).unlink()
        server.restart()
        assert resident(namespace, CHAIN) == 0
        with namespace.acquire(CHAIN) as lease:
            assert (lease.outcome, lease.blocks) == (Outcome.OK, 0)
        assert put(namespace, CHAIN).committed_blocks == 8
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 8)


@by_kind
def test_a_silent_server_delays_three_calls_by_their_deadline(kind: Kind) -> None:
    with sidecar() as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        with stopped(server):
            for _ in range(3):
                began = time.monotonic()
                assert namespace.acquire(CHAIN).outcome is Outcome.UNREACHABLE
                assert 1.4 < time.monotonic() - began < 2.0, "the call, and what it would wait for redis"
            began = time.monotonic()
            assert namespace.acquire(CHAIN).outcome is Outcome.UNREACHABLE
            assert time.monotonic() - began < 0.1
        eventually(lambda: namespace.acquire(CHAIN).blocks == 8)


@by_kind
def test_a_write_over_a_restart_is_lost_and_nothing_of_it_is_visible(kind: Kind) -> None:
    with sidecar() as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        with namespace.write(CHAIN) as write:
            for payload in write.payloads:
                payload[:] = 9
            server.restart()
        assert write.outcome is Outcome.LOST
        assert (write.payloads, write.committed_blocks) == ([], 0)
        assert resident(namespace, CHAIN) == 0
        del payload
        eventually(lambda: put(namespace, CHAIN).committed_blocks == 8)
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 8)


def quarantined(server: Sidecar) -> int:
    with Operator(server.address) as operator:
        pools = [tier.pool for tier in operator.status().tiers if tier.pool is not None]
        return sum(pool.quarantined_bytes for pool in pools)


def test_slots_of_a_lost_write_are_free_once_nobody_can_write_to_them() -> None:
    """Their writer still has the old mapping: the server waits until it is gone."""
    with sidecar(write_seconds=0.2) as server, Client(server.address, options=FAST) as client:
        namespace = client.namespace(SPEC)
        write = namespace.write(CHAIN)
        view = write.payloads[0]
        server.restart()
        assert namespace.acquire(CHAIN).outcome is Outcome.OK
        write.abort()
        assert quarantined(server) >= 8 * PAYLOAD_BYTES
        time.sleep(0.5)
        assert quarantined(server) >= 8 * PAYLOAD_BYTES, "a view of the slots was still there"
        del view, write
        eventually(lambda: quarantined(server) == 0)


def test_slots_of_a_lost_write_are_not_kept_by_the_client_that_comes_back() -> None:
    """It comes back under another number: under the old one it would pass for their writer."""
    with sidecar() as server, Client(server.address, options=FAST) as client:
        namespace = client.namespace(SPEC)
        write = namespace.write(CHAIN)
        server.restart()
        write.abort()
        del write
        assert quarantined(server) >= 8 * PAYLOAD_BYTES
        assert put(namespace, make_chain(SPEC, "xy")).committed_blocks == 2
        assert namespace.mapped
        eventually(lambda: quarantined(server) == 0)


def test_a_payload_that_was_damaged_while_no_server_ran_ends_the_run() -> None:
    """The payload checksum is compared on the first read after a restart; one flipped byte is a miss."""
    with sidecar() as server, Client(server.address, options=FAST) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        server.kill()
        wanted = payload_of(CHAIN.rows(WHOLE), 5).tobytes()
        pool = Path(server.serving["pool_path"])
        at = pool.read_bytes().index(wanted)
        with pool.open("r+b") as file:
            file.seek(at + PAYLOAD_BYTES // 2)
            byte = file.read(1)[0]
            file.seek(at + PAYLOAD_BYTES // 2)
            file.write(bytes([byte ^ 1]))
        server.restart()
        namespace.acquire(CHAIN).release()  # which says nothing of payloads, since none was read
        with namespace.acquire(CHAIN) as lease:
            assert lease.copy_out([empty_payload() for _ in range(8)]) == 5
            assert_right(lease, CHAIN, 5)
            assert lease.cause is MissCause.CORRUPT
        assert client.shortened == {MissCause.CORRUPT: 1}
        assert put(namespace, CHAIN).committed_blocks == 1, "the server was told, and let go of the block"
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 8)


def test_a_pool_file_that_cannot_be_mapped_is_streamed(caplog: pytest.LogCaptureFixture) -> None:
    """As for a client in another container, without the server's /dev/shm."""
    with sidecar() as server, Client(server.address, options=FAST) as client:
        pool = Path(server.serving["pool_path"])
        pool.rename(pool.with_name("elsewhere"))
        namespace, other = client.namespace(SPEC), client.namespace(make_spec("other"))
        put(namespace, CHAIN)
        other.register()
        assert (namespace.mapped, other.mapped) == (False, False)
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 8)
    streamed = [record for record in caplog.records if "are streamed" in record.getMessage()]
    assert len(streamed) == 1


def test_a_client_number_that_is_taken_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.chain([6, 6], itertools.count(7))
    monkeypatch.setattr(secrets, "randbelow", lambda below: next(numbers))
    with (
        sidecar() as server,
        Client(server.address, options=FAST) as first,
        Client(server.address, options=FAST) as second,
    ):
        put(first.namespace(SPEC), CHAIN)
        namespace = second.namespace(SPEC)
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 8)
        assert namespace.mapped
        with pytest.raises(Exception, match="client number 7 is in use"):
            PoolView(Path(server.serving["pool_path"]), int(server.serving["epoch"]), 7)


@pytest.mark.parametrize("fault", [Fault.CLOSE, Fault.STALL])
def test_a_stream_that_breaks_hands_out_what_came_whole(fault: Fault) -> None:
    """A failed load reports exactly the blocks that failed (LMCache #3388)."""
    spec = make_spec(payload_bytes=1 << 20)
    chain = make_chain(spec, "abcdef")
    with sidecar(listen="127.0.0.1:0", extent_bytes="4MiB", drain_seconds=0.1) as server:
        port = int(server.address.rpartition(":")[2])
        broken = Behaviour(bytes_before_fault=7 << 19, fault=fault)
        options = ClientOptions(map_pool=False, transfer_seconds=1.0, reconnect_seconds=0.1)
        with Proxy(port, broken) as proxy, Client(f"127.0.0.1:{proxy.port}", options=options) as client:
            namespace = client.namespace(spec)
            assert put(namespace, chain).committed_blocks == 6
            lease = namespace.acquire(chain)
            assert lease.blocks == 6
            assert_right(lease, chain, len(lease.views()))
            assert 1 <= lease.blocks <= 3
            assert lease.cause is MissCause.UNAVAILABLE
            assert client.shortened == {MissCause.UNAVAILABLE: 1}


def test_a_forked_child_is_told_to_make_its_own_client() -> None:
    script = """
import os, sys
from hashing import KVShape, Namespace
from kvstore.service.client import Client
from kvstore.spec import NamespaceSpec
spec = NamespaceSpec(Namespace("model", "0" * 40, "bfloat16", "test", 4, KVShape(2, 2, 2, 8)))
client = Client(sys.argv[1])
namespace = client.namespace(spec)
with namespace.write([1, 2, 3, 4]) as write:
    write.payloads[0][:] = 5
lease = namespace.acquire([1, 2, 3, 4])
views = lease.views()
if os.fork() == 0:
    try:
        namespace.acquire([1, 2, 3, 4])
    except Exception as error:
        print(f"child: {error}", views[0][0], flush=True)
    client.close()
    os._exit(0)
os.wait()
print("parent:", namespace.acquire([1, 2, 3, 4]).blocks, lease.valid(), "torch" in sys.modules)
client.close()
"""
    with sidecar() as server:
        ran = subprocess.run(
            [sys.executable, "-c", script, server.address],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    child, parent = ran.stdout.splitlines()
    assert child.startswith("child: the client of unix:")
    assert child.endswith("make a client after the fork 5")
    assert parent == "parent: 1 1 False", "a client needs no torch"


def test_an_order_to_stop_is_an_outage_like_another() -> None:
    with sidecar(drain_seconds=0.1) as server, client_of(MAPPED, server.address) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        lease = namespace.acquire(CHAIN)
        assert server.stop() == 0
        assert lease.valid() == 8, "the mapping outlives the server"
        assert namespace.acquire(CHAIN).outcome is Outcome.UNREACHABLE
        lease.release()
