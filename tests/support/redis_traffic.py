"""Readers and writers that go on while something happens to the servers, and judge every answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from kvstore.block import BlockRows
from kvstore.tiers.base import Payload
from kvstore.tiers.redis import RedisTier

BUDGET_SECONDS = 0.2
LATE_SECONDS = 0.05
"""How late an answer may be on a busy machine; the tier itself promises a few milliseconds."""


AT_ONCE_SECONDS = 0.5
"""What is not to wait for its deadline of five seconds."""
_BEAT_SECONDS = 0.005
_LATE_BEAT_SECONDS = 0.02


class Pulse:
    """Notices when this machine is too busy to run a thread that only sleeps."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._before = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> Self:
        self._before = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def was_late_since(self, moment: float) -> bool:
        # Whatever held up everybody, this thread's own next beat tells.
        now = time.monotonic()
        while self._before < now:
            time.sleep(_BEAT_SECONDS)
        return any(late > moment for late in self._late[-10:])

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            now = time.monotonic()
            if now - self._before > _LATE_BEAT_SECONDS:
                self._late.append(now)
            self._before = now


class Timed:
    """Seconds spent in the block of code; zero when the machine was too busy for that to mean anything."""

    def __init__(self, pulse: Pulse | None = None) -> None:
        self._own = ExitStack()
        self._pulse = pulse

    def __enter__(self) -> Self:
        if self._pulse is None:
            self._pulse = self._own.enter_context(Pulse())
        self._begun = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._pulse is not None
        passed = time.monotonic() - self._begun
        noticeable = passed > _LATE_BEAT_SECONDS
        self.seconds = 0.0 if noticeable and self._pulse.was_late_since(self._begun) else passed
        self._own.close()


class Traffic:
    """Threads that save, find and load the same blocks until the end of the block of code.

    ``wrong`` is what was never to be: other bytes than were saved, or an answer after its deadline.
    """

    def __init__(self, tier: RedisTier, rows: BlockRows, payloads: list[Payload], threads: int = 2) -> None:
        self._tier = tier
        self._rows = rows
        self._payloads = payloads
        self._checksums = [xxhash.xxh3_64_intdigest(payload.data) for payload in payloads]
        self._stop = threading.Event()
        self._pulse = Pulse()
        self._threads = [threading.Thread(target=self._work) for _ in range(threads)]
        self.causes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        self._pulse.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._pulse.__exit__(kind, error, trace)

    def _work(self) -> None:
        while not self._stop.is_set():
            with Timed(self._pulse) as timed:
                self._tier.save(self._rows, self._payloads, self._checksums, _deadline())
            self._judge("save", timed)
            with Timed(self._pulse) as timed:
                self._tier.match(self._rows, _deadline())
            self._judge("match", timed)
            destinations = [np.zeros_like(payload) for payload in self._payloads]
            with Timed(self._pulse) as timed:
                result = self._tier.load(self._rows, destinations, _deadline())
            self._judge("load", timed)
            for cause, mine, theirs in zip(result.causes, destinations, self._payloads, strict=True):
                self.causes[str(cause)] += 1
                if cause is None and not np.array_equal(mine, theirs):
                    self.wrong.append("a wrong byte")

    def _judge(self, call: str, timed: Timed) -> None:
        if timed.seconds > BUDGET_SECONDS + LATE_SECONDS:
            self.wrong.append(f"{call} took {timed.seconds:.3f} s")


def _deadline() -> float:
    return time.monotonic() + BUDGET_SECONDS
