"""The leading run over the tiers in this process's reach, each block from its fastest one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvstore.block import BlockRows, MissCause, SlotArray, TierName
from kvstore.lease import Segment
from kvstore.tiers.memory import MemoryTier

_GRAVITY = {MissCause.COLD: 0, MissCause.UNKNOWN: 1, MissCause.COLLISION: 2}


class LocalRun(NamedTuple):
    """Segments of a leading run, in order, and what ended it (None: nothing did)."""

    segments: list[Segment]
    blocks: int
    cause: MissCause | None


def local_run(tiers: Sequence[MemoryTier], rows: BlockRows) -> LocalRun:
    """Match ``rows`` over ``tiers``, fastest first; segment starts count in the prompt's chain."""
    segments: list[Segment] = []
    first = int(rows.indexes[0]) if len(rows) else 0
    position = 0
    cause: MissCause | None = None
    advanced = True
    while advanced and position < len(rows):
        advanced = False
        cause = None
        for tier in tiers:
            match = tier.pool.match(rows.slice(position, len(rows)))
            if len(match.slots):
                segments.append(Segment(tier.name, first + position, match.slots, tier.name))
                position += len(match.slots)
                advanced = True
            if position == len(rows):
                return LocalRun(segments, position, None)
            cause = _graver(cause, match.cause)
    return LocalRun(segments, position, cause)


def slots_in(segments: Iterable[Segment], tier: TierName) -> SlotArray:
    """The slots of the segments that are in a tier, in chain order."""
    own = [segment.slots for segment in segments if segment.tier is tier]
    return np.concatenate(own) if own else np.zeros(0, dtype=np.int64)


def cut(segments: list[Segment], stop: int) -> list[Segment]:
    """The part of the segments that is before block ``stop``."""
    return [Segment(s.tier, s.start, s.slots[: stop - s.start], s.source) for s in segments if s.start < stop]


def credit(segments: list[Segment], fetched: Container[int], remote: TierName) -> list[Segment]:
    """Split segments so that blocks in host slots just ``fetched`` count as served by the ``remote`` tier."""
    credited: list[Segment] = []
    for segment in segments:
        if segment.tier is not TierName.HOST:
            credited.append(segment)
            continue
        came = np.fromiter((slot in fetched for slot in segment.slots.tolist()), np.bool_)
        edges = [0, *(np.flatnonzero(np.diff(came)) + 1).tolist(), len(came)]
        for start, stop in pairwise(edges):
            source = remote if came[start] else segment.source
            part = segment.slots[start:stop]
            credited.append(Segment(segment.tier, segment.start + start, part, source))
    return credited


def _graver(known: MissCause | None, other: MissCause | None) -> MissCause | None:
    if known is None or other is None:
        return known or other
    return max(known, other, key=lambda cause: _GRAVITY.get(cause, 0))
