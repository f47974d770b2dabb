"""Whether to load blocks from redis or to compute them again: whichever is expected to be faster.

The model has two measured quantities. Asking redis which blocks exist is one round trip, whose time is
the *latency*. A promotion of n bytes then takes *latency + n × seconds a byte*, where n counts what is
before it on the same link, too. Computing takes *tokens ÷ tokens a second*, which the operator says of
the engine. Both measures are smoothed as exponents, with half the weight on the last one: a server that
is a thousand times slower than before shows after one load, and one that has recovered after three.

While loads are refused nothing would be measured, so now and then a short one is made that nobody waits
for. It takes at most a twentieth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_WEIGHT = 0.5
_SHORTEST_SECONDS = 1e-6
_EXPLORED_BYTES = 4 << 20
_EXPLORED_SECONDS = 0.1
_EXPLORE_SECONDS = 1.0
_EXPLORE_SHARE = 20


class Smoothed:
    """A positive quantity that may change by orders of magnitude; None before it is first seen."""

    def __init__(self) -> None:
        self.value: float | None = None

    def see(self, value: float) -> None:
        """One measurement."""
        known = self.value
        self.value = (
            value if known is None else math.exp((1 - _WEIGHT) * math.log(known) + _WEIGHT * math.log(value))
        )


class LoadGate:
    """Measures loads, and says which are worth it. Reads the clock to space out its own loads."""

    def __init__(self, tokens_per_second: float | None, clock: Callable[[], float]) -> None:
        """``tokens_per_second`` is how fast the engine computes a prompt; None lets every load through."""
        self._tokens_per_second = tokens_per_second
        self._clock = clock
        self._latency = Smoothed()
        self._seconds_a_byte = Smoothed()
        self._explore_at = -math.inf

    def answered(self, seconds: float) -> None:
        """Redis said which blocks it has."""
        self._latency.see(max(seconds, _SHORTEST_SECONDS))

    def loaded(self, size: int, seconds: float) -> None:
        """In the time of one promotion ``size`` bytes came, or should have come."""
        transfer = max(seconds - (self._latency.value or 0.0), _SHORTEST_SECONDS)
        self._seconds_a_byte.see(transfer / size)
        # When the next one may be made follows from how long this one took, not from how long it was
        # expected to take: else a server that has recovered would wait for as long as it was slow.
        self._explore_at = min(self._explore_at, self._clock() + _pause_after(seconds))

    def expected_seconds(self, size: int) -> float:
        """How long a promotion is expected to take; 0 as long as nothing is known."""
        if self._seconds_a_byte.value is None:
            return 0.0
        return (self._latency.value or 0.0) + size * self._seconds_a_byte.value

    def allows(self, size: int, tokens: int) -> bool:
        """Whether to load ``size`` bytes is expected to be faster than to compute ``tokens``."""
        if self._tokens_per_second is None:
            return True
        return self.expected_seconds(size) < tokens / self._tokens_per_second

    def explored_blocks(self, block_bytes: int, blocks: int) -> int:
        """How many of some blocks to load for the measurement alone, after a refusal; mostly none.

        As many as come in a tenth of a second and 4 MiB, but at least one.
        """
        now = self._clock()
        if now < self._explore_at:
            return 0
        affordable = _EXPLORED_SECONDS / max(self.expected_seconds(block_bytes), _SHORTEST_SECONDS)
        explored = max(1, min(blocks, _EXPLORED_BYTES // block_bytes, int(affordable)))
        expected = self.expected_seconds(explored * block_bytes)
        self._explore_at = now + _pause_after(expected)
        return explored


def _pause_after(seconds: float) -> float:
    """How long after a load of that length no other is made for the measurement alone."""
    return max(_EXPLORE_SECONDS, seconds * _EXPLORE_SHARE)
