"""What ``redis_tier.py`` moves: blocks of one size, by the tier, by bare sockets and by redis-py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from redis_bare import BareSocket

from hashing import KVShape, Namespace
from kvstore.block import WHOLE, BlockRows, Chain
from kvstore.tiers.base import Payload, SaveOutcome
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_value import block_key, pack_header

BLOCK_SIZE = 16
_PATIENCE_SECONDS = 60.0
_NAMESPACE = Namespace("benchmark", "0", "uint8", "none", BLOCK_SIZE, KVShape(1, 2, 1, 1))


def rows_of(blocks: int, seed: int = 0) -> BlockRows:
    """One prompt; two seeds share no block."""
    tokens = np.random.default_rng([seed, blocks]).integers(0, 2**17, blocks * BLOCK_SIZE)
    return Chain.of(_NAMESPACE.root(), tokens.astype(np.uint32)).rows(WHOLE)


def keys_of(rows: BlockRows) -> list[bytes]:
    return [block_key("kv", rows, block) for block in range(len(rows))]


def soon() -> float:
    """A deadline that nothing here reaches."""
    return time.monotonic() + _PATIENCE_SECONDS


@dataclass
class Contest:
    """The same blocks for every contender. ``bare`` are its sockets, each with the blocks that it has."""

    tier: RedisTier
    bare: Sequence[tuple[BareSocket, Sequence[int]]]
    client: Any
    """Of redis-py."""
    rows: BlockRows
    size: int
    payloads: list[Payload] = field(init=False)
    destinations: list[Payload] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.size)
        self.payloads = [random.integers(0, 256, self.size, dtype=np.uint8) for _ in range(len(self.rows))]
        self.destinations = [np.zeros_like(payload) for payload in self.payloads]
        self._sums = [xxhash.xxh3_64_intdigest(payload.data) for payload in self.payloads]
        self._keys = keys_of(self.rows)
        self._headers = [
            pack_header(self.rows, block, self.size, checksum) for block, checksum in enumerate(self._sums)
        ]
        pairs = zip(self._headers, self.payloads, strict=True)
        self._values = [header + payload.tobytes() for header, payload in pairs]

    @property
    def contenders(self) -> dict[str, dict[str, Callable[[], object]]]:
        return {
            "SET": {"tier": self._save, "bare": self._bare_set, "redis-py": self._pipelined_set},
            "GET": {"tier": self._load, "bare": self._bare_get, "redis-py": self._mget},
        }

    def check(self) -> None:
        """What arrived last is what was sent."""
        for mine, theirs in zip(self.destinations, self.payloads, strict=True):
            assert np.array_equal(mine, theirs)

    def _save(self) -> None:
        outcomes = self.tier.save(self.rows, self.payloads, self._sums, soon())
        assert set(outcomes) == {SaveOutcome.STORED}, outcomes

    def _load(self) -> None:
        result = self.tier.load(self.rows, self.destinations, soon())
        assert result.checksums == self._sums, result.causes

    def _bare_set(self) -> None:
        for bare, blocks in self.bare:
            bare.set(
                [self._keys[i] for i in blocks],
                [self._headers[i] for i in blocks],
                [self.payloads[i] for i in blocks],
            )

    def _bare_get(self) -> None:
        for bare, blocks in self.bare:
            keys, destinations = [self._keys[i] for i in blocks], [self.destinations[i] for i in blocks]
            bare.get(keys, len(self._headers[0]), destinations)

    def _pipelined_set(self) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for key, value in zip(self._keys, self._values, strict=True):
                pipeline.set(key, value, px=86_400_000)
            pipeline.execute()

    def _mget(self) -> None:
        # Of a cluster's client, the one that may ask several nodes.
        mget = getattr(self.client, "mget_nonatomic", self.client.mget)
        assert all(len(value) == len(self._values[0]) for value in mget(self._keys))
