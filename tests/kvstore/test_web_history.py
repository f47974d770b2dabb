"""What the live page is drawn from: the counts of /metrics, the last hour of them, and no more than that."""

from __future__ import annotations

import asyncio
import json
import math

from kvstore.block import MissCause, TierName
from kvstore.events import RequestSettled
from kvstore.metrics import CollectorRegistry, Metrics
from kvstore.web.history import SAMPLES_MAX, SERIES_MAX, History, Past, Series, Values, read
from kvstore.web.live import past_json

ASKED = Series("kvstore_asked_tokens_total", ())


def settled(hit: int, cold: int) -> RequestSettled:
    return RequestSettled(
        time=0.0,
        namespace=b"n" * 16,
        asked_tokens=hit + cold,
        hit_tokens={TierName.HOST: hit},
        miss_tokens={MissCause.COLD: cold},
        tier_asked={TierName.HOST: hit + cold},
    )


class Book:
    """Values that a test sets, and a clock that it moves."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}
        self.now = 0.0

    def read(self) -> Values:
        return dict(self.values)

    def history(self) -> History:
        return History(self.read, lambda: self.now)


def test_values_are_those_of_the_registry_summed_over_models() -> None:
    registry = CollectorRegistry()
    models = iter(["a", "b"])
    metrics = Metrics(registry, lambda _namespace: next(models))
    metrics(settled(32, 16))
    metrics(settled(1, 2))
    values = read(registry)
    assert values[ASKED] == 51
    assert values[Series("kvstore_hit_tokens_total", (("tier", "host"),))] == 33
    assert values[Series("kvstore_miss_tokens_total", (("cause", "cold"),))] == 18
    assert {
        series.name for series in values if series.name.endswith(("_created", "_bucket", "_sum"))
    } == set()


def test_the_oldest_sample_goes_first() -> None:
    book = Book()
    history = book.history()
    for second in range(SAMPLES_MAX + 3):
        book.now, book.values[ASKED] = float(second), float(second)
        history.take()
    book.now += 2.0
    past = history.past()
    assert len(past.rows) == SAMPLES_MAX
    assert (past.ages_seconds[0], past.ages_seconds[-1]) == (SAMPLES_MAX + 1, 2.0)
    assert past.column(0) == list(range(3, SAMPLES_MAX + 3))


def test_series_are_bounded() -> None:
    """Labels are bounded too; should one not be, memory still is."""
    book = Book()
    book.values = {Series("kvstore_refused_requests_total", (("limit", str(n)),)): 1.0 for n in range(9999)}
    history = book.history()
    history.take()
    assert len(history.past().series) == SERIES_MAX
    assert [len(row) for row in history.past().rows] == [SERIES_MAX]


def test_what_was_not_there_yet_is_unknown_and_not_zero() -> None:
    book = Book()
    history = book.history()
    history.take()
    book.values[ASKED] = 0.0
    history.take()
    book.values = {}
    history.take()
    assert history.past().column(0) == [None, 0, None]


def test_what_was_taken_out_does_not_change() -> None:
    book = Book()
    history = book.history()
    book.values[ASKED] = 1.0
    history.take()
    before = history.past()
    history.take()
    assert (len(before.rows), before.column(0)) == (1, [1])


def test_json_has_every_value_in_its_place() -> None:
    book = Book()
    history = book.history()
    for value in (1.0, math.nan, 2.5):
        book.now += 5.0
        book.values[ASKED] = value
        history.take()
    assert json.loads(past_json("i", history.past())) == {
        "instance": "i",
        "ages_seconds": [10.0, 5.0, 0.0],
        "series": [{"name": "kvstore_asked_tokens_total", "labels": {}, "values": [1, None, 2.5]}],
    }
    assert json.loads(past_json("i", Past()))["series"] == []


def test_it_goes_on_after_a_sample_that_failed() -> None:
    """The failure is reported by the loop, once a sample."""
    reported: list[object] = []
    taken = 0

    def flaky() -> Values:
        nonlocal taken
        taken += 1
        if taken == 1:
            raise ZeroDivisionError("a bug")
        return {ASKED: float(taken)}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
        history = History(flaky, loop.time, seconds=0.001)
        history.start(loop)
        while taken < 3:
            await asyncio.sleep(0.001)
        history.stop()
        stopped = taken
        await asyncio.sleep(0.01)
        assert taken == stopped
        assert history.past().column(0)[:2] == [2, 3]

    asyncio.run(asyncio.wait_for(main(), 30))
    assert [type(error) for error in reported] == [ZeroDivisionError]
