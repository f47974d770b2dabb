"""Which of the engine's blocks the store has, as far as this engine saw to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class KnownBlocks:
    """The blocks, by the engine's own hashes, that this engine has saved or found stored of late.

    What the engine finds in its own cache is not asked for, so without this account a prefix that the
    store does not have would never be saved as long as the engine has it, and whatever follows it
    would be stored where nobody finds it. Entries are good for ``seconds``: the store may evict. The
    oldest of more than ``limit`` are forgotten. To forget one costs a question when it is saved next.
    """

    def __init__(self, clock: Callable[[], float], seconds: float = 600.0, limit: int = 1 << 18) -> None:
        self._clock = clock
        self._seconds = seconds
        self._limit = limit
        self._known: dict[bytes, float] = {}

    def add(self, hashes: Iterable[bytes]) -> None:
        now = self._clock()
        for each in hashes:
            self._known.pop(each, None)  # it goes to the end, where the youngest are
            self._known[each] = now
        while len(self._known) > self._limit:
            del self._known[next(iter(self._known))]

    def leading(self, hashes: Sequence[bytes], blocks: int) -> int:
        """How many of the first ``blocks`` are known before the first that is not."""
        since = self._clock() - self._seconds
        for place, each in enumerate(hashes[:blocks]):
            if self._known.get(each, since) <= since:
                return place
        return min(blocks, len(hashes))

    def clear(self) -> None:
        """The store may have lost what it had."""
        self._known.clear()
