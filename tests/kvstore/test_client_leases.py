"""Leases that are kept, leases that are lost, and writes that come too late."""

from __future__ import annotations

import gc
import hashlib
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.block import MissCause
from kvstore.errors import ConfigError
from kvstore.service.client import TLS, AsyncClient, Client, ClientNamespace, ClientOptions, Outcome
from kvstore.service.operator import Operator
from tests.support.clients import (
    OPPOSITES,
    STREAMED,
    Kind,
    assert_right,
    client_of,
    eventually,
    fill,
    put,
    resident,
)
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import make_chain, make_spec

SPEC = make_spec()
CHAIN = make_chain(SPEC, "abcd")
LARGE = make_spec("large", payload_bytes=100_000)
LARGE_CHAIN = make_chain(LARGE, "abcd")
SMALL_POOL: dict[str, Any] = {"pool_bytes": "2MiB", "extent_bytes": "1MiB"}
"""Room for 20 large blocks."""

by_kind = pytest.mark.parametrize("kind", OPPOSITES, ids=str)


def leases(server: Sidecar) -> int:
    with Operator(server.address) as operator:
        return operator.status().leases


def press(namespace: ClientNamespace) -> None:
    """Write more other prompts than the small pool has room for."""
    for number in range(8):
        put(namespace, make_chain(LARGE, "".join(chr(0x3000 + 5 * number + block) for block in range(5))))


@by_kind
def test_a_lease_outlives_its_time_while_it_is_held(kind: Kind) -> None:
    """What acquire promised stays readable under any eviction pressure (LMCache #717, vllm #42289)."""
    with sidecar(lease_seconds=0.6, **SMALL_POOL) as server, client_of(kind, server.address) as client:
        namespace = client.namespace(LARGE)
        put(namespace, LARGE_CHAIN)
        with namespace.acquire(LARGE_CHAIN) as lease:
            for _ in range(3):
                time.sleep(0.3)
                press(namespace)
            assert lease.outcome is Outcome.OK
            assert_right(lease, LARGE_CHAIN, 4)
            assert leases(server) == 1
        assert leases(server) == 0
        press(namespace)
        assert resident(namespace, LARGE_CHAIN) == 0


@by_kind
def test_a_lease_that_nobody_could_renew_is_lost_and_tells_the_truth(kind: Kind) -> None:
    """A slot reused after eviction is never read through an old lease (local-inference-lab/vllm #480)."""
    with sidecar(lease_seconds=0.3, **SMALL_POOL) as server, client_of(kind, server.address) as client:
        namespace = client.namespace(LARGE)
        put(namespace, LARGE_CHAIN)
        lease = namespace.acquire(LARGE_CHAIN)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        server.resume()
        eventually(lambda: lease.outcome is Outcome.LOST)
        assert lease.valid() == (4 if kind.mapped else 0), "nothing was evicted yet"
        eventually(lambda: resident(namespace, LARGE_CHAIN) == 4)
        press(namespace)
        assert lease.valid() == 0
        assert lease.views() == []
        lease.release()
        assert client.failures[Outcome.LOST] == 1
        with namespace.acquire(LARGE_CHAIN) as second:
            assert second.blocks == 0


def test_a_streamed_lease_that_is_over_at_the_server_is_lost_on_reading() -> None:
    with sidecar() as server, client_of(STREAMED, server.address) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        lease, same = (namespace.acquire(CHAIN, request_id="one") for _ in range(2))
        assert_right(lease, CHAIN, 4)
        server.restart()
        time.sleep(0.3)  # longer than the channel waits from one attempt to the next
        assert (same.views(), same.outcome, same.cause) == ([], Outcome.LOST, MissCause.STALE)
        assert (lease.outcome, lease.valid()) == (Outcome.LOST, 4)


@by_kind
def test_a_lease_without_a_holder_is_given_back(kind: Kind) -> None:
    """Lease counts go back to zero whatever a caller forgets (LMCache #987 #3381)."""
    with sidecar(lease_seconds=6) as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        namespace.acquire(CHAIN)
        gc.collect()
        eventually(lambda: leases(server) == 0, seconds=4.5)
        held = namespace.acquire(CHAIN)
        namespace.acquire(CHAIN)
        client.close()
        assert leases(server) == 0
        assert held.valid() == 0


def test_what_could_not_be_released_is_released_later() -> None:
    """Also behind leases of a server that is gone, which nobody can release."""
    options = ClientOptions(reconnect_seconds=0.05, map_pool=False)
    with sidecar(lease_seconds=4) as server, Client(server.address, options=options) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        gone = [namespace.acquire(CHAIN) for _ in range(12)]
        server.kill()
        gone.clear()
        server.restart()
        eventually(lambda: namespace.acquire(CHAIN).blocks == len(CHAIN))
        lease = namespace.acquire(CHAIN)
        with client.until(time.monotonic() - 1):
            lease.release()
        assert leases(server) > 0
        eventually(lambda: leases(server) == 0, seconds=3)


@by_kind
def test_limits_are_refusals_and_not_outages(kind: Kind) -> None:
    with (
        sidecar(client_leases=1, client_staged_bytes=4096) as server,
        client_of(kind, server.address) as client,
    ):
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        with namespace.acquire(CHAIN):
            second = namespace.acquire(CHAIN)
            assert (second.outcome, second.blocks) == (Outcome.REFUSED, 0)
        assert namespace.acquire(CHAIN).outcome is Outcome.OK
        with namespace.write(make_chain(SPEC, "efghij")) as write:
            assert write.payloads == []
        assert write.outcome is Outcome.REFUSED
        assert client.failures == {Outcome.REFUSED: 2}


