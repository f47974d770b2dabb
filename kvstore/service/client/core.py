"""What the parts of one client share."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from itertools import count

from kvstore.address import parse_address
from kvstore.block import MissCause
from kvstore.errors import ConfigError
from kvstore.service.client.calls import ABORT_WRITE, Steps, ask
from kvstore.service.client.channel import StaleError
from kvstore.service.client.leases import Leases
from kvstore.service.client.link import Link
from kvstore.service.client.options import CallError, ClientOptions, Clock
from kvstore.service.client.sessions import Session, Sessions
from kvstore.v1 import block_pb2


class Core:
    """A client apart from its transport. Safe for threads."""

    def __init__(self, address: str, options: ClientOptions, clock: Clock) -> None:
        self.options = options
        self.clock = clock
        self.link = Link(_checked(address), options.reconnect_seconds, clock)
        self.leases = Leases(clock, self.link.count)
        self.sessions = Sessions(options, self.leases.lose_all_of)
        self._lock = threading.Lock()
        self._shortened: Counter[MissCause] = Counter()
        # Several clients of one process may be one owner to the server only if their numbers agree,
        # but a name that is new everywhere is easier to find in logs.
        self._request_prefix = secrets.token_hex(4)
        self._requests = count(1)
        self._owed: deque[tuple[Session, int]] = deque()
        self._closing = False

    @property
    def shortened(self) -> dict[MissCause, int]:
        """How many runs turned out to be shorter than the server had promised, by cause."""
        with self._lock:
            return dict(self._shortened)

    def count_shortened(self, cause: MissCause) -> None:
        with self._lock:
            self._shortened[cause] += 1

    def request_id(self) -> str:
        """A name for a request that has none."""
        return f"{self._request_prefix}-{next(self._requests)}"

    @property
    def period_seconds(self) -> float:
        """How long to wait from one ``renew`` to the next."""
        return self.leases.period_seconds(self.sessions.current)

    def renew(self) -> Steps[None]:
        """Keep all leases, and say what is still to be said."""
        yield from self.leases.renew(self.sessions.end, self.options.rpc_seconds)
        yield from self.leases.release_forgotten(self.options.rpc_seconds)
        yield from self.settle()

    def owe(self, session: Session, write_id: int) -> None:
        """A write is over, and the server is still to hear that nothing will be written any more.

        Until it does, the slots of a client that maps the pool are out of use.
        """
        self._owed.append((session, write_id))

    @property
    def may_owe(self) -> bool:
        """Whether somebody has to ``renew``, if only to tell of writes: a server may have begun some."""
        return self.sessions.current is not None

    def settle(self) -> Steps[None]:
        """Tell the server of all writes that are over; what does not reach it stays owed."""
        while self._owed:
            try:
                session, write_id = self._owed.popleft()
            except IndexError:  # another thread had it
                return
            told = False
            try:
                told = session is not self.sessions.current or (yield from self._abort(session, write_id))
            finally:
                if not told:
                    self._owed.append((session, write_id))
            if not told:
                return

    def _abort(self, session: Session, write_id: int) -> Steps[bool]:
        request = block_pb2.AbortWriteRequest(client=session.number, epoch=session.epoch, write_id=write_id)
        try:
            yield from ask(ABORT_WRITE, request, self.options.rpc_seconds)
        except StaleError:
            self.sessions.end(session)  # a server that restarted waits for the old mapping to go
            return True
        except CallError:
            return False
        return True

    def begin_close(self) -> bool:
        """Whether closing is now the caller's to do: once, and never in a forked child."""
        with self._lock:
            fresh, self._closing = not self._closing, True
        return fresh and not self.link.foreign

    def release_all(self) -> Steps[None]:
        """End every lease, as long as the server answers."""
        yield from self.settle()
        yield from self.leases.release_forgotten(self.options.rpc_seconds)
        for kept in self.leases.live():
            try:
                yield from self.leases.release(kept, kept.use, self.options.rpc_seconds)
            except (StaleError, CallError):
                return

    def finish_close(self) -> None:
        """No call begins any more, and the mapping is let go of."""
        self.link.close()
        self.sessions.close()


def _checked(address: str) -> str:
    """The address as gRPC takes it; gRPC itself would look for a mistyped one for ever."""
    try:
        return str(parse_address(address))
    except ValueError as error:
        raise ConfigError(f"the server's address: {error}") from error
