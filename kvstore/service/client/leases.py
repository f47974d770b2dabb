"""The leases that a client holds, and how they are kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple
from weakref import WeakValueDictionary

from kvstore.errors import KVStoreError
from kvstore.hints import Hints
from kvstore.service.client.calls import RELEASE, RENEW, Steps, ask
from kvstore.service.client.channel import StaleError
from kvstore.service.client.messages import hints_message
from kvstore.service.client.options import CallError, Clock, Outcome
from kvstore.service.client.sessions import Session
from kvstore.v1 import block_pb2

_RENEWALS_PER_LEASE = 3
_IDLE_SECONDS = 1.0


class Use(NamedTuple):
    """What a release says of a run: leading ``blocks`` were valid and used.

    ``compared`` of them had their checksums compared here, or needed it no more. A client that
    streams has nothing to say of that. ``hints`` None lets those of the acquire stand.
    """

    blocks: int
    compared: int
    hints: Hints | None = None


class _Forgotten(NamedTuple):
    """A lease that nobody can release any more."""

    session: Session
    lease_id: int
    use: Use


@dataclass(slots=True, eq=False, weakref_slot=True)
class Kept:
    """One lease at the server, whoever has handles to it.

    ``use`` is what is said of it where no holder says more. ``kept_until`` is when it runs out at the
    earliest, if nobody renews it, on the client's clock. Unreleased and out of reach, it puts itself
    on ``forgotten``.
    """

    session: Session
    lease_id: int
    use: Use
    kept_until: float
    forgotten: deque[_Forgotten] = field(repr=False)
    lost: bool = False
    released: bool = False

    @property
    def live(self) -> bool:
        return not self.lost and not self.released

    def __del__(self) -> None:
        if self.live:
            self.forgotten.append(_Forgotten(self.session, self.lease_id, self.use))


class Leases:
    """All leases that somebody can still use. Safe for threads.

    One whose last handle is gone unreleased is released when the others are renewed.
    """

    def __init__(self, clock: Clock, count: Callable[[Outcome], None]) -> None:
        self._clock = clock
        self._count = count
        self._lock = threading.Lock()
        self._forgotten: deque[_Forgotten] = deque()
        self._kept: WeakValueDictionary[tuple[int, int, int], Kept] = WeakValueDictionary()

    def keep(self, session: Session, lease_id: int, use: Use, granted_at: float) -> Kept:
        """Renew a lease from now on; one that was granted again is the same."""
        key = (session.epoch, session.number, lease_id)
        until = granted_at + session.lease_seconds
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or not kept.live:
                kept = self._kept[key] = Kept(session, lease_id, use, until, self._forgotten)
            kept.use, kept.kept_until = use, max(kept.kept_until, until)
            return kept

    def live(self) -> list[Kept]:
        with self._lock:
            return [kept for kept in self._kept.values() if kept.live]

    def release(self, kept: Kept, use: Use, seconds: float) -> Steps[None]:
        """End a lease. Raises StaleError, and CallError: it is then tried again with the forgotten ones."""
        with self._lock:
            first, kept.released = kept.live, True
        if first:
            try:
                yield from _release(kept.session, kept.lease_id, use, seconds)
            except CallError:
                self._forgotten.append(_Forgotten(kept.session, kept.lease_id, use))
                raise

    def release_forgotten(self, seconds: float) -> Steps[None]:
        """End the leases that nobody can release any more, as long as the server answers."""
        while self._forgotten:
            try:
                lease = self._forgotten.popleft()
            except IndexError:  # another thread had it
                return
            if not lease.session.current:
                continue  # it ended with its server
            try:
                yield from _release(lease.session, lease.lease_id, lease.use, seconds)
            except StaleError:
                continue
            except CallError:
                return  # they run out by themselves

    def renew(self, end: Callable[[Session], None], seconds: float) -> Steps[None]:
        """Keep all live leases, in one call; those that are over are lost afterwards.

        ``end`` is called with a session whose server is another by now.
        """
        for session, group in groupby(sorted(self.live(), key=_session_of), key=lambda kept: kept.session):
            leases = list(group)
            asked_at = self._clock()
            request = block_pb2.RenewRequest(
                client=session.number, epoch=session.epoch, lease_ids=[kept.lease_id for kept in leases]
            )
            try:
                answer = yield from ask(RENEW, request, seconds)
            except StaleError:
                end(session)
            except KVStoreError:
                # Counted where it was noticed. Nobody knows of these leases any more than the clock.
                self.lose(kept for kept in leases if self._clock() > kept.kept_until)
            else:
                gone = set(answer.lost_lease_ids)
                self.lose([kept for kept in leases if kept.lease_id in gone])
                for kept in leases:
                    kept.kept_until = asked_at + session.lease_seconds

    def lose(self, leases: Iterable[Kept]) -> None:
        """These are over, whatever their holders thought."""
        with self._lock:
            lost = [kept for kept in leases if kept.live]
            for kept in lost:
                kept.lost = True
        for _ in lost:
            self._count(Outcome.LOST)

    def lose_all_of(self, session: Session) -> None:
        self.lose([kept for kept in self.live() if kept.session is session])

    def period_seconds(self, session: Session | None) -> float:
        """How long to wait from one renewal to the next: what ``session`` may lease must not run out."""
        live = [kept.session.lease_seconds for kept in self.live()]
        if live:
            return min(live) / _RENEWALS_PER_LEASE
        return (
            _IDLE_SECONDS
            if session is None
            else min(_IDLE_SECONDS, session.lease_seconds / _RENEWALS_PER_LEASE)
        )


def _release(session: Session, lease_id: int, use: Use, seconds: float) -> Steps[None]:
    request = block_pb2.ReleaseRequest(
        client=session.number,
        epoch=session.epoch,
        lease_id=lease_id,
        used_blocks=use.blocks,
        compared_blocks=use.compared,
        hints=hints_message(use.hints),
    )
    yield from ask(RELEASE, request, seconds)


def _session_of(kept: Kept) -> tuple[int, int]:
    return kept.session.epoch, kept.session.number
