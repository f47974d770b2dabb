"""Several engines, models, adapters and salts on one store; and what only Redis has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block import TierName
from tests.support.sidecars import Sidecar, sidecar
from tests.support.valkey import ValkeyServer, shared_valkey, valkey
from tests.vllm.engines import BLOCK_SIZE, Engine, engine, transfer_config
from tests.vllm.prompts import BRANCH, EXACT, LONG, UNSEEN, WARMUP
from tests.vllm.stored import await_blocks, await_idle, blocks_in, eventually, operator

__all__ = ["shared_valkey", "valkey"]

Plain = dict[str, list[int]]
LONG_BLOCKS = len(LONG) // BLOCK_SIZE


def empty_host(server: Sidecar) -> None:
    """Leave what is stored to Redis alone."""
    await_idle(server)
    with operator(server) as asking:
        asking.clear(tiers=[TierName.HOST])
    assert blocks_in(server) == 0


def test_redis_only(model: Path, plain: Plain, valkey: ValkeyServer, tmp_path: Path) -> None:
    """What one machine's engine computed, another machine's finds in Redis."""
    with sidecar(pool_bytes="64MiB", redis_url=valkey.url) as server:
        config = transfer_config(server.address, redis_seconds=5.0, lookup_seconds=10.0)
        with engine(model, tmp_path, kv_transfer_config=config) as running:
            running.one(WARMUP)
            running.one(LONG)
            await_blocks(server, 1 + LONG_BLOCKS)
            eventually(lambda: valkey.client.dbsize() == 1 + LONG_BLOCKS)
            empty_host(server)
            output = running.one(LONG)
            assert (output.cached, output.tokens) == (LONG_BLOCKS * BLOCK_SIZE, plain["long"])
            found = running.metrics()
            source = 'vllm:prompt_tokens_cached_by_source{"source": "external_unspecified"}'
            assert found[source] == LONG_BLOCKS * BLOCK_SIZE
            # Now it is in memory again.
            running.one(LONG)
            source = 'vllm:prompt_tokens_cached_by_source{"source": "host"}'
            assert running.metrics()[source] == LONG_BLOCKS * BLOCK_SIZE


def test_two_models_on_one_redis(
    model: Path, other_model: Path, plain: Plain, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """The same name and shape, other weights: no hit of the other's, and no delete of it (case 4)."""
    first, second = sidecar(redis_url=valkey.url), sidecar(redis_url=valkey.url)
    with first as one, second as two:
        config = transfer_config(one.address, model="m")
        with engine(model, tmp_path, kv_transfer_config=config) as running:
            running.one(LONG)
            await_blocks(one, LONG_BLOCKS)
            eventually(lambda: valkey.client.dbsize() == LONG_BLOCKS)
        config = transfer_config(two.address, model="m", redis_seconds=5.0, lookup_seconds=10.0)
        with engine(other_model, tmp_path, kv_transfer_config=config) as running:
            theirs = running.one(LONG)
            assert theirs.cached == 0
            assert theirs.tokens != plain["long"]
            eventually(lambda: valkey.client.dbsize() == 2 * LONG_BLOCKS)
            empty_host(two)
            again = running.one(LONG)
            assert (again.cached, again.tokens) == (LONG_BLOCKS * BLOCK_SIZE, theirs.tokens)
        calls = valkey.calls()
        assert not {"del", "unlink", "flushall", "flushdb"} & calls.keys()


def test_two_weights_under_one_name_are_told_of(model: Path, other_model: Path, tmp_path: Path) -> None:
    """One line that says what differs; also for another block size (dynamo #1233 #659)."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address, model="m")
        with engine(model, tmp_path, kv_transfer_config=config) as running:
            running.one(LONG)
            await_blocks(server, LONG_BLOCKS)
        with engine(other_model, tmp_path, kv_transfer_config=config, block_size=64) as running:
            assert running.one(LONG).cached == 0
            [line] = [each for each in running.log.splitlines() if "kvstore has other blocks of m" in each]
            assert "weights_id" in line
            assert "block_size 32 there and 64 here" in line


@pytest.fixture(scope="module")
def one_of_two(
    model: Path, adapters: list[Path], plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sidecar, Engine, Engine]]:
    """Two engines that run at the same time, on one sidecar."""
    with sidecar(pool_bytes="64MiB") as server:
        config = transfer_config(server.address)
        folder = tmp_path_factory.mktemp("two")
        options = {"kv_transfer_config": config, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        with engine(model, folder, **options) as first, engine(model, folder, **options) as second:
            yield server, first, second


def test_two_engines_at_once(one_of_two: tuple[Sidecar, Engine, Engine], plain: Plain) -> None:
    """Both write the same blocks at the same time, and both read what the other wrote."""
    server, first, second = one_of_two
    for prompts in ([LONG, UNSEEN], [BRANCH, EXACT], [LONG, BRANCH, EXACT, UNSEEN]):
        for running in (first, second):
            running.tell("generate", prompts=prompts)
        outputs = [running.answer() for running in (first, second)]
        for output in outputs:
            names = {
                tuple(LONG): "long",
                tuple(UNSEEN): "unseen",
                tuple(BRANCH): "branch",
                tuple(EXACT): "exact",
            }
            assert [each["tokens"] for each in output] == [plain[names[tuple(prompt)]] for prompt in prompts]
        await_idle(server)
    assert all(each["cached"] > 0 for output in outputs for each in output)


def test_salts_are_honoured(one_of_two: tuple[Sidecar, Engine, Engine], plain: Plain) -> None:
    """Another salt finds nothing, the same one does, in the other engine too (LMCache #4825)."""
    server, first, second = one_of_two
    assert first.one(LONG, salt="a").cached == 0
    await_idle(server)
    eventually(lambda: second.one(LONG, salt="a").cached > 0)
    output = second.one(LONG, salt="b")
    assert (output.cached, output.tokens) == (0, plain["long"])


def test_adapters_do_not_hit_each_other(
    one_of_two: tuple[Sidecar, Engine, Engine], adapters: list[Path], plain: Plain
) -> None:
    """Nor the base model (vllm #44250, LMCache #2961)."""
    server, first, second = one_of_two
    expected = [first.one(EXACT, adapter=str(adapter)) for adapter in adapters]
    assert [output.cached for output in expected] == [0, 0]
    assert len({tuple(plain["exact"]), *(tuple(output.tokens) for output in expected)}) == 3
    await_idle(server)
    for adapter, output in zip(adapters, expected, strict=True):
        eventually(lambda adapter=adapter: second.one(EXACT, adapter=str(adapter)).cached > 0)  # type: ignore[misc]
        found = second.one(EXACT, adapter=str(adapter))
        assert (found.cached, found.tokens) == (len(EXACT), output.tokens)
