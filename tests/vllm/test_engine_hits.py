"""One engine computes, another process finds: with loads beside the steps and with loads before them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sidecars import Sidecar, sidecar
from tests.vllm.engines import BLOCK_SIZE, Engine, engine, transfer_config
from tests.vllm.prompts import BRANCH, EXACT, LONG, SHORT, UNSEEN, WARMUP
from tests.vllm.stored import await_blocks, await_idle, overwrite, spec_in

Plain = dict[str, list[int]]
STORED = 1 + len(LONG) // BLOCK_SIZE + len(EXACT) // BLOCK_SIZE


@pytest.fixture(scope="module", params=["asynchronous", "synchronous"])
def mode(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def store(
    mode: str, model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    """What an engine that has ended by now left behind."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address, asynchronous_loads=mode == "asynchronous")
        with engine(model, tmp_path_factory.mktemp("first"), kv_transfer_config=config) as first:
            first.one(WARMUP)
            for name, prompt in (("long", LONG), ("exact", EXACT), ("short", SHORT)):
                output = first.one(prompt)
                assert (output.tokens, output.cached) == (plain[name], 0)
            await_blocks(server, STORED)
        yield server


@pytest.fixture(scope="module")
def second(
    mode: str, store: Sidecar, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    config = transfer_config(store.address, asynchronous_loads=mode == "asynchronous")
    with engine(model, tmp_path_factory.mktemp("second"), kv_transfer_config=config) as running:
        yield running


def whole_blocks(count: int) -> int:
    return count // BLOCK_SIZE * BLOCK_SIZE


def test_a_prompt_that_another_engine_computed_is_not_computed_again(second: Engine, plain: Plain) -> None:
    output = second.one(LONG)
    assert (output.cached, output.tokens) == (whole_blocks(len(LONG)), plain["long"])


def test_all_at_once(second: Engine, plain: Plain) -> None:
    outputs = second.generate(LONG, EXACT, BRANCH, UNSEEN)
    assert [output.tokens for output in outputs] == [
        plain[name] for name in ("long", "exact", "branch", "unseen")
    ]


def test_the_last_token_of_a_prompt_of_whole_blocks_is_computed(
    second: Engine, mode: str, plain: Plain
) -> None:
    """A prompt that is cached completely still computes its last token (case 13).

    After an asynchronous load vLLM computes that token alone, and counts it as cached all the same.
    """
    output = second.one(EXACT)
    cached = len(EXACT) if mode == "asynchronous" else len(EXACT) - BLOCK_SIZE
    assert (output.cached, output.tokens) == (cached, plain["exact"])


def test_a_shared_beginning_is_used_as_far_as_whole_blocks_go(
    store: Sidecar, model: Path, second: Engine, plain: Plain
) -> None:
    output = second.one(BRANCH)
    assert output.tokens == plain["branch"]
    assert output.cached in (15 * BLOCK_SIZE, whole_blocks(len(BRANCH)))


def test_nothing_is_found_of_what_nobody_computed(second: Engine, plain: Plain) -> None:
    output = second.one([token ^ 1 for token in LONG])
    assert output.cached == 0


def test_a_prompt_without_a_whole_block_asks_nobody(second: Engine, plain: Plain) -> None:
    asked = second.counted("lookups")
    output = second.one(SHORT)
    assert (output.cached, output.tokens) == (0, plain["short"])
    assert second.counted("lookups") == asked


def test_nothing_is_held_in_the_end(store: Sidecar, second: Engine) -> None:
    second.one(LONG)
    await_idle(store)


def test_a_restart_of_the_sidecar_costs_nothing_but_time(
    store: Sidecar, second: Engine, plain: Plain
) -> None:
    """A server that takes over the pool has its blocks; the engine finds it by itself (LMCache #4642)."""
    store.restart()
    output = second.one(LONG)
    if output.cached == 0:  # the first call after a restart may be the one that notices it
        output = second.one(LONG)
    assert (output.cached, output.tokens) == (whole_blocks(len(LONG)), plain["long"])


def test_what_is_loaded_is_used(store: Sidecar, second: Engine, plain: Plain) -> None:
    """Otherwise nothing that these tests compare would mean anything."""
    overwrite(store, spec_in(store), LONG, 3, b"")
    output = second.one(LONG)
    assert output.cached == whole_blocks(len(LONG))
    assert output.tokens != plain["long"]
