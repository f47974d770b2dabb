from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.tiers.breaker import Breaker


def opened(at: float = 10.0) -> Breaker:
    breaker = Breaker(threshold=3, first_backoff_seconds=0.5, longest_backoff_seconds=10.0)
    for _ in range(3):
        breaker.fail(at, probe=breaker.begin())
    return breaker


def test_opens_at_the_third_failure_in_a_row_and_says_so_once() -> None:
    breaker = Breaker(threshold=3)
    began = [breaker.fail(now, probe=breaker.begin()) for now in (1.0, 2.0)]
    assert breaker.succeed() is False
    began += [breaker.fail(now, probe=breaker.begin()) for now in (3.0, 4.0, 5.0)]
    assert began == [False, False, False, False, True]
    assert breaker.opened_at == 5.0


def test_while_open_one_probe_is_let_through_after_each_back_off_which_doubles() -> None:
    breaker, now = opened(at=10.0), 10.0
    for wait in (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        assert not breaker.admits(now + wait - 0.01)
        now += wait
        assert breaker.admits(now)
        assert breaker.begin() is True
        assert not breaker.admits(now + 1000), "a second call while the probe is out"
        assert breaker.fail(now, probe=True) is False


def test_a_probe_that_succeeds_closes_it_and_resets_the_back_off() -> None:
    breaker = opened(at=0.0)
    breaker.fail(0.5, probe=breaker.begin())
    breaker.begin()
    assert breaker.succeed() is True
    assert breaker.opened_at is None
    assert breaker.admits(0.5)
    for _ in range(3):
        breaker.fail(1.0, probe=breaker.begin())
    assert not breaker.admits(1.49)
    assert breaker.admits(1.5)


def test_an_abandoned_probe_is_up_for_another_caller_at_once() -> None:
    breaker = opened(at=0.0)
    breaker.abandon(probe=breaker.begin())
    assert breaker.admits(0.5)


def test_a_call_from_before_the_outage_neither_prolongs_it_nor_ends_the_probe() -> None:
    breaker = Breaker(threshold=1)
    late = breaker.begin()
    breaker.fail(0.0, probe=breaker.begin())
    assert breaker.begin() is True
    breaker.fail(0.4, probe=late)
    assert not breaker.admits(1000.0), "the probe is still out"
    breaker.abandon(probe=True)
    assert breaker.admits(0.5)


class Calls(RuleBasedStateMachine):
    """Any mix of calls: never two probes at once, and no way to be locked out for good."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = 0.0
        self.calls: list[bool] = []

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.admits(self.now))
    @rule()
    def begin(self) -> None:
        self.calls.append(self.breaker.begin())

    @precondition(lambda self: self.calls)
    @rule(outcome=st.sampled_from(["succeed", "fail", "abandon"]))
    def end(self, outcome: str) -> None:
        probe = self.calls.pop(0)
        if outcome == "succeed":
            self.breaker.succeed()
        elif outcome == "fail":
            self.breaker.fail(self.now, probe=probe)
        else:
            self.breaker.abandon(probe=probe)

    @invariant()
    def never_locked_out(self) -> None:
        assert self.breaker.admits(self.now + 10.0) or any(self.calls)


TestCalls = Calls.TestCase
