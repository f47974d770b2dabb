"""Whether there is a server to talk to: fails fast while there is none, counts, and says so once."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter

from kvstore.errors import KVStoreError
from kvstore.service.client.options import CallError, Clock, Outcome, Silence
from kvstore.tiers.breaker import Breaker

_log = logging.getLogger(__name__)
_LATE_CALLS = 3
"""Deadlines that pass in a row before the server is given up: one call may be slow for its own reasons."""


class Link:
    """The state of the way to one server. Safe for threads.

    A server that is away, or late several times in a row, is given up: calls fail at once for
    ``reconnect_seconds``, and then one at a time may try. A call is ``begin`` and then one of
    ``answered``, ``failed`` and ``abandoned``.
    """

    def __init__(self, address: str, reconnect_seconds: float, clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self._lock = threading.Lock()
        self._breaker = Breaker(
            threshold=1, first_backoff_seconds=reconnect_seconds, longest_backoff_seconds=reconnect_seconds
        )
        self._failures: Counter[Outcome] = Counter()
        self._state = Outcome.OK
        self._reason = ""
        self._late = 0
        self._closed = False
        self._process = os.getpid()

    @property
    def failures(self) -> dict[Outcome, int]:
        """Calls that came to nothing since the start, by outcome; those that failed at once included."""
        with self._lock:
            return dict(self._failures)

    @property
    def state(self) -> tuple[Outcome, str]:
        """OK, or why no call comes to anything, as far as the last ones say."""
        with self._lock:
            return self._state, "" if self._state is Outcome.OK else self._reason

    def count(self, outcome: Outcome) -> None:
        with self._lock:
            self._failures[outcome] += 1

    def close(self) -> bool:
        """No call begins any more; False where that was so already."""
        with self._lock:
            fresh, self._closed = not self._closed, True
            return fresh

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that made the client."""
        return os.getpid() != self._process

    def begin(self) -> bool:
        """A call is about to be made; True if it is the one that tries after an outage.

        CallError while the server is given up. KVStoreError where the client is closed, or belongs
        to the process that this one was forked from: gRPC does not work across a fork.
        """
        if self.foreign:
            raise KVStoreError(
                f"the client of {self.address} was made in process {self._process} and is used in "
                f"{os.getpid()}; make a client after the fork"
            )
        with self._lock:
            if self._closed:
                raise KVStoreError(f"the client of {self.address} is closed; make another")
            if not self._breaker.admits(self._clock()):
                self._failures[Outcome.UNREACHABLE] += 1
                raise CallError(Outcome.UNREACHABLE, self._reason, Silence.UNSENT)
            return self._breaker.begin()

    def answered(self) -> None:
        """The server answered, even if only to say what is wrong with the request."""
        with self._lock:
            self._breaker.succeed()
            self._late = 0
            known, self._state = self._state, Outcome.OK
        if known is not Outcome.OK:
            _log.warning("kvstore server %s answers again", self.address)

    def failed(self, error: Exception, *, probe: bool) -> None:
        """A call ended with ``error``."""
        if not isinstance(error, CallError) or error.outcome is Outcome.LOST:
            self.answered()
            return
        with self._lock:
            self._failures[error.outcome] += 1
            if error.outcome is not Outcome.UNREACHABLE:
                self._breaker.succeed()
                self._late = 0
                # A limit is about this request, credentials are about all of them.
                concerns_all = error.outcome is Outcome.REJECTED
            else:
                concerns_all = self._gives_up(error, probe=probe)
            changed = concerns_all and error.outcome is not self._state
            if changed:
                self._state, self._reason = error.outcome, str(error)
        if changed:
            _log.warning("kvstore server %s is %s: %s", self.address, error.outcome, error)

    def _gives_up(self, error: CallError, *, probe: bool) -> bool:
        """Whether a call without an answer is a sign that others would have none either."""
        self._late += error.silence is Silence.LATE
        late = error.silence is Silence.LATE and (probe or self._late >= _LATE_CALLS)
        if not late and error.silence is not Silence.AWAY:
            self._breaker.abandon(probe=probe)
            return False
        self._breaker.fail(self._clock(), probe=probe)
        self._reason = str(error)
        return True

    def abandoned(self, *, probe: bool) -> None:
        """A call was given up by its caller before it ended, which says nothing of the server."""
        with self._lock:
            self._breaker.abandon(probe=probe)
