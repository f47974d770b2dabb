"""Models of which layers see only a window: hits fill what vLLM keeps of each group of layers, and no more.

The window is one token longer than two blocks, so what it needs goes to the last token of a block that
vLLM lets go of one step later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, MistralConfig

from kvstore.block import TierName
from tests.support.models import save_tiny_model
from tests.support.sidecars import Sidecar, sidecar
from tests.vllm.engines import BLOCK_SIZE, Engine, Output, engine, transfer_config
from tests.vllm.prompts import BRANCH, CROWD, DAMAGED, EXACT, GROWN, LONG, UNSEEN, WARMUP
from tests.vllm.stored import (
    await_blocks,
    await_idle,
    blocks_in,
    eventually,
    matched,
    operator,
    overwrite,
    spec_in,
)

Plain = dict[str, list[int]]
WINDOW = 2 * BLOCK_SIZE + 1
ANSWER = 3 * BLOCK_SIZE + 5
"""Tokens to generate, more than a window."""
CROWD_TOKENS = 40
LAYERS, KV_HEADS, HEAD_SIZE = 6, 2, 32
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * BLOCK_SIZE * 4
SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "sliding_window": WINDOW,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with full attention and four with windows: three groups, of two layers each."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SHAPE, num_hidden_layers=LAYERS, layer_types=layers, query_pre_attn_scalar=32)
    return save_tiny_model(config, tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def expected(windowed: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What an engine without a store generates."""
    prompts = {"long": LONG, "exact": EXACT, "branch": BRANCH, "grown0": GROWN[0], "grown3": GROWN[3]}
    with engine(windowed, tmp_path_factory.mktemp("plain")) as running:
        found = {
            name: output.tokens
            for name, output in zip(prompts, running.generate(*prompts.values()), strict=True)
        }
        found["answer"] = running.one(UNSEEN, tokens=ANSWER).tokens
        found["after"] = running.one(UNSEEN + found["answer"]).tokens
        crowd = running.generate(*CROWD, tokens=CROWD_TOKENS)
        return found | {f"crowd{place}": output.tokens for place, output in enumerate(crowd)}


