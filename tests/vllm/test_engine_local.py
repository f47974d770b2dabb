"""What the engine has itself costs the store nothing; and what requests say of their own future."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.block import TierName
from tests.support.sidecars import Sidecar, sidecar
from tests.support.valkey import ValkeyServer, shared_valkey, valkey
from tests.vllm.engines import BLOCK_SIZE, Engine, engine, transfer_config
from tests.vllm.prompts import EXACT, LONG, WARMUP, tokens
from tests.vllm.servers import fetch
from tests.vllm.stored import await_blocks, await_idle, blocks_in, eventually, operator

__all__ = ["shared_valkey", "valkey"]

Plain = dict[str, list[int]]
Running = tuple[Sidecar, Engine, ValkeyServer]
LONG_BLOCKS = len(LONG) // BLOCK_SIZE
REST_BLOCKS = 3
GOES_ON = LONG[: LONG_BLOCKS * BLOCK_SIZE] + tokens(40, REST_BLOCKS * BLOCK_SIZE + 5)


def asked_tokens(server: Sidecar) -> float:
    lines = fetch(f"{server.serving['http']}/metrics").splitlines()
    found = [line for line in lines if line.startswith("kvstore_asked_tokens_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@pytest.fixture
def running(model: Path, plain: Plain, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Running]:
    """An engine with its own cache on, which has LONG as the store has; in memory it is of Redis only."""
    with sidecar(pool_bytes="64MiB", redis_url=valkey.url) as server:
        config = transfer_config(server.address, redis_seconds=5.0, lookup_seconds=10.0)
        with engine(model, tmp_path, kv_transfer_config=config, enable_prefix_caching=True) as started:
            started.one(WARMUP)
            assert started.one(LONG).tokens == plain["long"]
            await_blocks(server, 1 + LONG_BLOCKS)
            eventually(lambda: valkey.client.dbsize() == 1 + LONG_BLOCKS)
            await_idle(server)
            with operator(server) as asking:
                asking.clear(tiers=[TierName.HOST])
            assert blocks_in(server) == 0
            yield server, started, valkey


def test_blocks_that_the_engine_has_are_not_asked_for(running: Running) -> None:
    """Nothing of them is looked up in Redis, promoted, leased, counted or stored again (case 48).

    LMCache #1109 #2205 #2334.
    """
    server, started, redis = running
    asked = asked_tokens(server)
    redis.client.config_resetstat()
    output = started.one(GOES_ON)
    assert output.cached == LONG_BLOCKS * BLOCK_SIZE
    await_blocks(server, REST_BLOCKS)
    eventually(lambda: redis.client.dbsize() == 1 + LONG_BLOCKS + REST_BLOCKS)
    calls = redis.calls()
    assert (calls.get("get", 0), calls.get("set", 0)) == (0, REST_BLOCKS)
    assert 0 < calls["keys"] <= REST_BLOCKS
    assert asked_tokens(server) - asked == len(GOES_ON) - LONG_BLOCKS * BLOCK_SIZE
    # Once more: the engine has every whole block.
    redis.client.config_resetstat()
    assert started.one(GOES_ON).cached == len(GOES_ON) // BLOCK_SIZE * BLOCK_SIZE
    await_idle(server)
    calls = redis.calls()
    assert (calls["keys"], calls.get("get", 0), calls.get("set", 0)) == (0, 0, 0)
    assert asked_tokens(server) - asked == len(GOES_ON) - LONG_BLOCKS * BLOCK_SIZE
    assert started.counted("loaded_tokens") == 0


def test_what_the_engine_lacks_is_loaded_behind_what_it_has(running: Running, plain: Plain) -> None:
    """Part in its own cache and part in Redis: only the second part is fetched."""
    server, started, redis = running
    expected = started.one(GOES_ON)
    await_blocks(server, REST_BLOCKS)
    eventually(lambda: redis.client.dbsize() == 1 + LONG_BLOCKS + REST_BLOCKS)
    await_idle(server)
    eventually(lambda: started.ask("forget"))
    cut = 12 * BLOCK_SIZE
    started.one([*LONG[:cut], 1, 2, 3])  # loads twelve blocks, which the engine keeps
    await_idle(server)
    with operator(server) as asking:
        asking.clear(tiers=[TierName.HOST])
    redis.client.config_resetstat()
    output = started.one(GOES_ON)
    assert output.tokens == expected.tokens
    assert output.cached == (LONG_BLOCKS + REST_BLOCKS) * BLOCK_SIZE
    calls = redis.calls()
    assert calls["get"] == LONG_BLOCKS + REST_BLOCKS - 12
    assert started.one(LONG).tokens == plain["long"]


def test_hints_are_heard_and_bad_ones_are_told_of_once(running: Running, plain: Plain) -> None:
    """A request with a bad hint is served like any other."""
    _, started, _ = running
    good = {"ended": True, "priority": 1, "idle_seconds": 30}
    for params in (good, {"priority": "urgent"}, {"priority": "high"}, {"idle_seconds": -1.0}):
        assert started.one(EXACT, params=params).tokens == plain["exact"]
    lines = [line for line in started.log.splitlines() if "kvstore ignores the hints" in line]
    assert len(lines) == 2
    assert "hints.priority is 'urgent', expected a whole number" in lines[0]
    assert "hints.idle_seconds is -1.0, expected 0 or more" in lines[1]
