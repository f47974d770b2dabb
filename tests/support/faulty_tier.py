"""Tiers around a tier: one that goes wrong by the dice of a seed, one that waits to be told to go on.

The rule under test is always the same: a broken lower tier costs hits, never correctness and never
a request.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvstore.block import BlockRows, MissCause, TierName
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, Tier, TierMatch, TierStatus


class Fault(StrEnum):
    """What may go wrong: ``LOSE`` and ``CORRUPT`` strike one block of a load, the others a whole call."""

    FAIL = "fail"
    """The server is not there: nothing is found, loaded or stored."""
    CRASH = "crash"
    """The tier itself is broken and raises, which its contract forbids."""
    SLOW = "slow"
    """The answer comes when nobody waits for it any more."""
    LOSE = "lose"
    """``match`` said that the block is there, and when it is loaded it is gone."""
    CORRUPT = "corrupt"
    """A byte of the payload has changed: the tier notices, deletes the block and says so."""
    SHORT = "short"
    """The server dies half-way: the first blocks were served."""


class FaultyTier:
    """A tier that goes wrong in a way that a seed repeats, as long as calls come in the same order.

    ``odds`` may be changed at any time. What a block's destination holds after a failure is
    garbage, as the contract allows.
    """

    def __init__(
        self,
        inner: Tier,
        seed: int,
        odds: Mapping[Fault, float],
        sleep_until: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.odds = odds
        self.struck: Counter[Fault] = Counter()
        self._inner = inner
        self._random = random.Random(seed)
        self._sleep_until = sleep_until

    def reseed(self, seed: int) -> None:
        self._random.seed(seed)

    @property
    def name(self) -> TierName:
        return self._inner.name

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        if self._struck_by(Fault.FAIL):
            return TierMatch(0, MissCause.UNAVAILABLE)
        if self._is_late(deadline):
            return TierMatch(0, MissCause.TIMEOUT)
        found = self._inner.match(rows, deadline)
        if not self._struck_by(Fault.SHORT):
            return found
        blocks = self._random.randrange(found.blocks + 1)
        return found if blocks == found.blocks else TierMatch(blocks, MissCause.UNAVAILABLE)

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        if self._struck_by(Fault.FAIL):
            return self._nothing(destinations, MissCause.UNAVAILABLE)
        if self._is_late(deadline):
            return self._nothing(destinations, MissCause.TIMEOUT)
        served = self._random.randrange(len(rows) + 1) if self._struck_by(Fault.SHORT) else len(rows)
        result = self._inner.load(rows.slice(0, served), destinations[:served], deadline)
        rest = self._nothing(destinations[served:], MissCause.UNAVAILABLE)
        for block, destination in enumerate(destinations[:served]):
            for fault, cause in ((Fault.LOSE, MissCause.COLD), (Fault.CORRUPT, MissCause.CORRUPT)):
                if result.causes[block] is None and self._struck_by(fault):
                    self._inner.discard(rows.slice(block, block + 1), deadline)
                    destination[self._random.randrange(len(destination))] ^= 1 << self._random.randrange(8)
                    result.causes[block], result.checksums[block] = cause, 0
        return LoadResult(result.causes + rest.causes, result.checksums + rest.checksums)

    def save(
        self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int], deadline: float
    ) -> list[SaveOutcome]:
        if self._struck_by(Fault.FAIL):
            return [SaveOutcome.UNAVAILABLE] * len(rows)
        if self._is_late(deadline):
            return [SaveOutcome.TIMEOUT] * len(rows)
        kept = self._random.randrange(len(rows) + 1) if self._struck_by(Fault.SHORT) else len(rows)
        stored = self._inner.save(rows.slice(0, kept), payloads[:kept], checksums[:kept], deadline)
        return stored + [SaveOutcome.UNAVAILABLE] * (len(rows) - kept)

    def discard(self, rows: BlockRows, deadline: float) -> int:
        if self._struck_by(Fault.FAIL) or self._is_late(deadline):
            return 0
        return self._inner.discard(rows, deadline)

    def status(self) -> TierStatus:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()

    def _struck_by(self, fault: Fault) -> bool:
        strikes = self._random.random() < self.odds.get(fault, 0.0)
        self.struck[fault] += strikes
        return strikes

    def _is_late(self, deadline: float) -> bool:
        if self._struck_by(Fault.CRASH):
            raise RuntimeError("injected: this tier is broken")
        if not self._struck_by(Fault.SLOW):
            return False
        self._sleep_until(deadline)
        return True

    def _nothing(self, destinations: Sequence[Payload], cause: MissCause) -> LoadResult:
        for destination in destinations:
            destination[:] = self._random.randrange(256)
        return LoadResult([cause] * len(destinations), [0] * len(destinations))


class HeldTier:
    """Every call waits until the test lets it through: the order of events is the test's to choose."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self._changed = threading.Condition()
        self._waiting = 0
        self._permits = 0
        self._held = True
        self.calls: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        """By call, as are ``calls``."""

    @property
    def name(self) -> TierName:
        return self._inner.name

    def let_one_through(self, seconds: float = 10.0) -> None:
        """Wait for a call to arrive, and let one go on."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._waiting > self._permits, seconds)
            assert arrived, "no call arrived"
            self._permits += 1
            self._changed.notify_all()

    def open(self) -> None:
        """Hold nobody from now on."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        self._pass("match", len(rows))
        return self._inner.match(rows, deadline)

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        self._pass("load", len(rows))
        return self._inner.load(rows, destinations, deadline)

    def save(
        self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int], deadline: float
    ) -> list[SaveOutcome]:
        self._pass("save", len(rows))
        return self._inner.save(rows, payloads, checksums, deadline)

    def discard(self, rows: BlockRows, deadline: float) -> int:
        self._pass("discard", len(rows))
        return self._inner.discard(rows, deadline)

    def status(self) -> TierStatus:
        return self._inner.status()

    def close(self) -> None:
        self.open()
        self._inner.close()

    def _pass(self, call: str, blocks: int) -> None:
        with self._changed:
            self.calls[call] += 1
            self.blocks[call] += blocks
            if not self._held:
                return
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits or not self._held)
            self._waiting -= 1
            self._permits -= bool(self._permits)
