"""The last hour of every count and gauge, so that a page which is opened now can show what was before."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore.metrics import CollectorRegistry

SAMPLE_SECONDS = 5.0
SAMPLES_MAX = 720
"""One hour."""
SERIES_MAX = 512
"""With 720 samples of 8 bytes, 3 MB at most; a server with one Redis has some 60 series."""

_TYPES = ("counter", "gauge")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of /metrics without its value, all models together."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "labels": dict(self.labels)}


Values = Mapping[Series, float]


def read(registry: CollectorRegistry) -> Values:
    """What the counters and gauges of /metrics are now, summed over models; histograms are left out."""
    found: dict[Series, float] = {}
    for family in registry.collect():
        if family.type not in _TYPES:
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = tuple(sorted(pair for pair in sample.labels.items() if pair[0] != "model"))
                series = Series(sample.name, labels)
                found[series] = found.get(series, 0.0) + sample.value
    return found


@dataclass(frozen=True, slots=True)
class Past:
    """Samples, the oldest first. A row has a value for each of the first series, NaN where there was none."""

    ages_seconds: tuple[float, ...] = ()
    series: tuple[Series, ...] = ()
    rows: tuple[array[float], ...] = ()

    def column(self, at: int) -> list[float | None]:
        """The values of one series, None where it had none."""
        return [number(row[at]) if at < len(row) else None for row in self.rows]


class History:
    """Takes a sample now and then, and forgets the oldest: bounded in samples and in series. One owner."""

    def __init__(
        self, values: Callable[[], Values], clock: Callable[[], float], seconds: float = SAMPLE_SECONDS
    ) -> None:
        """``values`` reads what is kept, every ``seconds``; of series the first ``SERIES_MAX``."""
        self._seconds = seconds
        self._values = values
        self._clock = clock
        self._columns: dict[Series, int] = {}
        self._samples: deque[tuple[float, array[float]]] = deque(maxlen=SAMPLES_MAX)
        self._next: asyncio.Handle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take a sample when ``loop`` next runs, and then at its interval, also after one that failed."""
        self._next = loop.call_soon(self._tick, loop)

    def stop(self) -> None:
        """Take no more. Idempotent."""
        if self._next is not None:
            self._next.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = loop.call_later(self._seconds, self._tick, loop)
        self.take()

    def take(self) -> None:
        values = self._values()
        for series in values:
            if len(self._columns) < SERIES_MAX:
                self._columns.setdefault(series, len(self._columns))
        row = array("d", [math.nan]) * len(self._columns)
        for series, value in values.items():
            if series in self._columns:
                row[self._columns[series]] = value
        self._samples.append((self._clock(), row))

    def past(self) -> Past:
        """What is kept; later samples do not change it."""
        now = self._clock()
        return Past(
            tuple(now - taken for taken, _ in self._samples),
            tuple(self._columns),
            tuple(row for _, row in self._samples),
        )


def number(value: float) -> float | None:
    """For JSON, which has neither NaN nor infinity: None; whole numbers without a fraction."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value
