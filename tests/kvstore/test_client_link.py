"""The state of the way to a server: who may call, what is counted, what is logged."""

from __future__ import annotations

import pytest

from kvstore.errors import KVStoreError, LeaseError
from kvstore.service.client.channel import StaleError
from kvstore.service.client.link import Link
from kvstore.service.client.options import CallError, Outcome, Silence
from tests.support.stores import FakeClock

AWAY = CallError(Outcome.UNREACHABLE, "nobody answers", Silence.AWAY)
LATE = CallError(Outcome.UNREACHABLE, "it takes too long", Silence.LATE)
FAILED = CallError(Outcome.UNREACHABLE, "an error of the server's", Silence.FAILED)
BARRED = CallError(Outcome.REJECTED, "the token is unknown")
FULL = CallError(Outcome.REFUSED, "too many leases")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def link(clock: FakeClock) -> Link:
    return Link("here", 5.0, clock)


def fail(link: Link, error: Exception) -> None:
    link.failed(error, probe=link.begin())


def test_a_server_that_did_not_answer_is_left_alone_and_then_tried_by_one(
    link: Link, clock: FakeClock
) -> None:
    fail(link, AWAY)
    clock.advance(4.9)
    with pytest.raises(CallError, match="nobody answers") as raised:
        link.begin()
    assert (raised.value.outcome, raised.value.silence) == (Outcome.UNREACHABLE, Silence.UNSENT)
    clock.advance(0.2)
    assert link.begin(), "this call is the one that tries"
    with pytest.raises(CallError):
        link.begin()
    link.failed(AWAY, probe=True)
    with pytest.raises(CallError):
        link.begin()
    clock.advance(5.1)
    assert link.begin()
    link.answered()
    assert not link.begin()
    assert link.failures == {Outcome.UNREACHABLE: 5}


def test_a_server_that_is_late_is_given_up_after_three_calls_in_a_row(link: Link, clock: FakeClock) -> None:
    """One slow call makes no others misses."""
    for error in (LATE, LATE, FULL, LATE, LATE):
        fail(link, error)
    assert not link.begin()
    link.answered()
    for _ in range(3):
        fail(link, LATE)
    with pytest.raises(CallError, match="it takes too long"):
        link.begin()
    clock.advance(5.1)
    link.failed(LATE, probe=link.begin())
    with pytest.raises(CallError, match="it takes too long"):
        link.begin()


def test_an_error_of_one_call_says_nothing_of_others(
    link: Link, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(9):
        fail(link, FAILED)
    assert not link.begin()
    link.answered()
    assert link.failures == {Outcome.UNREACHABLE: 9}
    assert not caplog.records
    fail(link, AWAY)
    clock.advance(5.1)
    link.failed(FAILED, probe=link.begin())
    assert link.begin(), "the next one may try"


def test_a_call_that_its_caller_gave_up_leaves_the_try_to_another(link: Link, clock: FakeClock) -> None:
    fail(link, AWAY)
    clock.advance(5.1)
    link.abandoned(probe=link.begin())
    assert link.begin()


@pytest.mark.parametrize("error", [BARRED, FULL, StaleError(LeaseError("over")), LeaseError("wrong")])
def test_a_server_that_answers_no_is_there(link: Link, error: Exception) -> None:
    fail(link, error)
    assert not link.begin()


def test_what_changes_is_logged_once(link: Link, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    for error in (AWAY, AWAY, BARRED, BARRED, FULL, FULL, AWAY):
        fail(link, error)
        clock.advance(5.1)
    link.begin()
    link.answered()
    link.answered()
    assert [record.getMessage() for record in caplog.records] == [
        "kvstore server here is unreachable: nobody answers",
        "kvstore server here is rejected: the token is unknown",
        "kvstore server here is unreachable: nobody answers",
        "kvstore server here answers again",
    ]
    assert link.failures == {Outcome.UNREACHABLE: 3, Outcome.REJECTED: 2, Outcome.REFUSED: 2}


def test_a_closed_client_makes_no_calls(link: Link) -> None:
    link.close()
    with pytest.raises(KVStoreError, match="is closed; make another"):
        link.begin()