@by_kind
def test_a_writer_that_is_late_is_told_and_leaves_nothing(kind: Kind) -> None:
    """A writer that wakes up late cannot scribble on another's block."""
    with sidecar(write_seconds=0.4) as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        with namespace.write(CHAIN) as write:
            fill(write, CHAIN)
            time.sleep(0.6)
        assert (write.outcome, write.payloads, write.committed_blocks) == (Outcome.LOST, [], 0)
        assert resident(namespace, CHAIN) == 0
        with Operator(server.address) as operator:
            status = operator.status()
            assert status.writes == 0
            eventually(lambda: operator.status().tiers[0].pool.quarantined_bytes == 0)  # type: ignore[union-attr]
        assert put(namespace, CHAIN).committed_blocks == 4


def test_a_commit_that_arrives_too_late_is_lost() -> None:
    """It was sent in time, but the server did not get to it before the write's deadline."""
    options = ClientOptions(rpc_seconds=10)
    with sidecar(write_seconds=0.6) as server, Client(server.address, options=options) as client:
        namespace = client.namespace(SPEC)
        with namespace.write(CHAIN) as write:
            fill(write, CHAIN)
            server.process.send_signal(signal.SIGSTOP)
            threading.Timer(1.0, server.resume).start()
        assert (write.outcome, write.committed_blocks) == (Outcome.LOST, 0)
        assert resident(namespace, CHAIN) == 0
        assert put(namespace, CHAIN).committed_blocks == 4


def test_slots_of_a_commit_that_got_no_answer_are_given_back() -> None:
    """Slots whose writer may yet write stay out of use, so a writer says so as soon as it can."""

    def idle(operator: Operator) -> bool:
        status = operator.status()
        assert status.tiers[0].pool is not None
        return not status.writes and not status.tiers[0].pool.quarantined_bytes

    options = ClientOptions(rpc_seconds=0.3, reconnect_seconds=0.1)
    with sidecar(write_seconds=0.8) as server, Client(server.address, options=options) as client:
        namespace = client.namespace(SPEC)
        with namespace.write(CHAIN) as write:
            fill(write, CHAIN)
            server.process.send_signal(signal.SIGSTOP)
        assert write.outcome is Outcome.UNREACHABLE
        time.sleep(1.0)
        server.resume()
        with Operator(server.address) as operator:
            eventually(lambda: put(namespace, make_chain(SPEC, "xyz")).outcome is Outcome.OK)
            eventually(lambda: idle(operator))
        assert put(namespace, CHAIN).committed_blocks in (0, 4)
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 4)


def _tenants(folder: Path) -> Path:
    path = folder / "tenants.toml"
    tables = [
        f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        f'salt = "{salt * 16}"\nmaps_pool = {maps}\n'
        for name, token, salt, maps in (
            ("own", TOKENS[0], "a1", "true"),
            ("other", TOKENS[1], "b2", "false"),
        )
    ]
    path.write_text("".join(tables), encoding="utf-8")
    path.chmod(0o600)
    return path


TOKENS = ("own-token-0123456789abcdef", "other-token-0123456789abcdef")


@by_kind
def test_only_a_known_token_gets_in_and_only_to_its_own_blocks(kind: Kind, tmp_path: Path) -> None:
    """A tenant reaches only its own namespaces; one that may not map streams (LMCache #4825)."""
    with sidecar(tenants_file=str(_tenants(tmp_path))) as server:
        for token in ("wrong-token-0123456789abcdef", None):
            with client_of(kind, server.address, token=token) as stranger:
                namespace = stranger.namespace(SPEC)
                assert namespace.acquire(CHAIN).outcome is Outcome.REJECTED
                with namespace.write([1] * 8) as write:
                    assert write.payloads == []
                assert stranger.failures == {Outcome.REJECTED: 2}
        with (
            client_of(kind, server.address, token=TOKENS[0]) as own,
            client_of(kind, server.address, token=TOKENS[1]) as other,
        ):
            prompt = list(range(16))
            mine, theirs = own.namespace(SPEC), other.namespace(SPEC)
            with mine.write(prompt) as write:
                for payload in write.payloads:
                    payload[:] = 1
            assert (mine.mapped, theirs.register(), theirs.mapped) == (kind.mapped, Outcome.OK, False)
            assert mine.root != theirs.root != SPEC.root
            assert (mine.acquire(prompt).blocks, theirs.acquire(prompt).blocks) == (4, 0)


@by_kind
def test_tls(kind: Kind, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *request.split(), *names], check=True, capture_output=True)
    key.chmod(0o600)
    with sidecar(listen="127.0.0.1:0", tls_cert=str(certificate), tls_key=str(key)) as server:
        with client_of(kind, server.address, tls=TLS(ca=certificate)) as client:
            namespace = client.namespace(SPEC)
            put(namespace, CHAIN)
            with namespace.acquire(CHAIN) as lease:
                assert_right(lease, CHAIN, 4)
        with client_of(kind, server.address) as plain:
            assert plain.namespace(SPEC).acquire(CHAIN).outcome is Outcome.UNREACHABLE


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_settings_that_cannot_be_are_errors_at_once(kind: type[Client], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give both, or neither"):
        kind("127.0.0.1:1", tls=TLS(key=tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match=r"cannot read the TLS file .*nowhere\.pem"):
        kind("127.0.0.1:1", tls=TLS(ca=tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigError, match="printable ASCII"):
        kind("127.0.0.1:1", token="clé")
    with pytest.raises(ConfigError, match="expected unix:/absolute/path, host:port"):
        kind("localhost")
