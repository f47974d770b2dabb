"""What goes wrong with one server: counted, named in its status, and logged without flooding the log."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence, Set

from kvstore.tiers.redis_wire import Clock

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""An error reply is current until it has not been seen for so long; then it is news again."""

_SEE_LOG = "the server's own log may say why"
_IN_A_CLUSTER = "it is one node of a Redis Cluster: write redis+cluster:// in redis_url"

# Error codes that have a kind of their own, and what to do about them. The kinds are labels of a
# metric, hence a closed set: all other codes are counted together.
_ADVICE = {
    "ASK": _IN_A_CLUSTER,
    "CLUSTERDOWN": "its cluster has slots that no node serves: start the nodes that have them; set "
    "cluster-require-full-coverage no to use the others meanwhile",
    "CROSSSLOT": _IN_A_CLUSTER,
    "ERR": _SEE_LOG,
    "LOADING": "it is reading its data from disk and serves when that is done",
    "MASTERDOWN": "it is a replica that lost its primary: name the primary in redis_url",
    "MISCONF": "it cannot save to disk and refuses writes: free its disk, or turn saving off (save '')",
    "MOVED": _IN_A_CLUSTER,
    "NOAUTH": "it asks for a password: put user and password into redis_url",
    "NOPERM": "allow the user get, set, exists, pttl, pexpire and unlink on the keys of redis_prefix, in a "
    "cluster also asking and cluster|slots",
    "NOREPLICAS": "it has fewer replicas than min-replicas-to-write: start them, or lower that",
    "OOM": "it is full: set maxmemory-policy allkeys-lru, or raise maxmemory",
    "READONLY": "it is a replica: name the primary in redis_url",
    "TRYAGAIN": _IN_A_CLUSTER,
    "WRONGTYPE": "another program writes under the same keys: use a redis_prefix of its own",
}
_OTHER = "other"
_MOST_CODE_CHARACTERS = 32


class ErrorLog:
    """Thread-safe. ``place`` is what to call the server in a message.

    Error replies with the codes ``expected`` are counted and never news.
    """

    def __init__(self, place: str, clock: Clock, expected: Set[str] = frozenset()) -> None:
        self._place = place
        self._clock = clock
        self._expected = expected
        self._counts: Counter[str] = Counter()
        self._seen_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def counts(self) -> Counter[str]:
        """Errors since the start, by kind."""
        with self._lock:
            return self._counts.copy()

    def add(self, kind: str) -> None:
        """Count an exchange that failed."""
        with self._lock:
            self._counts[kind] += 1

    def add_replies(self, codes: Sequence[str]) -> None:
        """Count error replies by their codes, and warn of each kind that is news."""
        if not codes:
            return
        news: dict[str, str] = {}
        with self._lock:
            now = self._clock()
            for code in codes:
                kind = code.lower() if code in _ADVICE else _OTHER
                self._counts[kind] += 1
                if code in self._expected:
                    continue
                if not self._is_current(kind, now):
                    news[kind] = code
                self._seen_at[kind] = now
        for code in news.values():
            logger.warning(
                "redis %s answers with the error %s: what it refuses is a miss, or not stored; %s",
                self._place,
                code[:_MOST_CODE_CHARACTERS],
                _ADVICE.get(code, _SEE_LOG),
            )

    def current(self) -> list[str]:
        """Kinds of the error replies seen in the last ``QUIET_SECONDS``, the latest first."""
        with self._lock:
            now = self._clock()
            kinds = [kind for kind in self._seen_at if self._is_current(kind, now)]
            return sorted(kinds, key=self._seen_at.__getitem__, reverse=True)

    def _is_current(self, kind: str, now: float) -> bool:
        return kind in self._seen_at and now - self._seen_at[kind] < QUIET_SECONDS
