"""Asks the sidecar what it has, on threads, so that the engine's scheduler never waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

from hashing import Extras
from kvstore.errors import KVStoreError
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client import Client, ClientNamespace, HeldLease, Outcome
from kvstore.spec import NamespaceSpec

_log = logging.getLogger(__name__)
_THREADS = 16
"""Each waits for one answer; those that need Redis take their time."""
_NONE = range(0)


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What of a prompt is cached from ``first_block`` on? The engine has what is before it.

    ``spec`` is found on the thread, since adapters are read for it.
    """

    request_id: str
    spec: Callable[[], NamespaceSpec]
    token_ids: list[int]
    extras: Extras | None
    first_block: int = 0
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The namespace, if it has one, and the lease on what is there from ``first_block`` on."""

    spec: NamespaceSpec | None
    lease: HeldLease | None
    first_block: int = 0

    @property
    def end(self) -> int:
        """The block at which the run ends."""
        return self.first_block + (0 if self.lease is None else self.lease.blocks)


NOTHING = Answer(None, None)


class Pending:
    """An answer that will come, or was given up."""

    def __init__(self, future: Future[Answer], asked_at: float) -> None:
        self.asked_at = asked_at
        self._future = future

    def poll(self, seconds: float) -> Answer | None:
        """The answer if it is there in so many seconds."""
        try:
            self._future.exception(seconds)
        except TimeoutError:
            return None
        return _answer_of(self._future)

    def then(self, handle: Callable[[Answer], Any]) -> None:
        """Have the answer, when it comes, handled by whoever brings it."""
        self._future.add_done_callback(lambda future: handle(_answer_of(future)))


def _answer_of(future: Future[Answer]) -> Answer:
    """What came; nothing where asking failed in a way that nobody foresaw."""
    if future.cancelled():
        return NOTHING
    error = future.exception()
    if error is not None:
        _log.error("a request could not be looked up in kvstore", exc_info=error)
        return NOTHING
    return future.result()


class Lookups:
    """The scheduler's client of the sidecar. Called by one thread."""

    def __init__(
        self, client: Client, cut: tuple[int, int], redis_seconds: float, clock: Callable[[], float]
    ) -> None:
        """``cut`` is tensor- and pipeline-parallel size."""
        self._client = client
        self._cut = cut
        self._redis_seconds = redis_seconds
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-lookup")
        self._namespaces: dict[NamespaceSpec, ClientNamespace] = {}
        self._told: set[object] = set()
        self._asked = count(1)
        self._closed = False

    @property
    def failures(self) -> dict[Outcome, int]:
        return self._client.failures

    def greet(self, spec: NamespaceSpec) -> None:
        """Find out, before the first request, whether there is a sidecar and what it has of the model."""
        self._threads.submit(self._register, spec)

    def ask(self, question: Question) -> Pending:
        return Pending(self._threads.submit(self._acquire, question), self._clock())

    def forget(self, pending: Pending) -> None:
        """Whatever the answer will be, nobody uses it."""
        pending.then(lambda answer: self.release(answer, 0))

    def release(self, answer: Answer, used_blocks: int, borrowed: range = _NONE) -> None:
        """The request is through with its lease, whose blocks count from the answer's first one.

        Workers have read and found right what is ``borrowed``.
        """
        if answer.lease is not None and not self._closed:
            self._threads.submit(_release, answer.lease, used_blocks, borrowed)

    def close(self) -> None:
        """Give everything back that the sidecar can still be told of."""
        self._closed = True  # leases that come from now on are the client's to release
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _acquire(self, question: Question) -> Answer:
        spec = None
        try:
            spec = question.spec()
            namespace = self._namespace(spec)
            lease = namespace.acquire(
                question.token_ids,
                # The same request may ask again while its last lease is still being released.
                request_id=f"{question.request_id}/{next(self._asked)}",
                extras=question.extras,
                wait_seconds=self._redis_seconds,
                hints=question.hints,
                first_block=question.first_block,
            )
        except KVStoreError as error:
            # Not an outage, which is an outcome, but a mistake that each request would repeat.
            self._tell(str(error), "kvstore serves nothing: %s", error)
            return Answer(spec, None, question.first_block)
        self._tell_siblings(namespace)
        return Answer(spec, lease, question.first_block)

    def _register(self, spec: NamespaceSpec) -> None:
        try:
            namespace = self._namespace(spec)
            namespace.register()
        except KVStoreError as error:
            self._tell(str(error), "kvstore serves nothing: %s", error)
            return
        self._tell_siblings(namespace)

    def _tell(self, what: object, text: str, *values: object) -> None:
        """Log a line, unless it was logged already."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *values)

    def _namespace(self, spec: NamespaceSpec) -> ClientNamespace:
        tp_size, pp_size = self._cut
        known = self._namespaces.get(spec)
        if known is None:
            known = self._client.namespace(spec, tp_size=tp_size, pp_size=pp_size)
            known = self._namespaces.setdefault(spec, known)
        return known

    def _tell_siblings(self, namespace: ClientNamespace) -> None:
        """Say once why blocks of the same model name are no hits."""
        ours = namespace.spec.namespace
        for sibling in namespace.siblings:
            theirs = sibling.namespace
            differ = [
                f"{name} {getattr(theirs, name)} there and {getattr(ours, name)} here"
                for name in ("weights_id", "kv_dtype", "layout", "block_size", "kv_shape")
                if getattr(theirs, name) != getattr(ours, name)
            ]
            if differ and theirs.adapter == ours.adapter:
                text = "kvstore has other blocks of %s, which are not used: %s"
                self._tell(sibling, text, ours.model, "; ".join(differ))


def _release(lease: HeldLease, used_blocks: int, borrowed: range) -> None:
    try:
        lease.release(used_blocks, borrowed=borrowed)
    except KVStoreError as error:
        _log.warning("kvstore lease was not released and runs out by itself: %s", error)
