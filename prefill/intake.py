"""Requests that have no memory yet: those that wait, and a few that hold a lease and want room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hashing import Root
from kvstore.block import HASH_BYTES, TierName
from kvstore.errors import KVStoreError, PoolError
from kvstore.store import TieredStore
from prefill.admission import Admission
from prefill.scheduler import Candidate, Scheduler
from prefill.track import Track

ADMISSIONS_MAX = 4
"""Requests that hold a lease and wait for redis: they do so beside each other."""

_LOOK_UP_SECONDS = 0.25
# Of the oldest so many the policy chooses: a long queue costs a step no more than a short one.
_ORDERED_MAX = 64
_LOCAL = (TierName.DEVICE, TierName.HOST)


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests get their memory: ``block_bytes`` of payload each, in the store's fastest tier.

    ``owner`` tells apart the leases of engines that share a store. ``redis_seconds`` bounds what a
    request waits for blocks from redis.
    """

    store: TieredStore
    root: Root
    block_bytes: int
    owner: str
    redis_seconds: float


class Intake:
    """Waiting requests, in the order of arrival, and the few that are being let in.

    At the front of those is whoever has waited for room longest; nobody passes it, so a request that
    needs much room gets it. A request whose next block is being computed for another one waits
    until it is published: that is looked at anew every time, so it waits for nobody who is gone.
    """

    def __init__(self, place: Place, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._place = place
        self._store = place.store
        self._scheduler = scheduler
        self._clock = clock
        self._waiting: dict[str, Track] = {}
        self._admissions: list[Admission] = []
        self._cached: dict[str, int] = {}
        self._look_up_at = clock()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._admissions)

    @property
    def names(self) -> list[str]:
        return [*self._waiting, *(each.track.name for each in self._admissions)]

    @property
    def tokens(self) -> int:
        """Known tokens of all who are here, an upper bound of what is to be computed for them."""
        tracks = [*self._waiting.values(), *(each.track for each in self._admissions)]
        return sum(len(track.tokens) for track in tracks)

    def add(self, track: Track) -> None:
        """A request that is new, or that has lost its memory."""
        self._waiting[track.name] = track

    def find(self, request_id: str) -> Track | None:
        """The request of that name, if it is here."""
        admitted = (each.track for each in self._admissions if each.track.name == request_id)
        return self._waiting.get(request_id) or next(admitted, None)

    def remove(self, request_id: str) -> None:
        """Forget a request. Idempotent."""
        self._waiting.pop(request_id, None)
        for admission in [each for each in self._admissions if each.track.name == request_id]:
            self._admissions.remove(admission)
            admission.close()

    def keep_leases(self, renew_before: float) -> None:
        """Renew leases that end before then; who lost its lease waits again."""
        if self._clock() >= self._look_up_at:
            self._cached.clear()
            self._look_up_at = self._clock() + _LOOK_UP_SECONDS
        for admission in list(self._admissions):
            if admission.lease.over:
                self._put_back(admission)
            elif admission.lease.deadline < renew_before:
                self._store.renew(admission.lease)

    def next(self, running: Collection[Track], *, alone: bool) -> Track | None:
        """The next request, with its memory or the reason why it has ``failed``; None while there is none.

        ``running`` are those with memory. ``alone`` says that nobody will give memory back.
        """
        while True:
            admission = self._settled()
            if admission is None:
                track = self._first(running)
                if track is None or len(self._admissions) >= ADMISSIONS_MAX:
                    return None
                self._open(track)
            elif admission.lease.over or follows(admission.track, running, self._place.root):
                self._put_back(admission)
            else:
                return self._start(admission, running, alone=alone)

    def _settled(self) -> Admission | None:
        """The first that waits for redis no more."""
        now = self._clock()
        for admission in self._admissions:
            if not admission.lease.pending or admission.redis_until <= now:
                return admission
        return None

    def _first(self, running: Collection[Track]) -> Track | None:
        """The first of those who wait that nobody is computing blocks for."""
        by_number = sorted(self._waiting.values(), key=lambda track: track.number)[:_ORDERED_MAX]
        now = self._clock()
        waiting = [
            Candidate(each.name, each.number, now - each.queued, self._cached_tokens(each))
            for each in by_number
        ]
        ordered = (self._waiting[name] for name in self._scheduler.order(waiting))
        return next((each for each in ordered if not follows(each, running, self._place.root)), None)

    def _cached_tokens(self, track: Track) -> int:
        """Tokens of a request in this machine's memory, looked up now and then where the policy asks."""
        if not self._scheduler.asks_cache:
            return 0
        if track.name not in self._cached:
            chain = track.chain(self._place.root)
            self._cached[track.name] = self._store.lookup(chain, tiers=_LOCAL).matched
        return self._cached[track.name]

    def _open(self, track: Track) -> None:
        """Lease what is cached; redis begins to bring its part."""
        chain, owner = track.chain(self._place.root), self._place.owner
        if track.started is None:
            lease = self._store.acquire(track.name, chain, owner=owner)
        else:
            # It is back from a preemption, and has been counted.
            lease = self._store.acquire_uncounted((owner, track.name), chain)
        del self._waiting[track.name]
        until = self._clock() + self._place.redis_seconds
        self._admissions.append(Admission(self._store, track, lease, until))

    def _put_back(self, admission: Admission) -> None:
        self._admissions.remove(admission)
        admission.put_back()
        self.add(admission.track)

    def _start(self, admission: Admission, running: Collection[Track], *, alone: bool) -> Track | None:
        track, now = admission.track, self._clock()
        try:
            sequence = None
            if admission.fits(self._scheduler.spare_blocks(len(running)), self._place.block_bytes):
                sequence = admission.start()
            if sequence is None:
                if not alone or not self._store.idle:
                    return None
                if len(self._admissions) > 1:
                    # They hold what this one needs, and would wait for it in turn.
                    for other in [each for each in self._admissions if each is not admission]:
                        self._put_back(other)
                    return self._start(admission, running, alone=alone)
                raise PoolError(
                    f"no room on the device for the {len(track.tokens)} tokens of request {track.name!r}, "
                    "and nothing here that will make room; try again later, or raise device_bytes"
                )
        except (KVStoreError, RuntimeError) as error:
            track.failed = error
            self._admissions.remove(admission)
            admission.close()
            return track
        self._admissions.remove(admission)
        track.start(sequence, now)
        return track


def follows(track: Track, running: Iterable[Track], root: Root) -> bool:
    """Whether somebody computes and will publish the first block that ``track`` would compute too.

    The chain of who decodes is all published, and who stores nothing has none.
    """
    chain = track.chain(root)
    for other in running:
        theirs, block = other.blocks_held.chain, other.blocks_held.published
        # A hash names the whole prefix: where one is the same, all before it are.
        if block < min(len(chain), len(theirs)):
            at = slice(block * HASH_BYTES, (block + 1) * HASH_BYTES)
            if chain.hashes[at] == theirs.hashes[at]:
                return True
    return False