@pytest.fixture(scope="module")
def store(windowed: Path, expected: Plain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """What an engine that has ended by now left behind."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address)
        with engine(windowed, tmp_path_factory.mktemp("first"), kv_transfer_config=config) as first:
            first.one(WARMUP)
            for name, prompt in (("long", LONG), ("exact", EXACT)):
                output = first.one(prompt)
                assert (output.tokens, output.cached) == (expected[name], 0)
            assert first.one(UNSEEN, tokens=ANSWER).tokens == expected["answer"]
            first.generate(*DAMAGED)
            answered = (len(UNSEEN) + ANSWER - 1) // BLOCK_SIZE
            await_blocks(server, 1 + len(LONG) // BLOCK_SIZE + len(EXACT) // BLOCK_SIZE + answered + 16)
        yield server


@pytest.fixture(scope="module")
def caching(store: Sidecar, windowed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with its own cache on."""
    config = transfer_config(store.address)
    folder = tmp_path_factory.mktemp("caching")
    with engine(windowed, folder, kv_transfer_config=config, enable_prefix_caching=True) as running:
        yield running


@pytest.fixture(scope="module")
def crowded(store: Sidecar, windowed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without a cache of its own, with room for about half of the crowd."""
    config = transfer_config(store.address, asynchronous_loads=False)
    folder = tmp_path_factory.mktemp("crowded")
    with engine(
        windowed, folder, kv_transfer_config=config, num_gpu_blocks_override=90, max_model_len=1280
    ) as running:
        yield running


def whole_blocks(count: int) -> int:
    return count // BLOCK_SIZE * BLOCK_SIZE


def test_prompts_can_be_told_apart_by_what_is_generated(expected: Plain) -> None:
    """Otherwise nothing that these tests compare would mean anything."""
    assert len({tuple(tokens[:8]) for tokens in expected.values()}) == len(expected)


def test_a_block_has_all_layers(store: Sidecar) -> None:
    assert spec_in(store).payload_bytes == BLOCK_BYTES


def test_a_prompt_of_many_windows(caching: Engine, expected: Plain) -> None:
    before = caching.counted("loaded_bytes")
    output = caching.one(LONG)
    assert (output.cached, output.tokens) == (whole_blocks(len(LONG)), expected["long"])
    copied = len(LONG) // BLOCK_SIZE + 2 * 2  # of two groups only the last window
    assert caching.counted("loaded_bytes") - before == copied * BLOCK_BYTES // 3


def test_the_last_token_is_computed_with_all_of_its_window(caching: Engine, expected: Plain) -> None:
    output = caching.one(EXACT)
    assert (output.cached, output.tokens) == (len(EXACT) - BLOCK_SIZE, expected["exact"])


def test_only_what_the_engine_lacks_is_loaded(store: Sidecar, caching: Engine, expected: Plain) -> None:
    """Windows that are partly the engine's own blocks, and partly loaded ones."""
    await_idle(store)
    eventually(lambda: caching.ask("forget"))
    for blocks in (1, 2, 7, 12):
        caching.one([*LONG[: blocks * BLOCK_SIZE], 1, 2, 3])
        loaded = caching.counted("loaded_tokens")
        output = caching.one(LONG)
        assert (output.cached, output.tokens) == (whole_blocks(len(LONG)), expected["long"])
        assert caching.counted("loaded_tokens") - loaded == whole_blocks(len(LONG)) - blocks * BLOCK_SIZE
        await_idle(store)
        eventually(lambda: caching.ask("forget"))


def test_aborted_at_any_moment_of_a_load(store: Sidecar, caching: Engine) -> None:
    """No block of any group is left behind: an engine forgets nothing while one is in use."""
    for steps in range(4):
        name = f"aborted-{steps}"
        caching.ask("start", prompt=LONG, name=name)
        caching.ask("step", times=steps)
        caching.ask("abort", name=name)
        await_idle(store)
        caching.ask("step", times=3)
        eventually(lambda: caching.ask("forget"))


def test_a_shared_beginning(store: Sidecar, caching: Engine, crowded: Engine, expected: Plain) -> None:
    """A window is computed behind what was loaded, and what is computed is stored for others."""
    first = crowded.one(BRANCH)
    assert (first.cached, first.tokens) == (15 * BLOCK_SIZE, expected["branch"])
    await_idle(store)
    second = caching.one(BRANCH)
    assert (second.cached, second.tokens) == (whole_blocks(len(BRANCH)), expected["branch"])


def test_what_was_generated_is_stored_before_windows_let_go_of_it(crowded: Engine, expected: Plain) -> None:
    prompt = UNSEEN + expected["answer"]
    output = crowded.one(prompt)
    assert (output.cached, output.tokens) == (whole_blocks(len(prompt) - 1), expected["after"])


def test_preempted_requests_go_on_with_what_is_stored(
    store: Sidecar, crowded: Engine, expected: Plain
) -> None:
    before = crowded.metrics()["vllm:num_preemptions"]
    for _ in range(2):
        outputs = crowded.generate(*CROWD, tokens=CROWD_TOKENS)
        assert [output.tokens for output in outputs] == [expected[f"crowd{place}"] for place in range(8)]
    assert crowded.metrics()["vllm:num_preemptions"] > before
    assert crowded.counted("loaded_tokens") > 0
    assert "asynchronous_loads is false" in crowded.log
    await_idle(store)


def test_what_is_loaded_into_windows_is_used(store: Sidecar, crowded: Engine, expected: Plain) -> None:
    overwrite(store, spec_in(store), LONG, len(LONG) // BLOCK_SIZE - 1, b"")
    output = crowded.one(LONG)
    assert output.cached == whole_blocks(len(LONG))
    assert output.tokens != expected["long"]


def test_a_failed_load_is_computed_again(
    store: Sidecar, caching: Engine, crowded: Engine, expected: Plain
) -> None:
    """All of it: vLLM takes a load for several groups of layers as one."""
    spec = spec_in(store)
    for block in (0, 3):
        overwrite(store, spec, DAMAGED[block], block, b"damage")
    store.restart()
    for block, running in ((0, crowded), (3, caching)):
        await_hit(running, DAMAGED[1], 4 * BLOCK_SIZE)  # when it has noticed the restart
        assert running.one(GROWN[block]).tokens == expected[f"grown{block}"]
        assert running.counted("failed_load_blocks") == 4
        await_hit(crowded, GROWN[block], 8 * BLOCK_SIZE)
        assert crowded.one(GROWN[block]).tokens == expected[f"grown{block}"]


def await_hit(running: Engine, prompt: list[int], tokens: int) -> None:
    """It comes when the engine has noticed a restart, or the server has heard of damage."""
    eventually(lambda: running.one(prompt).cached == tokens)


def test_what_windows_have_let_go_of_is_not_stored(
    store: Sidecar, caching: Engine, crowded: Engine, expected: Plain
) -> None:
    """The store has lost a prefix whose last window alone is whole in the engine.

    After the failed load the engine does not rely any more on what it has stored.
    """
    await_idle(store)
    with operator(store) as asking:
        asking.clear(tiers=[TierName.HOST])
    output = caching.one(BRANCH + EXACT)
    assert output.cached == whole_blocks(len(BRANCH)), "of its own"
    await_idle(store)
    eventually(lambda: blocks_in(store) > 0)
    assert matched(store, spec_in(store), BRANCH) == 0
    again = crowded.one(BRANCH + EXACT)
    assert (again.cached, again.tokens) == (0, output.tokens)


def test_a_model_of_windows_alone(tmp_path: Path) -> None:
    """One group of layers, which keeps no prompt whole."""
    config = MistralConfig(**SHAPE, num_hidden_layers=2)
    model = save_tiny_model(config, tmp_path / "model")
    with (
        sidecar(pool_bytes="64MiB") as server,
        engine(model, tmp_path, kv_transfer_config=transfer_config(server.address)) as running,
    ):
        computed, found = computed_then_found(server, running, LONG)
        assert (computed.cached, found.cached) == (0, whole_blocks(len(LONG)))
        assert found.tokens == computed.tokens


def test_windows_that_the_engine_keeps_whole(windowed: Path, expected: Plain, tmp_path: Path) -> None:
    """Without vLLM's hybrid manager all layers are one group."""
    with sidecar(pool_bytes="64MiB") as server:
        whole = {
            "kv_transfer_config": transfer_config(server.address),
            "disable_hybrid_kv_cache_manager": True,
        }
        with engine(windowed, tmp_path, **whole) as running:
            computed, found = computed_then_found(server, running, EXACT)
            assert (computed.cached, found.cached) == (0, len(EXACT))
            assert computed.tokens == found.tokens == expected["exact"]


def computed_then_found(server: Sidecar, running: Engine, prompt: list[int]) -> tuple[Output, Output]:
    first = running.one(prompt)
    await_blocks(server, len(prompt) // BLOCK_SIZE)
    return first, running.one(prompt)
