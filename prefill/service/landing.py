"""Waits until a prompt's blocks are where other workers find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hashing import Root
from kvstore.block import WHOLE, Chain, TierName
from kvstore.store import TieredStore
from kvstore.store.probe import Lookup
from prefill.handoff import Handoff

_PROBE_SECONDS = 0.02


@dataclass(slots=True, eq=False)
class _Waiting:
    request_id: str
    chain: Chain
    then: Callable[[], None]
    ends_at: float
    probe_at: float
    is_asking: bool = False
    has_landed: bool = False
    is_offered: bool = False


class Landing:
    """Used on the store's own thread, which calls ``check`` between other work.

    A handoff is ready when the tier ``where`` has its blocks, or when the time is over: what is missing
    the other side computes. What is not there and not on its way either is offered once more, such as
    what was computed during an outage; when nothing is on its way any more, nothing will come.
    """

    def __init__(
        self,
        store: TieredStore,
        root: Root,
        where: TierName,
        clock: Callable[[], float],
        seconds: float,
    ) -> None:
        self._store = store
        self._root = root
        self._where = where
        self._clock = clock
        self._seconds = seconds
        self._waiting: list[_Waiting] = []

    @property
    def idle(self) -> bool:
        return not self._waiting

    def watch(self, handoff: Handoff, then: Callable[[], None]) -> None:
        """Call ``then`` in a later ``check``."""
        request = handoff.request(0.0)
        now = self._clock()
        chain = Chain.of(self._root, request.tokens, request.extras)
        self._waiting.append(_Waiting(handoff.request_id, chain, then, now + self._seconds, now))

    def forget(self, request_id: str) -> None:
        """Nobody waits for that handoff any more, and another request may have its id by now. Idempotent."""
        self._waiting = [each for each in self._waiting if each.request_id != request_id]

    def check(self) -> None:
        """Tell those that are ready, and ask for the others now and then."""
        now, nothing_comes = self._clock(), not self._store.queued_bytes
        ready = [
            each
            for each in self._waiting
            if each.has_landed or (nothing_comes and each.is_offered) or each.ends_at <= now
        ]
        if ready:
            self._waiting = [each for each in self._waiting if each not in ready]
        for each in self._waiting:
            if not each.is_asking and each.probe_at <= now:
                self._ask(each)
        for each in ready:
            each.then()

    def _ask(self, waiting: _Waiting) -> None:
        def answered(found: Lookup) -> None:
            waiting.is_asking = False
            waiting.probe_at = self._clock() + _PROBE_SECONDS
            there = found.alone.get(self._where, 0) // self._root.block_size
            waiting.has_landed = there == len(waiting.chain)
            if not waiting.has_landed and not waiting.is_offered:
                waiting.is_offered = True
                self._store.offer(waiting.chain, there)

        waiting.is_asking = True
        self._store.begin_lookup(waiting.chain, (WHOLE,), {self._where}, answered)
