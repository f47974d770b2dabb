"""Which of a prompt's leading keys exist: what is asked of the servers, round by round."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

from kvstore.block import BlockRows, MissCause
from kvstore.tiers.base import TierMatch
from kvstore.tiers.redis_commands import read_number
from kvstore.tiers.redis_keys import RowKeys, Span
from kvstore.tiers.redis_wire import ErrorReply, Wire

_SEGMENTS_SENT = 8
_WARM_SEGMENTS = 4096


def ask_counts(wire: Wire, keys: RowKeys, spans: Sequence[Span]) -> None:
    """Ask how many keys of each span exist."""
    few = max(1, _SEGMENTS_SENT // keys.segments_at_once)
    for start in range(0, len(spans), few):
        # The server looks these up while the next ones are put into words.
        asked = spans[start : start + few]
        wire.send([wire.preface + keys.exists(span) for span in asked])


def read_counts(wire: Wire, replies: int, got: list[int | ErrorReply | MissCause]) -> None:
    """Append so many answers to what was asked, also where it raises on the way."""
    got.extend(read_number(wire) for _ in range(replies))


class WarmSegments:
    """First segments that were there not long ago, and how far the run went: a bounded number of hints.

    Thread-safe.
    """

    def __init__(self) -> None:
        # Each tag has one place, which it shares with others: no order to keep, and so no lock.
        self._runs = [(b"", 0)] * _WARM_SEGMENTS

    def run_of(self, rows: BlockRows) -> int:
        """Blocks that the last look-up with this first segment found; 0 where nothing is known."""
        if not len(rows):
            return 0
        tag, blocks = self._runs[self._place(rows)]
        return min(blocks, len(rows)) if tag == rows.tag_at(0) else 0

    def note(self, rows: BlockRows, found: TierMatch) -> None:
        """What a look-up found. After one that could not tell all, the next goes step by step again."""
        if len(rows):
            whole = found.blocks == len(rows) or rows.tag_at(found.blocks) != rows.tag_at(0)
            is_warm = whole and found.cause in {None, MissCause.COLD}
            if is_warm or self.run_of(rows):
                self._runs[self._place(rows)] = rows.tag_at(0), found.blocks if is_warm else 0

    def _place(self, rows: BlockRows) -> int:
        return int.from_bytes(rows.tags[:2], "little") % _WARM_SEGMENTS


class Counts(Protocol):
    """Tells how many keys exist."""

    def __call__(
        self, spans: Sequence[Span], meanwhile: Callable[[], object] | None = None
    ) -> Sequence[int | MissCause]:
        """Of each span, which one command may name; or why that is not known.

        ``meanwhile`` is called once, while the answers are awaited.
        """


def growing_match(counts: Counts, keys: RowKeys, warm: int) -> Iterator[TierMatch]:
    """Leading runs that exist, none shorter than the one before; the cause of the last one is final.

    The first segment is asked for alone, so that a cold prompt costs one small command; then all
    others in one round; then the first incomplete span is searched. Where ``warm`` leading blocks are
    expected, it is one round from the start, and cut where the run should end.
    """
    if not len(keys):
        return
    if warm:
        yield from _round(counts, [*keys.spans(0, warm), *keys.spans(warm, len(keys))])
        return
    first, rest = keys.first_segment(), list[Span]()

    def prepare_rest() -> None:
        rest.extend(keys.spans(first[1], len(keys)))
        keys.prepare(rest)

    if (yield from _round(counts, [first], prepare_rest)) and rest:
        yield from _round(counts, rest)


def _round(
    counts: Counts, asked: Sequence[Span], meanwhile: Callable[[], object] | None = None
) -> Generator[TierMatch, None, bool]:
    """Returns whether all of it exists."""
    for (start, stop), present in zip(asked, counts(asked, meanwhile), strict=True):
        if present != stop - start:
            yield from _search(counts, (start, stop), present)
            return False
        yield TierMatch(stop, None)
    return True


def _search(counts: Counts, span: Span, present: int | MissCause) -> Iterator[TierMatch]:
    """Longer and longer runs from the start of a span on, of whose keys only ``present`` exist.

    The first guess is that these are the first ones, since heads outlive tails; then bisection.
    """
    start, stop = span
    if isinstance(present, MissCause):
        yield TierMatch(start, present)
        return
    low, high = start, start + present
    guess = high
    while low < high:
        # How many of the first ones exist follows from how many of the others do, and these may be fewer.
        others = guess == start + present and stop - guess < present
        (found,) = counts([(guess, stop) if others else (low, guess)])
        if isinstance(found, MissCause):
            yield TierMatch(low, found)
            return
        found = max(0, present - found) if others else found
        if found == guess - low:
            low = guess
            yield TierMatch(low, None)
        else:
            high = min(guess - 1, low + found)
        guess = (low + high + 1) // 2
    yield TierMatch(low, MissCause.COLD)
