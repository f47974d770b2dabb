"""The contract of a tier over a dictionary: what a Redis server does, in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.block import BlockRows, MissCause, TierName
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierMatch, TierStatus


class Value(NamedTuple):
    """One block as it was saved."""

    row: BlockRows
    payload: bytes
    checksum: int


class DictTier:
    """Whole blocks by namespace, shard and hash; thread-safe, never full, never late."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes, str, bytes], Value] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> TierName:
        return TierName.REDIS

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        with self._lock:
            found = [_key(rows, block) in self.values for block in range(len(rows))]
        blocks = [*found, False].index(False)
        return TierMatch(blocks, None if blocks == len(rows) else MissCause.COLD)

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        result = LoadResult()
        with self._lock:
            for block, destination in enumerate(destinations):
                cause = self._load_one(rows, block, destination)
                value = self.values.get(_key(rows, block))
                result.causes.append(cause)
                result.checksums.append(value.checksum if value is not None and cause is None else 0)
                if cause is MissCause.CORRUPT:
                    del self.values[_key(rows, block)]
        return result

    def save(
        self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int], deadline: float
    ) -> list[SaveOutcome]:
        with self._lock:
            for block, payload in enumerate(payloads):
                value = Value(rows.slice(block, block + 1), payload.tobytes(), checksums[block])
                self.values[_key(rows, block)] = value
        return [SaveOutcome.STORED] * len(rows)

    def discard(self, rows: BlockRows, deadline: float) -> int:
        with self._lock:
            return sum(self.values.pop(_key(rows, block), None) is not None for block in range(len(rows)))

    def status(self) -> TierStatus:
        return TierStatus(healthy=True)

    def close(self) -> None:
        """There is nothing to give back, and a test may look at what was left."""

    def _load_one(self, rows: BlockRows, block: int, destination: Payload) -> MissCause | None:
        value = self.values.get(_key(rows, block))
        if value is None:
            return MissCause.COLD
        if not _same(value.row, rows, block) or len(value.payload) != len(destination):
            return MissCause.COLLISION
        destination[:] = np.frombuffer(value.payload, dtype=np.uint8)
        intact = xxhash.xxh3_64_intdigest(value.payload) == value.checksum
        return None if intact else MissCause.CORRUPT


def _key(rows: BlockRows, block: int) -> tuple[bytes, str, bytes]:
    return rows.namespace, str(rows.shard), rows.hash_at(block)


def _same(known: BlockRows, rows: BlockRows, block: int) -> bool:
    assert known.tokens is not None
    assert known.fingerprints is not None
    return (
        known.parent_at(0) == rows.parent_at(block)
        and known.indexes[0] == rows.indexes[block]
        and (rows.tokens is None or bool((known.tokens[0] == rows.tokens[block]).all()))
        and (rows.fingerprints is None or known.fingerprints[0] == rows.fingerprints[block])
    )
