"""Loads that fail: exactly what failed is computed again, and nothing wrong is stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sidecars import Sidecar, sidecar
from tests.vllm.engines import BLOCK_SIZE, Engine, engine, transfer_config
from tests.vllm.prompts import DAMAGED, GROWN, WARMUP
from tests.vllm.stored import await_blocks, await_idle, eventually, overwrite, spec_in

Plain = dict[str, list[int]]
STORED = 1 + 4 * len(DAMAGED)


@pytest.fixture(scope="module", params=["asynchronous", "synchronous"])
def damaged(
    request: pytest.FixtureRequest, model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sidecar, Engine]]:
    """A store in which one block of each prompt has other bytes than its checksum says.

    A restart has payloads compared with their checksums when they are next read.
    """
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address, asynchronous_loads=request.param == "asynchronous")
        with engine(model, tmp_path_factory.mktemp("damaged"), kv_transfer_config=config) as running:
            running.one(WARMUP)
            running.generate(*DAMAGED)
            await_blocks(server, STORED)
            spec = spec_in(server)
            for block, prompt in enumerate(DAMAGED):
                overwrite(server, spec, prompt, block, b"damage")
            server.restart()
            while not running.one(WARMUP).cached:
                pass  # until it has noticed the restart
            yield server, running


@pytest.mark.parametrize("block", range(4))
def test_what_failed_is_computed_again(damaged: tuple[Sidecar, Engine], plain: Plain, block: int) -> None:
    """The blocks from the damaged one on, and the tokens are right (LMCache #3388)."""
    _, running = damaged
    failed, loaded = running.counted("failed_load_blocks"), running.counted("loaded_tokens")
    # What is computed behind the failed load is stored afterwards, and must not be wrong.
    first = running.one(GROWN[block])
    assert first.tokens == plain[f"grown{block}"]
    assert running.counted("failed_load_blocks") - failed == 4 - block
    assert running.counted("loaded_tokens") - loaded == block * BLOCK_SIZE


@pytest.mark.parametrize("block", range(4))
def test_nothing_that_was_computed_from_it_is_stored(
    damaged: tuple[Sidecar, Engine], plain: Plain, block: int
) -> None:
    """A synchronous load that fails does not stop its step, whose blocks are then wrong."""
    server, running = damaged
    await_idle(server)
    again = running.one(GROWN[block])
    assert again.tokens == plain[f"grown{block}"]


@pytest.mark.parametrize("block", range(4))
def test_what_was_damaged_is_replaced(damaged: tuple[Sidecar, Engine], plain: Plain, block: int) -> None:
    """The server removes it when it hears of it, which may be after it was asked to store it."""
    _, running = damaged
    eventually(lambda: running.one(GROWN[block]).cached >= 8 * BLOCK_SIZE)
    assert running.one(GROWN[block]).tokens == plain[f"grown{block}"]


def test_saves_of_such_steps_are_dropped(
    damaged: tuple[Sidecar, Engine], request: pytest.FixtureRequest
) -> None:
    _, running = damaged
    synchronous = "synchronous]" in request.node.name and "asynchronous" not in request.node.name
    assert running.counted("dropped_saves") >= (4 if synchronous else 0)
    assert synchronous or running.counted("dropped_saves") == 0
