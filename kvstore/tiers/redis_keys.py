"""The keys of a prompt's blocks, as commands name them, and which of them one command may name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvstore.block import HASH_BYTES, SEGMENT_BLOCKS, BlockRows, Shard

# To put more into words would take longer than the reply that may make it useless.
_SEGMENTS_PREPARED = 4

Span = tuple[int, int]
"""Half-open range of blocks."""


def tag_runs(tags: bytes) -> list[Span]:
    """Packed segment tags, cut where one differs from the one before."""
    if not tags:
        return []
    halves = np.frombuffer(tags, dtype=np.uint64)
    changes = np.flatnonzero(halves[2:] != halves[:-2])
    cuts = sorted({change // 2 + 1 for change in changes.tolist()})
    return list(pairwise([0, *cuts, len(tags) // HASH_BYTES]))


@lru_cache
def _key_start(prefix: str, namespace: bytes, shard: Shard) -> bytes:
    """All that comes before the segment tag in every key of a rank, as the server reads it."""
    before = b"%b:%b:%b:{" % (prefix.encode(), namespace.hex().encode(), str(shard).encode())
    return b"$%d\r\n%b" % (len(before) + 4 * HASH_BYTES + len(b"}:"), before)


class RowKeys:
    """The keys of some rows, as the server reads them."""

    def __init__(self, prefix: str, rows: BlockRows, *, segments_at_once: int = 1) -> None:
        """``segments_at_once`` may be named by one command; in a cluster that is one."""
        self._rows = rows
        self._start = _key_start(prefix, rows.namespace, rows.shard)
        self.segments_at_once = segments_at_once
        self._lead_of = b"", b""
        self._cut: dict[Span, list[Span]] = {}
        self._prepared: dict[Span, bytes] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, block: int) -> bytes:
        """One key as an argument of a command."""
        return b"%b%b\r\n" % (self._lead(block), self._rows.hash_at(block).hex().encode())

    def tag(self, block: int) -> bytes:
        """The segment that a block is in."""
        return self._rows.tag_at(block)

    def first_segment(self) -> Span:
        """Blocks of the first segment. Of a cold prompt no other is needed, so the rest is left uncut."""
        stop = min(SEGMENT_BLOCKS, len(self._rows))
        goes_on = stop < len(self._rows) and self.tag(stop) == self.tag(0)
        whole = self.tag(stop - 1) == self.tag(0) and not goes_on
        first = (0, stop) if whole else self.segments((0, len(self._rows)))[0]
        self._cut[first] = [first]
        return first

    def spans(self, start: int, stop: int) -> list[Span]:
        """Rows [start, stop), cut into as many segments as one command may name."""
        segments, some = self.segments((start, stop)), self.segments_at_once
        together = [segments[i : i + some] for i in range(0, len(segments), some)]
        cut = {(few[0][0], few[-1][1]): few for few in together}
        self._cut |= cut
        return [*cut]

    def segments(self, span: Span) -> list[Span]:
        """The segments of a span, or what is in it of them."""
        known = self._cut.get(span)
        if known is not None:
            return known
        first, after = span
        return [
            (first + start, first + stop)
            for start, stop in tag_runs(self._rows.tags[first * HASH_BYTES : after * HASH_BYTES])
        ]

    def exists(self, span: Span) -> bytes:
        """EXISTS of the keys of a span."""
        return self._prepared.pop(span, None) or self._exists(span)

    def prepare(self, spans: Sequence[Span]) -> None:
        """Put the first of these into words already, for ``exists``."""
        few = spans[: max(1, _SEGMENTS_PREPARED // self.segments_at_once)]
        self._prepared = {span: self._exists(span) for span in few}

    def _exists(self, span: Span) -> bytes:
        words = [b"*%d\r\n$6\r\nEXISTS" % (1 + span[1] - span[0])]
        for start, stop in self.segments(span):
            # All that comes before the hash is the same for all keys of a segment.
            lead = b"\r\n" + self._lead(start)
            hashes = self._rows.hashes[start * HASH_BYTES : stop * HASH_BYTES]
            words += (lead, hashes.hex("|", HASH_BYTES).encode().replace(b"|", lead))
        words.append(b"\r\n")
        return b"".join(words)

    def _lead(self, block: int) -> bytes:
        """What comes before the hash: made once for a run of blocks of one segment."""
        tag = self._rows.tag_at(block)
        if tag != self._lead_of[0]:
            self._lead_of = tag, b"%b%b}:" % (self._start, tag.hex().encode())
        return self._lead_of[1]
