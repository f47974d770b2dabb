"""Bad input: one clear line each, and the engine serves on. And ranks that share a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sidecars import sidecar
from tests.vllm.engines import BLOCK_SIZE, REPOSITORY, engine, environment, transfer_config
from tests.vllm.prompts import EXACT, LONG
from tests.vllm.stored import await_blocks, await_idle

Plain = dict[str, list[int]]


def test_nobody_at_the_address(model: Path, plain: Plain, tmp_path: Path) -> None:
    config = transfer_config(f"unix:{tmp_path}/nobody")
    with engine(model, tmp_path, kv_transfer_config=config) as running:
        for _ in range(2):
            output = running.one(LONG)
            assert (output.tokens, output.cached) == (plain["long"], 0)
        lines = [line for line in running.log.splitlines() if "is unreachable" in line]
        assert 1 <= len(lines) <= 2, "one from the scheduler, one from the worker"
        assert f"{tmp_path}/nobody" in lines[0]
        assert running.counted("server_failures") > 0


def test_policies_and_layers_that_cannot_be(tmp_path: Path, model: Path, plain: Plain) -> None:
    """A policy that would fail requests is overruled; roles are honoured."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address) | {
            "kv_load_failure_policy": "fail",
            "kv_role": "kv_producer",
        }
        with engine(model, tmp_path, kv_transfer_config=config) as running:
            assert running.one(EXACT).tokens == plain["exact"]
            await_blocks(server, len(EXACT) // BLOCK_SIZE)
            assert running.one(EXACT).cached == 0, "a producer does not load"
            [line] = [each for each in running.log.splitlines() if "kv_load_failure_policy" in each]
            assert "set to 'recompute'" in line


@pytest.fixture(scope="module")
def interface() -> dict[str, Any]:
    """What ``interface_main`` says."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interface_main.py"))],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_vllm_asks_of_a_connector(interface: dict[str, Any]) -> None:
    """Hooks have vLLM's own names: one that it renames would silently never be called."""
    found = interface
    assert found["null"] == [0, 0]
    assert set(found["ours"]) <= {*found["theirs"], "request_finished_all_groups"}
    assert (found["abstract"], found["hma"]) == ([], True)
    for version, refusal in found["refusals"].items():
        supported = version.startswith("0.32.")
        assert refusal == ("" if supported else refusal)
        assert supported or f"this is vLLM {version}, and the connector knows 0.32.x" in refusal


def test_which_models_are_served(interface: dict[str, Any]) -> None:
    """All groups of layers, or none: vLLM counts a token as computed for all of them."""
    groups = interface["groups"]
    served = {name: found for name, found in groups.items() if isinstance(found, list)}
    assert served == {
        "plain": [1, None],
        "latent": [1, None],
        "of several sizes": [1, None],
        "windows": [3, 70],
        "windows alone": [1, 100],
    }
    assert "the model keeps FullAttentionSpec and MambaSpec, expected full attention and" in groups["states"]
    assert "with --disable-hybrid-kv-cache-manager" in groups["chunks"]
    assert "have block_size 32 and 64, expected one for all" in groups["other blocks"]
    assert "have page_size_bytes 16384 and 32768, expected one for all" in groups["other heads"]
    assert "keeps no KV cache" in groups["nothing"]


@pytest.fixture
def swept() -> Iterator[None]:
    """vLLM's ranks leave what they share in memory behind when they end."""
    memory = Path("/dev/shm")
    before = set(memory.glob("vllm_dist_*"))
    yield
    for left in set(memory.glob("vllm_dist_*")) - before:
        left.unlink(missing_ok=True)


@pytest.mark.usefixtures("swept")
def test_two_ranks(model: Path, plain: Plain, tmp_path: Path) -> None:
    """Each rank has its shard of a block, and a hit needs all of them (LMCache #1467 #1379)."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address)
        for cached in (0, len(EXACT)):
            with engine(model, tmp_path, kv_transfer_config=config, tensor_parallel_size=2) as running:
                output = running.one(EXACT)
                assert (output.cached, output.tokens) == (cached, plain["exact"])
                running.one(LONG[:100])
                await_blocks(server, 2 * (len(EXACT) // BLOCK_SIZE + 3))
                await_idle(server)
