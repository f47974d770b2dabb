"""``prefill serve`` from its flags to its end, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from kvstore.address import Address
from kvstore.errors import ConfigError
from kvstore.settings import load_config
from prefill.config import Role, ServeConfig, config_for_role, describe_default, load_serve_config
from prefill.service.rpc_server import RpcServer
from prefill.v1 import prefill_pb2
from tests.support.chat_model import save_chat_model
from tests.support.prefill_workers import REPOSITORY, Rpc, ask_of, tokens_of
from tests.support.stores import pool_folder

START_SECONDS = 90


def command(*arguments: str) -> subprocess.Popen[str]:
    ours = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "KVSTORE_LOG_FORMAT": "json"}
    environment = {**os.environ, **ours}
    return subprocess.Popen(
        [sys.executable, "-m", "prefill", "serve", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A worker on a unix socket and any port, and what it says of itself."""
    with pool_folder() as folder:
        flags = {
            "model": save_chat_model(tmp_path),
            "dtype": "bfloat16",
            "listen": f"unix:{folder}/socket",
            "http": "127.0.0.1:0",
            "pool-path": folder / "pool",
            "pool-bytes": "16MiB",
            "extent-bytes": "2MiB",
            "device-bytes": "4MiB",
            "drain-seconds": "20",
        }
        started = command(
            "--json", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))
        )
        assert started.stdout is not None
        try:
            yield started, json.loads(started.stdout.readline() or "null")
        finally:
            started.kill()
            started.communicate()


def test_sigterm_lets_running_answers_end(process: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    """New ones are turned away meanwhile, in each API's own way; then the worker ends with status 0."""
    started, said = process
    assert (said["role"], said["model"], said["context_tokens"]) == ("both", "tiny-chat", 1024)
    assert said["dtype"] == "bfloat16"
    body = {"model": "tiny-chat", "prompt": "x"}
    request = prefill_pb2.GenerateRequest(ask=ask_of(tokens_of(20), 900))
    with Rpc(said["grpc"][0]) as rpc:
        answer = rpc.stub.Generate(request, timeout=60)
        next(answer)
        started.send_signal(signal.SIGTERM)
        health = f"{said['http']}/health"
        while (state := httpx2.get(health, timeout=10)).status_code == 200:
            continue
        assert state.json()["status"] == "draining"
        refused = httpx2.post(f"{said['http']}/v1/completions", json=body, timeout=10)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        with pytest.raises(grpc.RpcError) as raised:
            next(rpc.stub.Generate(request, timeout=10))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert sum(len(part.progress.token_ids) for part in answer) == 899 * 4
    output, errors = started.communicate(timeout=30)
    assert (started.returncode, output) == (0, "")
    assert "Traceback" not in errors
    logged = [json.loads(line)["message"] for line in errors.splitlines() if line.startswith("{")]
    assert "log_format = json (environment)" in logged
    places = f"{said['grpc'][0]}, {said['http']}"
    assert f"serving tiny-chat, role both, at {places}" in logged
    assert logged[-1] == "ended"


def test_a_flag_that_does_not_fit_is_one_message() -> None:
    started = command("--role", "decode", "--http", "nowhere")
    output, errors = started.communicate(timeout=START_SECONDS)
    assert (started.returncode, output) == (2, "")
    assert "error: flag --http = 'nowhere': expected" in errors.replace("\n", " ")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"role": "boss"}, "flag --role = 'boss': expected 'both', 'prefill' or 'decode'"),
        ({"role": "decode"}, "role = decode has no prefill_at"),
        ({"prefill_at": ":9480"}, "role = both prefills by itself, and prefill_at = 127.0.0.1:9480"),
        ({"role": "prefill", "listen": "none"}, "listen = none leaves a worker of role prefill"),
        ({"http": "0.0.0.0:8000"}, "0.0.0.0:8000 may be reached from other machines"),
        ({"waiting_max": "0"}, "flag --waiting-max = '0': expected greater than or equal to 1"),
        ({"tls_key": "key.pem"}, "tls_key is set without tls_cert"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca is set without tls_cert and tls_key"),
        ({"prefill_tls_ca": "ca.pem"}, "prefill_tls_ca is set without prefill_at"),
        ({"policy": "lifo"}, "flag --policy = 'lifo': expected 'prefill_first'"),
        ({"chunked": "maybe"}, "flag --chunked = 'maybe'"),
        ({"dtype": "float8"}, "flag --dtype = 'float8': expected 'float32' or 'bfloat16'"),
    ],
)
def test_settings_that_contradict(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_serve_config(flags, {})
    assert says in str(raised.value)


def test_what_suits_a_role_where_nothing_was_chosen() -> None:
    chosen = load_config(environ={}, overrides={"redis_acquire_seconds": "1s", "redis_queue_bytes": "1MiB"})
    assert config_for_role(chosen, Role.DECODE).redis_acquire_seconds == 1
    short = load_config(environ={}, overrides={"redis_acquire_seconds": "0.2s"})
    for role in (Role.PREFILL, Role.DECODE):
        assert config_for_role(short, role).redis_probe_seconds == 0.2
    assert config_for_role(chosen, Role.PREFILL).redis_queue_bytes == 2**20
    default = load_config(environ={}, overrides={})
    configs = {role: config_for_role(default, role) for role in Role}
    assert len({config.pool_path for config in configs.values()}) == len(Role)
    assert configs[Role.DECODE].redis_acquire_seconds > configs[Role.BOTH].redis_acquire_seconds
    for role in (Role.PREFILL, Role.DECODE):
        assert configs[role].redis_probe_seconds > configs[Role.BOTH].redis_probe_seconds
    assert configs[Role.PREFILL].redis_queue_bytes > configs[Role.BOTH].redis_queue_bytes


def test_every_setting_is_documented() -> None:
    page = (REPOSITORY / "docs" / "prefill.md").read_text(encoding="utf-8")
    for name, info in ServeConfig.model_fields.items():
        assert f"| `{name}` | `{describe_default(name)}` | {info.description} |" in page


def test_a_port_that_is_taken_is_one_clear_line(capfd: pytest.CaptureFixture[str]) -> None:
    """gRPC's own lines, which say less, would come first."""

    async def bind(address: Address) -> None:
        RpcServer().bind([address])

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address already in use; stop"):
            asyncio.run(bind(address))
    assert capfd.readouterr().err == ""


def test_where_settings_come_from() -> None:
    environ = {"PREFILL_ROLE": "prefill", "PREFILL_STEP_TOKENS": "64", "KVSTORE_POOL_BYTES": "1GiB"}
    config = load_serve_config({"step_tokens": "32", "policy": None}, environ)
    assert (config.role, config.step_tokens, config.policy) == (Role.PREFILL, 32, ServeConfig().policy)
    with pytest.raises(ConfigError, match="PREFILL_ROL does not exist; did you mean PREFILL_ROLE"):
        load_serve_config({}, {"PREFILL_ROL": "both"})
