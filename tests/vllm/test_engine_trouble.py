"""Bad input: one clear line each, and the engine serves on. And ranks that share a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.engine import require_supported_version
from kvstore.connectors.vllm.errors import UnsupportedError
from tests.support.sidecars import sidecar
from tests.vllm.engines import BLOCK_SIZE, engine, transfer_config
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


def test_all_that_vllm_asks_of_a_connector() -> None:
    """Hooks have vLLM's own names: one that it renames would silently never be called."""
    assert supports_hma(KVStoreConnector)
    hooks = {name for name in vars(KVStoreConnector) if not name.startswith("_")}
    theirs = set(dir(KVConnectorBase_V1)) | {"request_finished_all_groups"}
    assert hooks <= theirs


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0"])
def test_another_vllm(version: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"this is vLLM {version}, and the connector knows 0\.32\.x"):
        require_supported_version(version)


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
