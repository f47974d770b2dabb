"""Settings of the whole suite: how hard Hypothesis tries, and whether a skip is a failure."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

SKIPPABLE_MARKERS = {"gpu"}
"""Markers whose tests may be skipped where skips are forbidden: the hardware is not everywhere."""

# No deadline per example: on a busy machine it measures the machine. --hypothesis-profile overrides.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, print_blob=True)
settings.register_profile("nightly", max_examples=20_000, deadline=None, print_blob=True)
settings.load_profile("dev")


class SkipGuard:
    """Fails the run when a test was skipped that could have run, and says which."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        expected_to_fail = hasattr(report, "wasxfail")
        if report.skipped and not expected_to_fail and SKIPPABLE_MARKERS.isdisjoint(report.keywords):
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skips that --forbid-skips does not allow", red=True)
            terminalreporter.write_line("\n".join(self.skipped))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forbid-skips",
        action="store_true",
        help=f"fail when a test is skipped that is not marked {' or '.join(sorted(SKIPPABLE_MARKERS))}",
    )


def pytest_configure(config: pytest.Config) -> None:
    # What a script runs in the background ignores it, and so would every process that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--forbid-skips"):
        config.pluginmanager.register(SkipGuard(), "skip-guard")
