"""Why a block is in no tier: what has left is remembered by digest, in fixed memory.

A listener, fed by what leaves the memory tiers and by what redis is given. Digests are 8 bytes of a
block's hash, mixed with its namespace, in sets of eight: a lookup of n blocks is a few array operations.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import MissCause, TierName, Uint32Array, Uint64Array
from kvstore.events import BlocksRemoved, BlocksStored, Event, RemovalCause
from kvstore.table import hash_words

Flags = NDArray[np.bool_]

_WAYS = 8
_ENTRY_BYTES = 12
_BYTES_MIN = 256 << 10
_BYTES_MAX = 64 << 20
_POOL_SHARE = 64
_WINDOW = 32
_GROWTH = 8

_CAUSES = (MissCause.UNKNOWN, MissCause.EVICTED, MissCause.EXPIRED, MissCause.CORRUPT, MissCause.COLD)
_UNKNOWN, _EVICTED, _EXPIRED, _CORRUPT, _COLD = range(len(_CAUSES))
_PERHAPS = len(_CAUSES)
"""Saved to redis, which should still have it."""
_LEFT = {
    RemovalCause.CAPACITY: _EVICTED,
    RemovalCause.RECLAIMED: _EVICTED,
    RemovalCause.EXPIRED: _EXPIRED,
    RemovalCause.CORRUPT: _CORRUPT,
    RemovalCause.CLEARED: _UNKNOWN,
}
_REMOTE = (TierName.SIDECAR, TierName.REDIS)
_NOT_THERE = 0


def memory_for(pool_bytes: int) -> int:
    """Bytes to remember with: 1/64 of the pool, at least 256 KiB and at most 64 MiB.

    At blocks of 2 MiB that is some 2,700 digests a block that the pool can hold.
    """
    return min(max(pool_bytes // _POOL_SHARE, _BYTES_MIN), _BYTES_MAX)


class Missing(NamedTuple):
    """Why the blocks behind a run are missing: the first of them, and how many for each cause."""

    first: MissCause
    blocks: dict[MissCause, int]


class Absences:
    """What is known of blocks that are nowhere.

    ``evicted`` left memory because room was needed, or redis gave it up before its time; ``expired``
    left memory unused for its time to live, or was saved to redis at least that of redis ago; ``corrupt``
    was removed since its bytes were damaged. ``cold`` was never here; ``unknown`` may have been: it was
    cleared, its set has overflowed, or its namespace was taken over from an earlier server, whose
    evictions nobody knows.
    """

    def __init__(self, size_bytes: int, ttl_seconds: float, inherited: Collection[bytes] = ()) -> None:
        """``inherited`` are namespaces that were taken over from an earlier server."""
        self._left = _Digests(size_bytes // 2)
        self._saved = _Digests(size_bytes // 2)
        self._ttl_seconds = ttl_seconds
        self._inherited = frozenset(inherited)

    @property
    def nbytes(self) -> int:
        """Memory taken, whatever happens."""
        return self._left.nbytes + self._saved.nbytes

    def __call__(self, event: Event) -> None:
        if isinstance(event, BlocksRemoved):
            digests = _digests(event.namespace, event.hashes)
            self._left.put(digests, _LEFT[event.cause])
            if event.tier in _REMOTE:
                self._saved.put(digests, _NOT_THERE)
        elif isinstance(event, BlocksStored) and event.tier in _REMOTE:
            self._saved.put(_digests(event.namespace, event.hashes), _second(event.time))

    def missing(self, namespace: bytes, hashes: bytes, now: float, *, asked_redis: bool) -> Missing:
        """Causes for the rest of a chain, at least one block, whose first no tier has.

        A block that was never here proves that none behind it was: a chain is stored from its head.
        So a cold prompt costs one window, however long it is. What follows a damaged block is missed
        for it, and what redis should still have, for the block before.
        """
        digests = _digests(namespace, hashes)
        counts = np.zeros(len(_CAUSES), dtype=np.int64)
        # Redis was asked for the first block, so what it was given and has no more it gave up.
        first, before, start, reach = None, _EVICTED, 0, _WINDOW
        while start < len(digests):
            codes = self._codes(namespace, digests[start : start + reach], now, asked_redis=asked_redis)
            codes = _filled(codes, before)
            first = int(codes[0]) if first is None else first
            if first == _CORRUPT:
                return Missing(MissCause.CORRUPT, {MissCause.CORRUPT: len(digests)})
            cold = np.flatnonzero(codes == _COLD)
            known = codes[: cold[0]] if len(cold) else codes
            counts += np.bincount(known, minlength=len(_CAUSES))
            start += len(known)
            if len(cold):
                counts[_COLD] += len(digests) - start
                break
            before, reach = int(known[-1]), reach * _GROWTH
        assert first is not None, "there is a missing block"
        blocks = {cause: count for cause, count in zip(_CAUSES, counts.tolist(), strict=True) if count}
        return Missing(_CAUSES[first], blocks)

    def causes(self, namespace: bytes, hashes: bytes, now: float) -> list[MissCause]:
        """Why each of these blocks would be in no tier, redis included; each by itself."""
        codes = self._codes(namespace, _digests(namespace, hashes), now, asked_redis=True)
        codes[codes == _PERHAPS] = _EVICTED
        return [_CAUSES[code] for code in codes.tolist()]

    def _codes(
        self, namespace: bytes, digests: Uint64Array, now: float, *, asked_redis: bool
    ) -> NDArray[np.int64]:
        left, has_left, left_forgot = self._left.find(digests)
        codes = np.full(len(digests), _COLD, dtype=np.int64)
        forgot = left_forgot
        if asked_redis:
            saved, was_saved, saved_forgot = self._saved.find(digests)
            forgot = forgot | saved_forgot
        if namespace in self._inherited:
            forgot = np.ones(len(digests), dtype=np.bool_)
        codes[forgot] = _UNKNOWN
        codes[has_left] = left[has_left]
        if asked_redis:
            gone = was_saved & (saved != _NOT_THERE)
            age = _second(now) - saved[gone].astype(np.int64)
            codes[gone] = np.where(age >= self._ttl_seconds, _EXPIRED, _PERHAPS)
        return codes


def _filled(codes: NDArray[np.int64], before: int) -> NDArray[np.int64]:
    """The codes, with that of the block before in place of each ``_PERHAPS``."""
    extended = np.concatenate(([before], codes))
    sure = np.where(extended == _PERHAPS, 0, np.arange(len(extended)))
    filled: NDArray[np.int64] = extended[np.maximum.accumulate(sure)][1:]
    return filled


class _Digests:
    """Numbers by 64-bit digest in sets of eight; a full set forgets its oldest, and that it has forgotten."""

    def __init__(self, size_bytes: int) -> None:
        sets = max(2, size_bytes // (_WAYS * _ENTRY_BYTES))
        self._bits = sets.bit_length() - 1
        shape = (1 << self._bits, _WAYS)
        self._keys = np.zeros(shape, dtype=np.uint64)
        self._numbers = np.zeros(shape, dtype=np.uint32)
        self._next = np.zeros(shape[0], dtype=np.uint8)
        self._forgot = np.zeros(shape[0], dtype=np.bool_)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._numbers.nbytes + self._next.nbytes + self._forgot.nbytes

    def put(self, digests: Uint64Array, number: int) -> None:
        """Remember a number for each, instead of the one it had."""
        left = np.unique(digests)
        sets = self._sets(left)
        same = self._keys[sets] == left[:, None]
        known = same.any(axis=1)
        self._numbers[sets[known], same[known].argmax(axis=1)] = number
        left = left[~known]
        # Of those that fall into one set, one at a time. More than it holds would only push each other out,
        # and who makes names up could have it take for ever.
        for _ in range(_WAYS):
            if not len(left):
                return
            _, one_each = np.unique(self._sets(left), return_index=True)
            self._enter(left[one_each], number)
            left = np.delete(left, one_each)
        self._forgot[self._sets(left)] = True

    def find(self, digests: Uint64Array) -> tuple[Uint32Array, Flags, Flags]:
        """(Number, whether it is remembered, whether something of its set is not any more), one each."""
        sets = self._sets(digests)
        same = self._keys[sets] == digests[:, None]
        return self._numbers[sets, same.argmax(axis=1)], same.any(axis=1), self._forgot[sets]

    def _enter(self, digests: Uint64Array, number: int) -> None:
        """Remember digests that are not, each of another set."""
        sets = self._sets(digests)
        ways = self._next[sets]
        self._forgot[sets[self._keys[sets, ways] != 0]] = True
        self._keys[sets, ways] = digests
        self._numbers[sets, ways] = number
        self._next[sets] = (ways + 1) % _WAYS

    def _sets(self, digests: Uint64Array) -> Uint64Array:
        return digests >> np.uint64(64 - self._bits)


def _digests(namespace: bytes, hashes: bytes) -> Uint64Array:
    """8 bytes of each hash, mixed with the namespace; never 0, which is an empty way."""
    salt = np.uint64(int.from_bytes(namespace[:8].ljust(8, b"\0"), "little"))
    return (hash_words(hashes)[:, 0] ^ salt) | np.uint64(1)


def _second(time: float) -> int:
    """Whole seconds of the store's clock, above 0 and within 32 bits."""
    return 1 + int(time) % 0xFFFF_FFFF
