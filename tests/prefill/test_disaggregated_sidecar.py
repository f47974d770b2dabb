"""Prefill in one process, decode in another, and the blocks through a sidecar's memory: no Redis anywhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.service.operator import Operator
from kvstore.settings import load_config
from prefill.config import ServeConfig, load_serve_config
from prefill.sidecar import open_sidecar, sidecar_of, what_is_not_shared
from prefill.v1 import prefill_pb2
from tests.support.prefill_workers import Forks, PrefillWorker, Rpc, soon, tokens_of, worker
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import make_spec

NEW_TOKENS = 16
PROMPT_TOKENS = 97
BLOCK_TOKENS = 96
LANDING_SECONDS = 1
SEEDS = count(1000)


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with sidecar(log_level="error") as running:
        yield running


@pytest.fixture(scope="module")
def alone(forks: Forks) -> Iterator[PrefillWorker]:
    """What the others answer is compared with it."""
    with worker(forks, role="both") as made:
        yield made


@pytest.fixture(scope="module")
def shared(server: Sidecar, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of workers over the sidecar, which is not given up because the machine is busy."""
    file = tmp_path_factory.mktemp("settings") / "store.toml"
    file.write_text("redis_probe_seconds = 0.4\n")
    return {"sidecar": server.address, "config": str(file)}


@pytest.fixture(scope="module")
def prefill_side(forks: Forks, shared: dict[str, str]) -> Iterator[PrefillWorker]:
    with worker(forks, role="prefill", landing_seconds=str(LANDING_SECONDS), **shared) as made:
        yield made


@pytest.fixture(scope="module")
def decode_side(forks: Forks, shared: dict[str, str], prefill_side: PrefillWorker) -> Iterator[PrefillWorker]:
    with worker(forks, role="decode", prefill_at=prefill_side.grpc, **shared) as made:
        yield made


def answer(side: PrefillWorker, prompt: list[int]) -> list[int]:
    with Rpc(side.grpc) as rpc:
        return rpc.generate(prompt, NEW_TOKENS)


def computed(side: PrefillWorker) -> float:
    return side.total("prefill_tokens_total", source="computed")


def outages(side: PrefillWorker) -> tuple[int, int]:
    """How often the log says that the sidecar went, and that it came back."""
    return side.log.count("is unreachable"), side.log.count("answers again")


def await_recovery(prefill_side: PrefillWorker, decode_side: PrefillWorker) -> None:
    """Ask until both find the sidecar again: it is tried with the next request, and then now and then."""

    def is_healthy() -> bool:
        answer(decode_side, tokens_of(20, seed=next(SEEDS)))
        sides = prefill_side, decode_side
        return all(side.total("kvstore_tier_healthy", tier="sidecar") == 1 for side in sides)

    assert soon(is_healthy)


def assert_nothing_left(server: Sidecar, *sides: PrefillWorker) -> None:
    for side in sides:
        side.assert_quiet()
    with Operator(server.address) as operator:
        assert soon(lambda: operator.status().leases == 0)


def test_the_same_tokens_as_in_one_process(
    server: Sidecar, alone: PrefillWorker, prefill_side: PrefillWorker, decode_side: PrefillWorker
) -> None:
    """The decode side computes nothing of a prompt; of one that goes on, neither side does what was there."""
    prompt = tokens_of(PROMPT_TOKENS)
    assert answer(decode_side, prompt) == answer(alone, prompt)
    assert computed(decode_side) == 0
    assert decode_side.total("prefill_tokens_total", source="sidecar") == BLOCK_TOKENS
    assert computed(prefill_side) == PROMPT_TOKENS
    longer = [*prompt, *tokens_of(40, seed=1)]
    assert answer(decode_side, longer) == answer(alone, longer)
    assert computed(decode_side) == 0
    assert computed(prefill_side) == PROMPT_TOKENS + len(longer) - BLOCK_TOKENS
    for side in (prefill_side, decode_side):
        assert side.total("kvstore_tier_healthy", tier="sidecar") == 1
    assert prefill_side.total("kvstore_stored_blocks_total", tier="sidecar") == len(longer) // 16
    assert_nothing_left(server, prefill_side, decode_side)


def test_another_worker_finds_what_these_computed(
    forks: Forks, shared: dict[str, str], alone: PrefillWorker, decode_side: PrefillWorker
) -> None:
    prompt = tokens_of(PROMPT_TOKENS, seed=2)
    expected = answer(decode_side, prompt)
    with worker(forks, role="both", **shared) as late:
        assert answer(late, prompt) == expected == answer(alone, prompt)
        assert computed(late) == PROMPT_TOKENS - BLOCK_TOKENS


