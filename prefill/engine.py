"""Prefill and decode over the store: first come, first served prefill, packed decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hashing import Root
from kvstore.block import Chain
from kvstore.errors import PoolError
from kvstore.spec import slot_bytes_for
from kvstore.store import TieredStore
from prefill.admission import Admission
from prefill.errors import PromptError, RequestError
from prefill.handoff import Handoff, read_tail, write_tail
from prefill.paged import KVMemory
from prefill.plan import blocks_for, usable_blocks
from prefill.request import Request, Result
from prefill.runner import Runner, Span, require_fitting
from prefill.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``redis_seconds`` bounds what a request waits for blocks from redis.

    ``owner`` tells apart the leases of engines that share a store.
    """

    redis_seconds: float = 0.5
    eos_ids: tuple[int, ...] = ()
    owner: str = ""


class Engine:
    """Runs requests on one thread, which is also the store's owner.

    ``step`` does one unit of work: the whole suffix of the oldest waiting request, or else one
    token of every running one, packed. Blocks are published as they fill, and go down the tiers
    after the first token is out.
    """

    def __init__(
        self,
        runner: Runner,
        memory: KVMemory,
        store: TieredStore,
        root: Root,
        *,
        clock: Callable[[], float],
        options: EngineOptions,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._store = store
        self._root = root
        self._clock = clock
        self._options = options
        self._waiting: deque[Request] = deque()
        self._next: Admission | None = None
        """The oldest request that waits, once it is leased: it lacks room, or what redis is bringing."""
        self._running: dict[str, Sequence] = {}
        self._handed: dict[str, Sequence] = {}

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._next or self._running)

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none: PromptError, RequestError or PoolError when one can never run."""
        self._require_acceptable(*requests)
        self._waiting.extend(requests)

    def step(self) -> list[Result]:
        """Do one unit of work; the requests that it finished.

        An error ends the requests that it hit; the others go on with the next step.
        """
        self._keep_leases()
        # What the last step computed goes down the tiers now, when its tokens are out.
        self._store.pump()
        sequence = self._start_next()
        if sequence is not None:
            self._running[sequence.request.request_id] = sequence
        batch = list(self._running.values()) if sequence is None else [sequence]
        self._compute([each for each in batch if not self._is_finished(each)])
        finished = [each for each in batch if self._is_finished(each)]
        for each in finished:
            self._end(each.request.request_id)
        return [each.result() for each in finished]

    def run(self, requests: list[Request]) -> list[Result]:
        """Submit requests and work until nothing is left; results in the order of ``requests``.

        After an error none of them is left in the engine.
        """
        self.submit(*requests)
        results: dict[str, Result] = {}
        try:
            while not self.idle:
                results.update((result.request_id, result) for result in self.step())
        finally:
            self.cancel(*(request.request_id for request in requests))
            self._store.pump()
        return [results[request.request_id] for request in requests]

    def cancel(self, *request_ids: str) -> None:
        """End requests whatever their state; what they computed stays in the cache. Idempotent."""
        self._waiting = deque(each for each in self._waiting if each.request_id not in request_ids)
        if self._next is not None and self._next.request.request_id in request_ids:
            self._drop_next()
        for request_id in request_ids:
            self._end(request_id)

    def prefill(self, request: Request) -> Handoff:
        """Compute a prompt up to its first token, ahead of what waits, for another engine to decode.

        Its blocks stay leased until ``acknowledge``, or for the store's ``lease_seconds``. Raises
        like ``submit``, and PoolError while there is no room.
        """
        self._require_acceptable(request)
        if not request.reuse:
            raise RequestError(
                f"request {request.request_id!r} has reuse=False, expected True: a handoff is by way of the "
                "cache; leave it out, or use submit"
            )
        self._keep_leases()
        chain = self._chain(request, usable_blocks(len(request.tokens), self._root.block_size))
        sequence = self._handed[request.request_id] = self._admit(request, chain, len(request.tokens))
        self._compute([sequence])
        self._store.pump()
        return Handoff.of(sequence, read_tail(self._memory, sequence))

    def acknowledge(self, request_id: str) -> None:
        """The decode side holds its own lease: end ours. Idempotent."""
        if request_id in self._handed:
            self._end(request_id)

    def resume(self, handoff: Handoff) -> None:
        """Take over a prompt that another engine has prefilled.

        Nothing of it is computed again, but for blocks that no tier has any more. Raises like
        ``submit``, PoolError while there is no room, and HandoffError when it does not fit.
        """
        request = handoff.request(self._clock())
        chain = self._chain(request, len(request.tokens) // self._root.block_size)
        handoff.require_fitting(chain, self._memory)
        self._require_acceptable(request)
        sequence = self._admit(request, chain, _length(request))
        if sequence.lease.blocks == len(chain):
            write_tail(self._memory, sequence, handoff.tail)
        sequence.take_over(handoff.output, self._clock())
        self._running[request.request_id] = sequence

    def close(self) -> None:
        """Give every block back; requests that are not finished are lost."""
        self.cancel(*self._ids())

    def _start_next(self) -> Sequence | None:
        """The oldest waiting request, once there is room for all of it."""
        began = self._clock()
        if self._next is None and self._waiting:
            request = self._waiting.popleft()
            blocks = usable_blocks(len(request.tokens), self._root.block_size) if request.reuse else 0
            self._next = self._open(request, self._chain(request, blocks), _length(request))
        admission = self._next
        if admission is None or self._awaits_redis(admission):
            return None
        if not admission.gather():
            if self._running or self._handed:
                return None
            self._drop_next()
            raise self._no_room(admission.request)
        self._next = None
        return _begin(admission, began)

    def _awaits_redis(self, admission: Admission) -> bool:
        """Whether redis still brings blocks while others decode; with none to decode, wait for it here."""
        left = admission.redis_until - self._clock()
        if not admission.lease.pending or left <= 0:
            return False
        if self._running:
            return True
        self._store.wait(admission.lease, left)
        return False

    def _admit(self, request: Request, chain: Chain, length: int) -> Sequence:
        """A sequence with room for ``length`` tokens, or PoolError."""
        began = self._clock()
        admission = self._open(request, chain, length)
        self._store.wait(admission.lease, self._options.redis_seconds)
        if not admission.gather():
            admission.close()
            raise self._no_room(request)
        return _begin(admission, began)

    def _open(self, request: Request, chain: Chain, length: int) -> Admission:
        """Lease what is cached; redis begins to bring its part."""
        lease = self._store.acquire(request.request_id, chain, owner=self._options.owner)
        return Admission(self._store, request, lease, length, self._clock() + self._options.redis_seconds)

    def _drop_next(self) -> None:
        assert self._next is not None
        self._next.close()
        self._next = None

    def _chain(self, request: Request, max_blocks: int) -> Chain:
        return Chain.of(self._root, request.tokens, request.extras, max_blocks=max_blocks)

    def _compute(self, batch: list[Sequence]) -> None:
        """One step of the model. An error ends the whole batch: how far it came is unknown."""
        if not batch:
            return
        spans = [Span(each.table, each.computed, each.pending_tokens()) for each in batch]
        try:
            tokens = self._runner.step(spans).argmax(dim=-1).tolist()
            now = self._clock()
            for sequence, token in zip(batch, tokens, strict=True):
                sequence.advance(token, now)
        except BaseException:
            for sequence in batch:
                self._end(sequence.request.request_id)
            raise

    def _end(self, request_id: str) -> None:
        """Give a sequence's blocks back and forget it, if there is one."""
        for sequences in (self._running, self._handed):
            sequence = sequences.pop(request_id, None)
            if sequence is not None:
                sequence.close()

    def _is_finished(self, sequence: Sequence) -> bool:
        output = sequence.output
        enough = len(output) >= sequence.request.max_new_tokens
        return enough or (bool(output) and output[-1] in self._options.eos_ids)

    def _keep_leases(self) -> None:
        """Renew what is worked on. What lapsed while this engine rested begins again.

        A handoff that nobody acknowledges is not renewed: its reader may be dead.
        """
        if self._next is not None and self._next.lease.over:
            self._waiting.appendleft(self._next.request)
            self._drop_next()
        if self._next is not None:
            self._store.renew(self._next.lease)
        for request_id, sequence in reversed(list(self._running.items())):
            if sequence.lease.over:
                self._end(request_id)
                self._waiting.appendleft(sequence.request)
            else:
                self._store.renew(sequence.lease)
        self._store.tick()
        for request_id in [name for name, sequence in self._handed.items() if sequence.lease.over]:
            self._end(request_id)

    def _no_room(self, request: Request) -> PoolError:
        busy = len(self._running) + len(self._handed)
        return PoolError(
            f"no room on the device for the {len(request.tokens)} tokens of request {request.request_id!r} "
            f"beside {busy} others; try again later, or raise device_bytes"
        )

    def _ids(self) -> set[str]:
        admitted = set() if self._next is None else {self._next.request.request_id}
        waiting = {each.request_id for each in self._waiting}
        return waiting | admitted | self._running.keys() | self._handed.keys()

    def _require_acceptable(self, *requests: Request) -> None:
        in_use = self._ids()
        for request in requests:
            self._require_possible(request)
            if request.request_id in in_use:
                raise RequestError(
                    f"request id {request.request_id!r} is in use, expected one that no unfinished request "
                    "has; choose another"
                )
            in_use.add(request.request_id)

    def _require_possible(self, request: Request) -> None:
        new, length = request.max_new_tokens, _length(request)
        if new < 1:
            raise PromptError(f"max_new_tokens is {new}, expected at least 1; ask for a token")
        require_fitting(self._memory.spec, request.tokens, length)
        needed, room = blocks_for(length, self._root.block_size), self._store.room(self._root.digest)
        if needed > room:
            least = needed * slot_bytes_for(self._memory.block_bytes)
            raise PoolError(
                f"{len(request.tokens)} prompt tokens and {new} new ones need {needed} blocks, expected at "
                f"most {room}, the device pool's; raise device_bytes to at least {least}"
            )


def _begin(admission: Admission, now: float) -> Sequence:
    """Start an admission that has its room; an error gives everything back."""
    try:
        return admission.start(now)
    except BaseException:
        admission.close()
        raise


def _length(request: Request) -> int:
    """Tokens whose KV a request needs: the last output token's is never computed."""
    return len(request.tokens) + request.max_new_tokens - 1
