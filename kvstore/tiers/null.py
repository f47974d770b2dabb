"""A tier that holds nothing, so that a store without this tier needs no special case."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.block import BlockRows, MissCause, TierName
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierMatch, TierStatus


class NullTier:
    """Nothing is ever resident; every save is refused; always healthy."""

    def __init__(self, name: TierName) -> None:
        self._name = name

    @property
    def name(self) -> TierName:
        return self._name

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        return TierMatch(0, MissCause.COLD if len(rows) else None)

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        return LoadResult([MissCause.COLD] * len(rows), [0] * len(rows))

    def save(
        self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int], deadline: float
    ) -> list[SaveOutcome]:
        return [SaveOutcome.REFUSED] * len(rows)

    def discard(self, rows: BlockRows, deadline: float) -> int:
        return 0

    def status(self) -> TierStatus:
        return TierStatus(healthy=True, reason="none is configured")

    def close(self) -> None:
        pass
