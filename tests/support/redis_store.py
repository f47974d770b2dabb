"""Blocks to put into Redis, and a redis tier that is asked without haste."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash

from hashing import KVShape, Namespace
from kvstore.block import WHOLE, BlockRows, Chain, Shard
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierMatch
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_value import block_key
from tests.support.valkey import ValkeyServer

BLOCK_SIZE = 16


def rows_of(blocks: int, *, model: str = "m", first_token: int = 0, shard: Shard = WHOLE) -> BlockRows:
    namespace = Namespace(model, "revision", "bfloat16", "layout", BLOCK_SIZE, KVShape(2, 2, 2, 8))
    tokens = np.arange(first_token, first_token + blocks * BLOCK_SIZE, dtype=np.uint32)
    return Chain.of(namespace.root(), tokens).rows(shard)


def payloads_of(blocks: int, size: int, seed: int = 0) -> list[Payload]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, dtype=np.uint8) for _ in range(blocks)]


class Store:
    """A tier with five seconds for everything, and its server where that is a single one."""

    def __init__(self, tier: RedisTier, server: ValkeyServer | None) -> None:
        self.tier = tier
        self._server = server

    @property
    def server(self) -> ValkeyServer:
        assert self._server is not None
        return self._server

    def save(self, rows: BlockRows, payloads: list[Payload]) -> list[SaveOutcome]:
        checksums = [xxhash.xxh3_64_intdigest(payload.data) for payload in payloads]
        return self.tier.save(rows, payloads, checksums, time.monotonic() + 5)

    def load(self, rows: BlockRows, size: int) -> tuple[LoadResult, list[Payload]]:
        destinations = [np.zeros(size, dtype=np.uint8) for _ in range(len(rows))]
        return self.tier.load(rows, destinations, time.monotonic() + 5), destinations

    def match(self, rows: BlockRows) -> int:
        return self.find(rows).blocks

    def find(self, rows: BlockRows) -> TierMatch:
        return self.tier.match(rows, time.monotonic() + 5)

    def has(self, rows: BlockRows, block: int) -> bool:
        return bool(self.server.client.exists(block_key("kv", rows, block)))


@contextmanager
def opened(server: ValkeyServer | None, url: str = "", connections: int = 2) -> Iterator[Store]:
    """A tier on the server, or on what there is at ``url``."""
    if not url:
        assert server is not None
        url = server.url
    store = Store(RedisTier(RedisOptions(url, connections=connections), time.monotonic), server)
    yield store
    store.tier.close()


def assert_loads(store: Store, rows: BlockRows, expected: list[Payload]) -> None:
    result, loaded = store.load(rows, len(expected[0]))
    assert result.causes == [None] * len(rows)
    assert result.checksums == [xxhash.xxh3_64_intdigest(payload.data) for payload in expected]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(loaded, expected, strict=True))


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """What the tier logged, down to the first words after the server's address."""
    return [
        (record.levelno, " ".join(record.getMessage().split()[2:4]))
        for record in caplog.records
        if record.name.startswith("kvstore.tiers.redis_")
    ]
