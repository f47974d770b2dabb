"""Questions that change nothing: where a prompt's blocks are, or why they are not there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvstore.block import BlockRows, Chain, MissCause, Residency, Shard, TierName
from kvstore.stamps import history
from kvstore.store.local import LocalRun, local_run
from kvstore.store.parts import Parts
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.null import NullTier

_ABSENT = (MissCause.COLD, MissCause.UNKNOWN)
_REDIS_GAPS_MAX = 64
"""Rounds in which redis is asked for what follows a block that it lacks."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer of a probe, in tokens, over all ranks: the minimum.

    ``matched`` is the leading run in any tier, ``verified`` the part of it whose tokens were
    compared. ``served`` splits the run by fastest tier; ``alone`` is each tier's own leading run,
    of the tiers that were asked for all of the prompt.
    """

    matched: int
    verified: int
    served: dict[TierName, int]
    alone: dict[TierName, int]


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block on one rank: the tiers that have it, or the cause of its absence as far as known.

    Times are seconds since it was stored and used, in the fastest memory tier that has it.
    """

    tiers: tuple[TierName, ...]
    cause: MissCause | None
    being_written: bool
    age_seconds: float | None
    idle_seconds: float | None


class Probe:
    """One look-up: what memory knows, and the question that is left for redis."""

    def __init__(
        self, parts: Parts, chain: Chain, shards: tuple[Shard, ...], tiers: Collection[TierName] | None
    ) -> None:
        """``tiers`` None asks all of them, and redis only for what follows the run in memory."""
        self._size = chain.root.block_size
        self._compared = chain.tokens is not None
        self._remote = parts.tiers.remote
        self._memory = [tier for tier in parts.tiers.memory if tiers is None or tier.name in tiers]
        self._rows = [chain.rows(shard) for shard in shards]
        self._runs = [local_run(self._memory, rows) for rows in self._rows]
        self._run = min(self._runs, key=lambda run: run.blocks)
        absent = isinstance(self._remote, NullTier)
        self._asks_alone = not absent and tiers is not None and self._remote.name in tiers
        asks = not absent and tiers is None and self._run.blocks < len(chain)
        self.asks_redis = (asks or self._asks_alone) and len(chain) > 0

    def ask(self, deadline: float) -> list[tuple[int, int]]:
        """What redis has, by rank: (its own leading run, where the run from memory ends with it)."""
        return [self._ask(rows, run, deadline) for rows, run in zip(self._rows, self._runs, strict=True)]

    def _ask(self, rows: BlockRows, run: LocalRun, deadline: float) -> tuple[int, int]:
        # A run may go on in redis without its head, which an eviction may have taken.
        own = self._remote.match(rows, deadline).blocks if self._asks_alone or not run.blocks else 0
        if own > run.blocks or run.blocks == len(rows) or not run.blocks:
            return own, max(own, run.blocks)
        rest = rows.slice(run.blocks, len(rows))
        return own, run.blocks + self._remote.match(rest, deadline).blocks

    def answer(self, redis: list[tuple[int, int]] | None) -> Lookup:
        """The look-up, with what ``ask`` returned; None when redis was not asked or did not answer."""
        size, local = self._size, self._run.blocks
        matched = local if not redis else max(local, min(end for _, end in redis))
        served = _served(self._run, size)
        if matched > local:
            served[self._remote.name] = (matched - local) * size
        alone = {tier.name: self._alone(tier) * size for tier in self._memory}
        if redis and self._asks_alone:
            alone[self._remote.name] = min(own for own, _ in redis) * size
        return Lookup(matched * size, local * size if self._compared else 0, served, alone)

    def _alone(self, tier: MemoryTier) -> int:
        if len(self._memory) == 1:
            return self._run.blocks
        return min(len(tier.pool.match(rows).slots) for rows in self._rows)


def _served(run: LocalRun, size: int) -> dict[TierName, int]:
    served: dict[TierName, int] = {}
    for segment in run.segments:
        count = min(segment.stop, run.blocks) - segment.start
        served[segment.tier] = served.get(segment.tier, 0) + count * size
    return served


def present_in(tier: Tier, rows: BlockRows, clock: Callable[[], float], deadline: float) -> list[bool | None]:
    """Which blocks a tier has, gaps included; None where it could not tell, or was not asked any more."""
    known: list[bool | None] = [None] * len(rows)
    position = 0
    for _ in range(_REDIS_GAPS_MAX):
        if position >= len(rows) or clock() > deadline:
            break
        match = tier.match(rows.slice(position, len(rows)), deadline)
        known[position : position + match.blocks] = [True] * match.blocks
        position += match.blocks
        if match.cause in {MissCause.TIMEOUT, MissCause.UNAVAILABLE}:
            break
        if position < len(rows):
            known[position] = False
            position += 1
    return known


class Explanation:
    """Block by block, where a prompt is on one rank. Made in pieces, since each takes its time."""

    def __init__(self, parts: Parts, rows: BlockRows, in_redis: list[bool | None] | None) -> None:
        """``in_redis`` is what ``present_in`` said, None where there is no redis."""
        self._parts = parts
        self._rows = rows
        self._in_redis = in_redis

    def reports(self, start: int, stop: int) -> list[BlockReport]:
        """Blocks [start, stop), as they are now."""
        now, part = self._parts.clock(), self._rows.slice(start, stop)
        absences = self._parts.absences.causes(part.namespace, part.hashes, now)
        return [self._report(start + at, now, absence) for at, absence in enumerate(absences)]

    def _report(self, block: int, now: float, absence: MissCause) -> BlockReport:
        memory, row = self._parts.tiers.memory, self._rows.slice(block, block + 1)
        matches = {tier: tier.pool.match(row) for tier in memory}
        holders = [tier for tier, match in matches.items() if len(match.slots)]
        tiers = [tier.name for tier in holders]
        redis_has = self._in_redis[block] if self._in_redis is not None else False
        if redis_has:
            tiers.append(self._parts.tiers.remote.name)
        age = idle = None
        if holders:
            found = history(holders[0].pool.extents, matches[holders[0]].slots)
            age, idle = now - float(found.stored_at[0]), now - float(found.used_at[0])
        cause = None if tiers else _gravest([match.cause for match in matches.values()])
        if cause in _ABSENT:
            # What redis did not say may be there.
            cause = MissCause.UNKNOWN if redis_has is None else absence
        pending = any(tier.pool.residency(row)[0] is Residency.PENDING for tier in memory)
        return BlockReport(tuple(tiers), cause, pending, age, idle)


def _gravest(causes: list[MissCause | None]) -> MissCause:
    order = (MissCause.COLLISION, MissCause.UNKNOWN, MissCause.COLD)
    return next((cause for cause in order if cause in causes), MissCause.UNKNOWN)
