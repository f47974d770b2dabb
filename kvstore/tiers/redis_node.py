"""One Redis server: its connections, and whether it is worth asking."""

from __future__ import annotations

import logging
import threading
from _thread import start_new_thread
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvstore.tiers.base import TierStatus
from kvstore.tiers.breaker import Breaker
from kvstore.tiers.redis_commands import memory_policy
from kvstore.tiers.redis_connection import ServerRefusedError, WiredConnection
from kvstore.tiers.redis_errors import ErrorLog
from kvstore.tiers.redis_wire import Clock, StreamError, Wire

logger = logging.getLogger(__name__)

_RENEW_SECONDS = 0.5
_CERTAIN_FAILURES = 3
"""As many as the breaker wants to see in a row."""
_AT_ONCE = float("-inf")


class Lane(Enum):
    """What a connection is for: look-ups have their own, so as not to queue behind payloads."""

    PROBE = "probe"
    BULK = "bulk"


class NodeDownError(ConnectionError):
    """The server was not asked: it is given up for now, or the tier is closed."""


class BusyError(TimeoutError):
    """No connection came free in time. Says nothing about the server."""


class NotReadyError(OSError):
    """No connection was free at once, and the caller did not want to wait for one."""


class ConnectError(ConnectionError):
    """A connection that this call waited for could not be made."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.kind = _error_kind(cause)


class Loan(NamedTuple):
    """A connection that is lent: ``end`` it with what went wrong, or None, exactly once."""

    wire: Wire
    end: Callable[[BaseException | None], None]


class _Slots:
    """The connections of one lane: at most ``limit`` of them idle, busy or being made."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.idle: list[WiredConnection] = []
        self.busy = 0
        self.connecting = 0
        self.failures = 0
        self.last_failure = OSError()


