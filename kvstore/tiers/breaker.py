"""When to stop asking a server that does not answer, and when to try again."""

from __future__ import annotations


class Breaker:
    """Circuit breaker of one server. Pure: the caller passes the time, in seconds, and locks.

    It opens after ``threshold`` failures in a row. While it is open nothing is let through, except
    that after a back-off, which doubles with every failed probe, one call may try.
    """

    def __init__(
        self,
        *,
        threshold: int = 3,
        first_backoff_seconds: float = 0.5,
        longest_backoff_seconds: float = 10.0,
    ) -> None:
        self._threshold = threshold
        self._first_backoff = first_backoff_seconds
        self._longest_backoff = longest_backoff_seconds
        self._failures = 0
        self._backoff = first_backoff_seconds
        self._retry_at = 0.0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def opened_at(self) -> float | None:
        """Since when the server has been given up; None while it is trusted."""
        return self._opened_at

    def admits(self, now: float) -> bool:
        """Whether ``begin`` may be called now."""
        return self._opened_at is None or (not self._probing and now >= self._retry_at)

    def begin(self) -> bool:
        """A call starts; True if it is the probe. It ends in one of ``succeed``, ``fail``, ``abandon``."""
        self._probing = self._opened_at is not None
        return self._probing

    def succeed(self) -> bool:
        """The server answered; True if that ended an outage."""
        recovered = self._opened_at is not None
        self._failures = 0
        self._backoff = self._first_backoff
        self._opened_at = None
        self._probing = False
        return recovered

    def fail(self, now: float, *, probe: bool) -> bool:
        """The server did not answer; True if that began an outage.

        A call from before the outage may fail during it: that says nothing new.
        """
        if self._opened_at is None:
            self._failures += 1
            if self._failures < self._threshold:
                return False
            self._opened_at = now
            self._retry_at = now + self._backoff
            return True
        if probe:
            self._probing = False
            self._backoff = min(2 * self._backoff, self._longest_backoff)
            self._retry_at = now + self._backoff
        return False

    def abandon(self, *, probe: bool) -> None:
        """The call never reached the server: a probe is up for another caller."""
        if probe:
            self._probing = False
