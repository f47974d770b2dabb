"""Whom a client trusts with its token, its prompts and its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.service.client import TLS, AsyncClient, Client, Outcome
from kvstore.service.operator import Operator
from kvstore.tiers import pool_view
from tests.support.clients import FAST, OPPOSITES, Kind, assert_right, client_of, eventually, put
from tests.support.sidecars import sidecar
from tests.support.stores import make_chain, make_spec

SPEC = make_spec()
CHAIN = make_chain(SPEC, "abcd")
STRANGER = 1234
TOKEN = "some-token-0123456789abcdef"

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
every_client = pytest.mark.parametrize("kind", [Client, AsyncClient, Operator])


@every_client
@pytest.mark.parametrize("address", ["gpu7:9471", "10.0.0.7:9471", "[2001:db8::7]:9471"])
def test_a_token_is_not_sent_in_the_clear_to_another_machine(
    kind: type[Client], address: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="it would be sent in the clear; give TLS") as raised:
        kind(address, token=TOKEN)
    assert TOKEN not in str(raised.value)
    authorities = tmp_path / "ca.pem"
    authorities.write_text("")
    kind(address, token=TOKEN, tls=TLS(ca=authorities))
    kind(address)


@every_client
@pytest.mark.parametrize("address", ["unix:/run/nobody.sock", "127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_a_token_may_stay_on_this_machine(kind: type[Client], address: str) -> None:
    kind(address, token=TOKEN)


@only_root
@every_client
def test_a_socket_of_another_user_is_refused(kind: type[Client]) -> None:
    """/dev/shm is everybody's: whoever comes first has the name."""
    with sidecar() as server:
        path = server.address.removeprefix("unix:")
        os.chown(path, STRANGER, -1)
        with pytest.raises(
            ConfigError, match=f"belongs to user {STRANGER}, expected 0, .* run the server as"
        ):
            kind(server.address)
        os.chown(path, 0, -1)
        kind(server.address)


@only_root
@pytest.mark.parametrize("kind", OPPOSITES, ids=str)
def test_a_socket_that_becomes_another_users_is_not_talked_to(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a miss then, since the engine is running."""
    with sidecar() as server, client_of(kind, server.address) as client:
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        path = server.address.removeprefix("unix:")
        os.chown(path, STRANGER, -1)
        for _ in range(3):
            assert namespace.acquire(CHAIN).outcome is Outcome.REJECTED
        assert client.failures == {Outcome.REJECTED: 3}
        os.chown(path, 0, -1)
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 4)
    messages = [record.getMessage() for record in caplog.records]
    assert [f"belongs to user {STRANGER}" in message for message in messages] == [True, False]


@only_root
def test_a_pool_file_of_another_user_is_not_mapped(caplog: pytest.LogCaptureFixture) -> None:
    with sidecar() as server, Client(server.address, options=FAST) as client:
        os.chown(server.pool_path, STRANGER, -1)
        namespace = client.namespace(SPEC)
        put(namespace, CHAIN)
        assert not namespace.mapped
        with namespace.acquire(CHAIN) as lease:
            assert_right(lease, CHAIN, 4)
    assert f"belongs to user {STRANGER}, expected 0" in caplog.text


def test_a_machine_whose_stores_may_change_places_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sidecar() as server:
        monkeypatch.setattr(pool_view, "_MACHINE", "aarch64")
        with Client(server.address, options=FAST) as client:
            namespace = client.namespace(SPEC)
            put(namespace, CHAIN)
            assert not namespace.mapped
            eventually(lambda: namespace.acquire(CHAIN).blocks == 4)
            with namespace.acquire(CHAIN) as lease:
                assert_right(lease, CHAIN, 4)
    assert "this machine is aarch64, expected x86_64 or AMD64" in caplog.text