class Node:
    """Lends out connections to one server, and gives it up while it does not answer. Thread-safe.

    Connections are made on threads of their own: however long that takes, a borrower waits no
    longer than its deadline, and finds them made when it comes again.
    """

    def __init__(
        self,
        new_connection: Callable[[], WiredConnection],
        *,
        connections: Mapping[Lane, int],
        connect_timeout_seconds: float,
        clock: Clock,
        expected_errors: Set[str] = frozenset(),
    ) -> None:
        """``connections`` is the most of each lane; ``expected_errors`` as in ``ErrorLog``."""
        self._new_connection = new_connection
        self._connect_timeout = connect_timeout_seconds
        self._clock = clock
        self._place = new_connection().place
        self._lanes = {lane: _Slots(limit) for lane, limit in connections.items()}
        self._breaker = Breaker()
        self._errors = ErrorLog(self._place, clock, expected_errors)
        self._last_error = ""
        self._policy_known = False
        self._has_answered = False
        self._renewed_at = float("-inf")
        self._closed = False
        # Guards what is above; notified when somebody who waits may have to look again.
        self._changed = threading.Condition()

    def errors(self) -> Counter[str]:
        """What went wrong since the start, by kind: a closed set, only ever growing counts.

        Of an exchange: busy, timeout, connection, refused, protocol. Of one reply in it: the error's
        code in lower case, such as oom or noperm, or other.
        """
        return self._errors.counts()

    @property
    def place(self) -> str:
        """Where the server is, as it is logged."""
        return self._place

    @property
    def given_up(self) -> bool:
        """Whether calls fail at once, since the server did not answer."""
        with self._changed:
            return self._breaker.opened_at is not None

    @property
    def reached(self) -> bool:
        """Whether it has answered, and is not given up."""
        with self._changed:
            return self._has_answered and self._breaker.opened_at is None

    def reach(self, deadline: float) -> None:
        """Find out by new connections whether it answers, where it is not ``reached``: ``status`` then says.

        Ends by ``deadline``, also where that was too soon to tell.
        """
        for _ in range(_CERTAIN_FAILURES):
            if self.reached:
                return
            with self._changed:
                self._shut_idle()
            with suppress(OSError), self.borrow(Lane.PROBE, deadline):
                return

    def status(self) -> TierStatus:
        """Healthy while it answers, whatever it answers; then ``reason`` names its current errors."""
        with self._changed:
            if self._closed:
                return TierStatus(healthy=False, reason=f"redis {self._place}: closed")
            if self._breaker.opened_at is not None:
                seconds = self._clock() - self._breaker.opened_at
                reason = f"redis {self._place} has not answered for {seconds:.1f} s: {self._last_error}"
                return TierStatus(healthy=False, reason=reason)
        current = ", ".join(self._errors.current())
        return TierStatus(healthy=True, reason=current and f"redis {self._place} answers with {current}")

    @contextmanager
    def borrow(self, lane: Lane, deadline: float) -> Iterator[Wire]:
        """A wire in step with the server, for one exchange that ends by ``deadline``.

        Raises as ``lend`` does. An exception in the exchange closes the connection.
        """
        loan = self.lend(lane, deadline)
        error: BaseException | None = None
        try:
            yield loan.wire
        except BaseException as raised:
            error = raised
            raise
        finally:
            loan.end(error)

    def lend(self, lane: Lane, deadline: float, *, patient: bool = True) -> Loan:
        """The same, until whoever borrows ends the loan.

        Raises NodeDownError at once while the server is given up, else what went wrong with the
        connection, as an OSError. Without patience, NotReadyError when there is none at once; it is
        then being made, and nothing has gone wrong.
        """
        slots = self._lanes[lane]
        is_probe = self._admit(deadline)
        connection: WiredConnection | None = None
        try:
            connection = self._take(slots, deadline if patient else _AT_ONCE, is_probe=is_probe)
            connection.wire.begin(deadline)
        except BaseException as error:
            if not patient and isinstance(error, TimeoutError):
                self._give_back(slots, connection, intact=False, is_probe=is_probe)
                raise NotReadyError(f"redis {self._place}: no connection is free at once") from None
            self._end(slots, connection, error, is_probe=is_probe)
            raise
        return Loan(connection.wire, partial(self._end, slots, connection, is_probe=is_probe))

    def _end(
        self,
        slots: _Slots,
        connection: WiredConnection | None,
        error: BaseException | None,
        *,
        is_probe: bool,
    ) -> None:
        if error is None and connection is not None and connection.wire.replies:
            self._succeeded()
        elif isinstance(error, OSError):
            self._failed(error, connection, is_probe=is_probe)
        self._give_back(slots, connection, intact=error is None, is_probe=is_probe)

    def renew(self) -> bool:
        """Connect anew from now on, to whoever is found then; False when that was done a moment ago."""
        with self._changed:
            now = self._clock()
            if now - self._renewed_at < _RENEW_SECONDS:
                return False
            self._renewed_at = now
            self._shut_idle()
        return True

    def close(self) -> None:
        """Refuse everybody from now on; connections that are lent out are closed as they come back."""
        with self._changed:
            self._closed = True
            self._shut_idle()
            self._changed.notify_all()

    def _shut_idle(self) -> None:
        for slots in self._lanes.values():
            while slots.idle:
                slots.idle.pop().shut()

    def _admit(self, deadline: float) -> bool:
        """Whether this call is the breaker's probe."""
        with self._changed:
            now = self._clock()
            if now >= deadline:
                raise BusyError("the deadline had passed before the server was asked")
            if self._closed or not self._breaker.admits(now):
                raise NodeDownError(f"redis {self._place} is given up for now: {self._last_error}")
            return self._breaker.begin()

    def _take(self, slots: _Slots, deadline: float, *, is_probe: bool) -> WiredConnection:
        failures, started = slots.failures, False
        while True:
            with self._changed:
                connection = self._idle_one(slots, is_probe=is_probe)
                if connection is not None:
                    return connection
                if slots.failures != failures:
                    raise ConnectError(slots.last_failure)
                if started or slots.busy + slots.connecting >= slots.limit:
                    self._wait(slots, deadline)
                    started = False
                    continue
                slots.connecting += 1
            self._start_connecting(slots)
            started = True

    def _wait(self, slots: _Slots, deadline: float) -> None:
        left = deadline - self._clock()
        if left > 0:
            self._changed.wait(left)
        elif slots.connecting:
            raise TimeoutError("no connection in time")
        else:
            raise BusyError("all connections are busy")

    def _idle_one(self, slots: _Slots, *, is_probe: bool) -> WiredConnection | None:
        if self._closed or (self._breaker.opened_at is not None and not is_probe):
            raise NodeDownError(f"redis {self._place} was given up meanwhile: {self._last_error}")
        while slots.idle:
            connection = slots.idle.pop()
            if connection.wire.is_fit():
                slots.busy += 1
                return connection
            connection.shut()
        return None

    def _give_back(
        self, slots: _Slots, connection: WiredConnection | None, *, intact: bool, is_probe: bool
    ) -> None:
        # Whoever borrows the connection next starts another list.
        codes = [] if connection is None else connection.wire.error_codes
        with self._changed:
            # Nothing is left of the probe when its outcome has been recorded.
            self._breaker.abandon(probe=is_probe)
            if connection is not None:
                slots.busy -= 1
                if intact and not self._closed:
                    slots.idle.append(connection)
                else:
                    connection.shut()
            self._changed.notify_all()
        self._errors.add_replies(codes)

    def _start_connecting(self, slots: _Slots) -> None:
        """Have one more connection made; it is counted already."""
        try:
            # Unlike Thread.start it does not wait until the thread runs, for which there is no deadline.
            start_new_thread(self._connect_into, (slots, self._new_connection()))
        except RuntimeError as error:
            with self._changed:
                slots.connecting -= 1
            raise ConnectionError(f"no thread to connect on: {error}") from error

    def _connect_into(self, slots: _Slots, connection: WiredConnection) -> None:
        failure: OSError | None = ConnectionError("connecting ended by an unexpected exception, see the log")
        try:
            self._check_policy(connection.open(self._clock() + self._connect_timeout))
            self._succeeded()
            failure = None
        except OSError as error:
            failure = error
        finally:
            with self._changed:
                slots.connecting -= 1
                if failure is not None:
                    slots.failures += 1
                    slots.last_failure = failure
                if failure is None and not self._closed:
                    slots.idle.append(connection)
                else:
                    connection.shut()
                self._changed.notify_all()

    def _succeeded(self) -> None:
        with self._changed:
            recovered, self._has_answered = self._breaker.succeed(), True
        if recovered:
            logger.info("redis %s answers again", self._place)

    def _failed(self, error: OSError, connection: WiredConnection | None, *, is_probe: bool) -> None:
        if isinstance(error, NodeDownError):
            return
        self._errors.add(_error_kind(error))
        answers = connection is not None and connection.wire.replies > 0
        if isinstance(error, BusyError) or (isinstance(error, TimeoutError) and answers):
            # No fault of the server's, or it answers, only not all of this in time.
            return
        with self._changed:
            self._last_error = str(error)
            began = self._breaker.fail(self._clock(), probe=is_probe)
            if began:
                self._changed.notify_all()
        if began:
            logger.warning(
                "redis %s is given up (%s): until it answers again its blocks are misses and nothing is "
                "stored; check that it runs and that redis_url is right",
                self._place,
                error,
            )

    def _check_policy(self, wire: Wire) -> None:
        """Warn, once, of a server that will run out of memory; a server may refuse to say."""
        with self._changed:
            if self._policy_known:
                return
        settings = memory_policy(wire)
        with self._changed:
            first, self._policy_known = not self._policy_known, True
        if not first or settings is None:
            return
        if settings.get("maxmemory") == "0":
            logger.warning(
                "redis %s has no maxmemory: it will grow until the system stops it; set maxmemory, and "
                "maxmemory-policy allkeys-lru",
                self._place,
            )
        elif settings.get("maxmemory-policy") == "noeviction":
            logger.warning(
                "redis %s has maxmemory-policy noeviction: once it is full, nothing new is stored; set "
                "maxmemory-policy allkeys-lru",
                self._place,
            )


def _error_kind(error: OSError) -> str:
    """Under which name a failed exchange is counted."""
    if isinstance(error, ConnectError):
        return error.kind
    if isinstance(error, BusyError):
        return "busy"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, StreamError):
        return "protocol"
    return "refused" if isinstance(error, ServerRefusedError) else "connection"
