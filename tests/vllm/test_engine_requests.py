"""Requests in every state: beside the engine's own cache, preempted, aborted, with new weights."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sidecars import Sidecar, sidecar
from tests.vllm.engines import BLOCK_SIZE, Engine, engine, transfer_config
from tests.vllm.prompts import BRANCH, CROWD, CROWD_TOKENS, EXACT, LONG, UNSEEN, WARMUP
from tests.vllm.stored import await_blocks, await_idle, blocks_in, eventually

Plain = dict[str, list[int]]


@pytest.fixture(scope="module", params=["asynchronous", "synchronous"])
def crowded(
    request: pytest.FixtureRequest, model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sidecar, Engine]]:
    """An engine whose cache has room for about five of the eight requests of a crowd."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address, asynchronous_loads=request.param == "asynchronous")
        with engine(
            model,
            tmp_path_factory.mktemp("crowded"),
            kv_transfer_config=config,
            enable_prefix_caching=True,
            num_gpu_blocks_override=45,
            max_model_len=1280,
        ) as running:
            running.one(WARMUP)
            yield server, running


def test_preempted_requests_go_on_with_what_is_stored(crowded: tuple[Sidecar, Engine], plain: Plain) -> None:
    """Blocks are pinned while they are saved, and loaded when a request resumes (LMCache #2912)."""
    server, running = crowded
    before = running.metrics()["vllm:num_preemptions"]
    for _ in range(2):
        outputs = running.generate(*CROWD, tokens=CROWD_TOKENS)
        assert [output.tokens for output in outputs] == [plain[f"crowd{place}"] for place in range(8)]
    assert running.metrics()["vllm:num_preemptions"] > before
    assert running.counted("loaded_tokens") > 0
    await_idle(server)


def test_what_was_generated_is_found_as_part_of_the_next_prompt(
    crowded: tuple[Sidecar, Engine], plain: Plain
) -> None:
    """Of a conversation nothing is computed twice but its unfinished blocks."""
    server, running = crowded
    prompt = CROWD[0] + plain["crowd0"]
    running.generate(UNSEEN, LONG)  # which take the place of what the engine itself had
    await_idle(server)
    loaded = running.counted("loaded_tokens")
    output = running.one(prompt)
    # All but the last token that was generated had been computed.
    assert output.cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert running.counted("loaded_tokens") > loaded


@pytest.fixture(scope="module")
def both_caches(
    model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sidecar, Engine]]:
    """An engine with its own cache on, and a store that knows LONG although the engine does not."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address, map_pool=False)
        with engine(
            model, tmp_path_factory.mktemp("both"), kv_transfer_config=config, enable_prefix_caching=True
        ) as running:
            running.one(LONG)
            running.one(EXACT)
            await_blocks(server, 31 + 8)
            eventually(lambda: running.ask("forget"))
            yield server, running


def test_only_what_the_engine_lacks_is_loaded(both_caches: tuple[Sidecar, Engine], plain: Plain) -> None:
    """No remote traffic for blocks that the engine has (LMCache #1109 #2205)."""
    server, running = both_caches
    cut = 12 * BLOCK_SIZE
    running.one([*LONG[:cut], 1, 2, 3])  # loads twelve blocks, which the engine keeps
    loaded, size = running.counted("loaded_tokens"), running.counted("loaded_bytes")
    output = running.one(LONG)
    assert (output.cached, output.tokens) == (31 * BLOCK_SIZE, plain["long"])
    assert running.counted("loaded_tokens") - loaded == 31 * BLOCK_SIZE - cut
    assert running.counted("loaded_bytes") - size == (31 - 12) * 4 * 2 * 2 * 32 * BLOCK_SIZE * 4
    again = running.one(LONG)
    assert (again.cached, again.tokens) == (31 * BLOCK_SIZE, plain["long"])
    assert running.counted("loaded_tokens") - loaded == 31 * BLOCK_SIZE - cut
    await_idle(server)


@pytest.mark.parametrize("steps", range(5))
def test_abort_at_any_moment_of_a_load(both_caches: tuple[Sidecar, Engine], plain: Plain, steps: int) -> None:
    """No lease, no block and no wrong count is left (LMCache #2912, sglang #40334)."""
    server, running = both_caches
    eventually(lambda: running.ask("forget"))
    running.ask("start", prompt=LONG, name=f"aborted-{steps}")
    running.ask("step", times=steps)
    running.ask("abort", name=f"aborted-{steps}")
    assert running.one(EXACT).tokens == plain["exact"]
    await_idle(server)
    running.ask("step", times=3)
    eventually(lambda: running.ask("forget"), 5)  # which fails as long as a block is in use


def test_abort_while_the_sidecar_does_not_answer(both_caches: tuple[Sidecar, Engine], plain: Plain) -> None:
    server, running = both_caches
    eventually(lambda: running.ask("forget"))
    server.process.send_signal(signal.SIGSTOP)
    running.ask("start", prompt=LONG, name="asking")
    running.ask("step", times=2)
    running.ask("abort", name="asking")
    assert running.one(BRANCH).tokens == plain["branch"]
    server.resume()
    await_idle(server)
    eventually(lambda: running.one(LONG).cached > 0)


def test_new_weights_find_nothing_of_the_old(both_caches: tuple[Sidecar, Engine], plain: Plain) -> None:
    """``reset_cache`` is how an engine says that its weights are others."""
    server, running = both_caches
    await_idle(server)
    running.one(WARMUP)
    stored = blocks_in(server)
    eventually(lambda: running.ask("reset"))
    output = running.one(LONG)
    assert (output.cached, output.tokens) == (0, plain["long"])
    await_blocks(server, stored + 31)
    eventually(lambda: running.ask("forget"))
    assert running.one(LONG).cached == 31 * BLOCK_SIZE
