"""TLS of workers: between clients and a decode worker, and between that and one that prefills."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from openai import OpenAI
from starlette.applications import Starlette

from kvstore.address import Address, parse_address
from kvstore.errors import ConfigError
from prefill.config import load_serve_config
from prefill.request import Request
from prefill.service.access import read_access
from prefill.service.peers import HandedOver, Peers
from prefill.service.web_server import WebServer, WebTLS
from prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.authority import Authority
from tests.support.prefill_workers import Forks, PrefillWorker, ask_of, tokens_of, unpack, worker
from tests.support.workers import prompt_of

NEW_TOKENS = 4


@dataclass(frozen=True)
class Site:
    """A decode worker and one that prefills for it and knows its clients by their certificates."""

    authority: Authority
    decode: PrefillWorker
    prefill: PrefillWorker


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours", "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs", "theirs")


@pytest.fixture(scope="module")
def site(forks: Forks, authority: Authority) -> Iterator[Site]:
    cert, key = map(str, authority.issue("worker", "IP:127.0.0.1"))
    tls = {"tls_cert": cert, "tls_key": key}
    trusted = str(authority.cert)
    with (
        worker(forks, role="prefill", tls_client_ca=trusted, **tls) as prefill,
        worker(forks, role="decode", prefill_at=prefill.grpc, prefill_tls_ca=trusted, **tls) as decode,
    ):
        yield Site(authority, decode, prefill)


def over_https(authority: Authority, pair: tuple[Path, Path] | None = None) -> httpx2.Client:
    context = ssl.create_default_context(cafile=authority.cert)
    if pair is not None:
        context.load_cert_chain(*pair)
    return httpx2.Client(verify=context, timeout=30)


def generate(address: str, credentials: grpc.ChannelCredentials | None) -> list[int]:
    if credentials is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(address, credentials)
    with channel:
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        request = prefill_pb2.GenerateRequest(ask=ask_of(tokens_of(40), NEW_TOKENS))
        return [
            token for part in stub.Generate(request, timeout=30) for token in unpack(part.progress.token_ids)
        ]


def trusting(authority: Authority) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(authority.cert.read_bytes())


def test_both_apis_speak_it_and_the_prompt_goes_on_over_it(site: Site) -> None:
    assert len(generate(site.decode.grpc, trusting(site.authority))) == NEW_TOKENS
    assert site.decode.http.startswith("https://")
    with over_https(site.authority) as http:
        metrics = http.get(f"{site.decode.http}/metrics").text
        assert 'prefill_front_ttft_seconds_count{prefilled="elsewhere"} 1.0' in metrics
        assert 'prefill_fallbacks_total{cause="no_worker"} 0.0' in metrics
        client = OpenAI(base_url=f"{site.decode.http}/v1", api_key="x", max_retries=0, http_client=http)
        chunks = client.completions.create(model="tiny-chat", prompt="x", max_tokens=NEW_TOKENS, stream=True)
        assert list(chunks)[-1].choices[0].finish_reason is not None


@pytest.mark.parametrize("plain", [True, False], ids=["without TLS", "trusting another authority"])
def test_who_does_not_fit_is_not_served(site: Site, stranger: Authority, *, plain: bool) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(site.decode.grpc, None if plain else trusting(stranger))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    url = site.decode.http.replace("https", "http") if plain else site.decode.http
    with over_https(stranger) as http, pytest.raises(httpx2.TransportError):
        http.get(f"{url}/health")


def test_clients_without_a_certificate_are_turned_away(site: Site) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(site.prefill.grpc, trusting(site.authority))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    with over_https(site.authority) as http, pytest.raises(httpx2.TransportError):
        http.get(f"{site.prefill.http}/health")
    with over_https(site.authority, site.authority.issue("client", "DNS:client")) as http:
        assert http.get(f"{site.prefill.http}/health").json()["role"] == "prefill"


def test_a_prefill_worker_that_nobody_vouches_for_gets_no_prompt(site: Site, stranger: Authority) -> None:
    async def ask(credentials: grpc.ChannelCredentials) -> HandedOver | None:
        addresses = (parse_address(site.decode.grpc),)
        peers = Peers(addresses, "", key=None, seconds=30.0, clock=time.monotonic, credentials=credentials)
        try:
            return await peers.prefill(Request("r", prompt_of(34), NEW_TOKENS, 0.0))
        finally:
            await peers.close()

    assert asyncio.run(ask(trusting(stranger))) is None


def test_files_that_are_not_what_they_should_be(authority: Authority, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    foreign = tmp_path / "key"
    foreign.write_text("Schlüssel\n", encoding="utf-8")
    cert, key = map(str, authority.issue("other", "IP:127.0.0.1"))
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", key, "-passout", "pass:secret", "-out", locked], check=True
    )
    peers = {"role": "decode", "prefill_at": ":1"}
    for flags, says in (
        (
            {"tls_cert": cert, "tls_key": str(broken)},
            f"tls_cert {cert} and tls_key {broken} are no certificate",
        ),
        ({"tls_cert": cert, "tls_key": str(locked)}, "in PEM, without a password"),
        (
            {"tls_cert": cert, "tls_key": key, "tls_client_ca": str(broken)},
            f"tls_client_ca {broken} holds no",
        ),
        ({"prefill_tls_ca": str(broken), **peers}, f"prefill_tls_ca {broken} holds no certificate in PEM"),
        ({"prefill_tls_ca": "/nowhere", **peers}, "cannot read the TLS file /nowhere"),
        ({"api_key_file": str(foreign)}, f"api_key_file {foreign} holds more than printable ASCII"),
    ):
        with pytest.raises(ConfigError) as raised:
            read_access(load_serve_config(flags, {}))
        assert says in str(raised.value)


def test_a_server_that_does_not_start_says_so(authority: Authority, tmp_path: Path) -> None:
    """Such as when a file has gone since it was looked at."""
    cert, key = authority.issue("gone", "IP:127.0.0.1")
    address = Address(host="127.0.0.1", port=0)
    tls = WebTLS(cert, key, tmp_path / "gone.pem")
    with closing(WebServer(address, 30.0, tls)) as server, pytest.raises(FileNotFoundError):
        asyncio.run(server.start(Starlette()))


def test_what_others_can_read_on_the_way_is_warned_of(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    cert, key = map(str, authority.issue("public", "DNS:worker"))
    there = {
        "role": "decode",
        "prefill_at": "10.0.0.7:9480",
        "http": "0.0.0.0:8000",
        "api_key_file": str(file),
    }
    read_access(load_serve_config(there, {}))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "other machines can reach 127.0.0.1:9480, 0.0.0.0:8000" in caplog.text
    assert "the prompts go to 10.0.0.7:9480 in the clear" in caplog.text
    assert "secret" not in caplog.text
    caplog.clear()
    tls = {"tls_cert": cert, "tls_key": key, "prefill_tls_ca": str(authority.cert)}
    assert read_access(load_serve_config(there | tls, {})).key == "secret"
    assert not caplog.records
