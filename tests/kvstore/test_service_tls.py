"""TLS of a sidecar: who is let in by certificate, and who is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.v1 import lookup_pb2, types_pb2
from tests.support.authority import Authority
from tests.support.serve_command import fails_to_serve
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import YOURS, Credentials, Raw, dialled, refused, spec, tokens_of
from tests.support.tenants import Entry, write_tenants

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
PROMPT = tokens_of(4)
SEARCH = Entry("search")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours", "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs", "theirs")


@pytest.fixture(scope="module")
def server(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """On a port with TLS and, beside it, on a unix socket, which has none."""
    cert, key = ours.issue("server", "IP:127.0.0.1")
    folder = tmp_path_factory.mktemp("server")
    tenants = write_tenants(folder / "tenants.toml", SEARCH)
    settings = {"tls_cert": str(cert), "tls_key": str(key), "tenants_file": str(tenants)}
    with sidecar(listen=f"127.0.0.1:0,unix:{folder}/socket", **settings) as server:
        yield server


@pytest.fixture(scope="module")
def mutual(ours: Authority) -> Iterator[Sidecar]:
    """One that asks its clients for a certificate of the same authority."""
    cert, key = ours.issue("mutual", "IP:127.0.0.1")
    settings = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(ours.cert)}
    with sidecar(listen="127.0.0.1:0", **settings) as server:
        yield server


def look_up(raw: Raw) -> int:
    peer = raw.register(spec("tls"))
    peer.write(PROMPT)
    return peer.matched(PROMPT)


def assert_no_way_in(server: Sidecar, credentials: Credentials, *words: str) -> None:
    with dialled(server.address, credentials) as raw, refused(UNAVAILABLE, *words):
        raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=types_pb2.Prompt(model="tls")))


class TestServer:
    def test_whoever_trusts_its_authority_is_served(self, server: Sidecar, ours: Authority) -> None:
        with dialled(server.address, Credentials(SEARCH.token, ca=ours.cert)) as raw:
            assert look_up(raw) == 64

    def test_the_token_is_asked_for_all_the_same(self, server: Sidecar, ours: Authority) -> None:
        with (
            dialled(server.address, Credentials(ca=ours.cert)) as raw,
            refused(grpc.StatusCode.UNAUTHENTICATED, "no token"),
        ):
            raw.register(spec("tls"))

    def test_whoever_trusts_another_authority_is_not(self, server: Sidecar, theirs: Authority) -> None:
        assert_no_way_in(server, Credentials(SEARCH.token, ca=theirs.cert), "CERTIFICATE_VERIFY_FAILED")

    def test_nor_who_speaks_no_tls(self, server: Sidecar) -> None:
        assert_no_way_in(server, Credentials(SEARCH.token))

    def test_the_unix_socket_needs_none(self, server: Sidecar) -> None:
        with dialled(server.serving["addresses"][1], Credentials(SEARCH.token)) as raw:
            assert raw.register(spec("tls")).write(tokens_of(2, seed=5)) == [YOURS] * 2


class TestClients:
    def test_one_with_the_right_certificate(self, mutual: Sidecar, ours: Authority) -> None:
        cert, key = ours.issue("client", "DNS:client")
        with dialled(mutual.address, Credentials(ca=ours.cert, cert=cert, key=key)) as raw:
            assert look_up(raw) == 64

    def test_one_without(self, mutual: Sidecar, ours: Authority) -> None:
        assert_no_way_in(mutual, Credentials(ca=ours.cert))

    def test_one_with_somebody_elses(self, mutual: Sidecar, ours: Authority, theirs: Authority) -> None:
        cert, key = theirs.issue("client", "DNS:client")
        assert_no_way_in(mutual, Credentials(ca=ours.cert, cert=cert, key=key))


class TestFiles:
    def start(self, cert: Path, key: Path) -> str:
        """What a server that cannot start says."""
        return fails_to_serve(tls_cert=cert, tls_key=key, listen="127.0.0.1:0")

    def test_a_file_that_is_missing(self, ours: Authority, tmp_path: Path) -> None:
        _, key = ours.issue("one", "IP:127.0.0.1")
        said = self.start(tmp_path / "missing.pem", key)
        assert f"tls_cert {tmp_path}/missing.pem cannot be read" in said

    def test_a_file_that_is_no_certificate(self, ours: Authority, tmp_path: Path) -> None:
        _, key = ours.issue("two", "IP:127.0.0.1")
        wrong = tmp_path / "wrong.pem"
        wrong.write_text("no certificate", encoding="utf-8")
        said = self.start(wrong, key)
        assert "tls_cert" in said
        assert "in use" not in said, "that is not what is wrong"

    def test_a_key_of_another_certificate(self, ours: Authority) -> None:
        (cert, _), (_, key) = ours.issue("three", "IP:127.0.0.1"), ours.issue("four", "IP:127.0.0.1")
        said = self.start(cert, key)
        assert "tls_key" in said
        assert "in use" not in said