def test_the_sidecar_is_killed_and_started_again(
    server: Sidecar, alone: PrefillWorker, prefill_side: PrefillWorker, decode_side: PrefillWorker
) -> None:
    """Without it the decode side computes for itself; then it is used again, also for what it missed."""
    before, without, missed, after = (tokens_of(PROMPT_TOKENS, seed=seed) for seed in (3, 4, 5, 6))
    assert answer(decode_side, before) == answer(alone, before)
    told = [outages(side) for side in (prefill_side, decode_side)]
    server.kill()
    spared = computed(decode_side)
    assert answer(decode_side, without) == answer(alone, without)
    assert computed(decode_side) == spared + PROMPT_TOKENS
    with Rpc(prefill_side.grpc) as rpc:
        rpc.prefill(missed, 1, request_id="missed")
        rpc.stub.Acknowledge(prefill_pb2.AcknowledgeRequest(request_id="missed"), timeout=30)
    assert decode_side.total("kvstore_tier_healthy", tier="sidecar") == 0
    server.restart()
    await_recovery(prefill_side, decode_side)
    spared = computed(decode_side)
    for prompt in (missed, after):
        assert answer(decode_side, prompt) == answer(alone, prompt)
    assert computed(decode_side) == spared
    assert_nothing_left(server, prefill_side, decode_side)
    assert [outages(side) for side in (prefill_side, decode_side)] == [(n + 1, m + 1) for n, m in told]


def test_the_sidecar_does_not_answer(
    server: Sidecar, alone: PrefillWorker, prefill_side: PrefillWorker, decode_side: PrefillWorker
) -> None:
    """A handoff waits for its blocks no longer than it may, and the answer comes all the same."""
    prompt = tokens_of(PROMPT_TOKENS, seed=7)
    expected = answer(alone, prompt)
    server.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert answer(decode_side, prompt) == expected
        assert time.monotonic() - began < LANDING_SECONDS + 3
    finally:
        server.resume()
    await_recovery(prefill_side, decode_side)
    assert_nothing_left(server, prefill_side, decode_side)


def test_a_worker_that_shares_nothing_says_so_before_it_loads_a_model(forks: Forks) -> None:
    ended = PrefillWorker(forks, {})
    arguments = ["serve", "--model", "/nowhere", "--listen", "127.0.0.1:0", "--role", "prefill"]
    ended.pid, _, stderr = forks.fork(arguments)
    assert soon(lambda: not ended.is_running, 30)
    said = " ".join(stderr.read_text().split())
    assert said.count("neither sidecar nor redis_url is set") == 1, said
    assert "/nowhere" in said


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_workers_of_a_group_do_not_share(role: str) -> None:
    serve = serve_config(role=role, prefill_at="127.0.0.1:1" if role == "decode" else None)
    shared = serve_config(role=role, prefill_at=serve.prefill_at or None, sidecar="unix:/run/kvstore.sock")
    embedded = config(redis_url="embedded")
    assert what_is_not_shared(shared, config()) is None
    assert what_is_not_shared(serve, config(redis_url="redis://127.0.0.1:6379")) is None
    for complaint in (what_is_not_shared(serve, config()), what_is_not_shared(serve, embedded)):
        assert complaint is not None
        assert "set sidecar or redis_url" in complaint
    assert what_is_not_shared(serve_config(), embedded) is None, "there is nobody to share with"


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    serve = serve_config(sidecar="unix:/run/kvstore.sock")
    with pytest.raises(ConfigError, match="give redis_url to `kvstore serve`"):
        sidecar_of(serve, config(redis_url="redis://:secret@127.0.0.1"))
    with pytest.raises(ConfigError, match="redis_demotion = on_evict does not go with sidecar"):
        sidecar_of(serve, config(redis_demotion="on_evict"))
    for name in ("sidecar_token_file", "sidecar_tls_ca"):
        with pytest.raises(ConfigError, match=f"{name} is set without sidecar"):
            serve_config(**{name: str(tmp_path)})
    with pytest.raises(ConfigError, match="a unix socket, which has no TLS"):
        serve_config(sidecar="unix:/run/kvstore.sock", sidecar_tls_ca=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="expected unix:/absolute/path"):
        serve_config(sidecar="/run/kvstore.sock")
    tenant = serve_config(sidecar="cache.example:9471", sidecar_token_file=str(tmp_path / "token"))
    found = sidecar_of(tenant, config())
    assert found is not None
    with pytest.raises(ConfigError, match=r"sidecar_token_file .* cannot be read"):
        open_sidecar(found, make_spec(), time.monotonic)
    assert sidecar_of(serve_config(sidecar="none"), config()) is None


def serve_config(**flags: object) -> ServeConfig:
    return load_serve_config(flags, {})


def config(**overrides: str) -> Config:
    return load_config(environ={}, overrides=overrides).config
