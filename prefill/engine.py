"""Prefill and decode over the store: continuous batching of packed steps."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hashing import Root
from kvstore.block import Chain
from kvstore.errors import KVStoreError
from kvstore.store import TieredStore
from prefill.errors import BusyError, PrefillError, RequestError
from prefill.handoff import Handoff, read_tail, write_tail
from prefill.intake import Intake, Place
from prefill.output import StepOutput, StepReport
from prefill.paged import KVMemory
from prefill.possible import require_possible
from prefill.request import FinishReason, Request, Result
from prefill.runner import Runner, Span
from prefill.sampling import Draw, choose
from prefill.scheduler import Job, Policy, Scheduler, SchedulerOptions
from prefill.track import Purpose, Track

_log = logging.getLogger(__name__)

# What a model raises for its input or for lack of memory. Broken invariants are not among them.
_STEP_ERRORS = (RuntimeError, ValueError, MemoryError, PrefillError, KVStoreError)
_REST_SECONDS = 0.02
_SEED_BITS = 63
_RETRY_SECONDS_MIN = 1.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``redis_seconds`` bounds what a request waits for blocks from redis.

    ``owner`` tells apart the leases of engines that share a store. ``waiting_max`` bounds the queue.
    Listeners hear of every step and of every result. The rest is as in SchedulerOptions.
    """

    redis_seconds: float = 0.5
    eos_ids: tuple[int, ...] = ()
    owner: str = ""
    step_tokens: int = 512
    policy: Policy = Policy.FAIR
    chunked: bool = True
    running_max: int = 64
    aging_seconds: float = 5.0
    waiting_max: int = 1024
    step_listeners: tuple[Callable[[StepReport], None], ...] = ()
    result_listeners: tuple[Callable[[Result], None], ...] = ()

    @property
    def scheduling(self) -> SchedulerOptions:
        return SchedulerOptions(
            self.step_tokens, self.policy, self.chunked, self.running_max, self.aging_seconds
        )


class Engine:
    """Runs requests on one thread, which is also the store's owner.

    A step packs chunks of prompts and one token of every running answer. Blocks are published as
    they fill, and go down the tiers when the step's tokens are out. Where memory runs out, the
    newest request loses its own and goes on later with what of it is still cached.
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
        self._scheduler = Scheduler(options.scheduling)
        place = Place(store, root, memory.block_bytes, options.owner, options.redis_seconds)
        self._intake = Intake(place, self._scheduler, clock)
        self._running: dict[str, Track] = {}
        self._handed: dict[str, Track] = {}
        self._arrivals = 0
        self._preempted = 0
        self._tokens_per_second = 0.0

    @property
    def idle(self) -> bool:
        return not (self._intake or self._running)

    @property
    def waiting(self) -> int:
        """Requests that have no memory."""
        return len(self._intake)

    @property
    def running(self) -> int:
        """Requests that have memory and are not finished."""
        return len(self._running)

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none: PromptError, RequestError or PoolError when one can never run.

        BusyError when the queue is full.
        """
        self._require_acceptable(requests)
        for request in requests:
            self._queue(request, Purpose.ANSWER)

    def submit_prefill(self, request: Request) -> None:
        """Queue a request whose first token and blocks go to another engine. Raises like ``submit``.

        Its one output is the handoff; the answer needs no room here. Its blocks stay leased until
        ``acknowledge``, or for the store's ``lease_seconds``.
        """
        if not request.reuse:
            raise RequestError(
                f"request {request.request_id!r} has reuse=False, expected True: a handoff is by way of the "
                "cache; leave it out, or use submit"
            )
        self._require_acceptable((request,), Purpose.HANDOFF)
        self._queue(request, Purpose.HANDOFF)

    def acknowledge(self, request_id: str) -> None:
        """The decode side holds its own lease: end ours. Idempotent."""
        handed = self._handed.pop(request_id, None)
        if handed is not None:
            handed.drop()

    def resume(self, handoff: Handoff) -> None:
        """Queue a prompt that another engine has prefilled.

        Nothing of it is computed again, but for blocks that no tier has any more. Raises like
        ``submit``, and HandoffError when it does not fit.
        """
        request = handoff.request(self._clock())
        self._require_acceptable((request,))  # first: only a prompt that may be one is hashed
        chain = Chain.of(self._root, request.tokens, request.extras)
        handoff.require_fitting(chain, self._memory)
        self._queue(request, Purpose.RESUMED).take_over(handoff.output, handoff.tail)

    def cancel(self, *request_ids: str) -> None:
        """End requests whatever their state; what they computed stays in the cache. Idempotent."""
        for request_id in request_ids:
            self._intake.remove(request_id)
            self.acknowledge(request_id)
            running = self._running.pop(request_id, None)
            if running is not None:
                running.drop()

    def complete(self, request_id: str) -> Result | None:
        """End a request whose answer is as long as its reader wants it; its result so far.

        None where it has no memory or no token yet, or is not known any more: then nothing changes.
        """
        track = self._running.get(request_id) or self._intake.find(request_id)
        if track is None or track.started is None or not track.output:
            return None
        result = self._conclude(track, FinishReason.STOP)
        self.cancel(request_id)
        return result

    def close(self) -> None:
        """Give every block back; requests that are not finished are lost."""
        self.cancel(*self._intake.names, *self._running, *self._handed)

    def run(self, requests: list[Request]) -> list[Result]:
        """Submit requests and work until nothing is left; results in the order of ``requests``.

        The first error of one of them is raised, and then none of them is left in the engine.
        """
        self.submit(*requests)
        results: dict[str, Result] = {}
        try:
            while not self.idle:
                for output in self.step():
                    if output.error is not None:
                        raise output.error
                    if output.result is not None:
                        results[output.request_id] = output.result
        finally:
            self.cancel(*(request.request_id for request in requests))
            self._store.pump()
        return [results[request.request_id] for request in requests]

    def step(self) -> list[StepOutput]:
        """Do one packed step; what it gave.

        With nothing to compute it waits a moment for redis, or for others to make room, so that
        whoever calls it in a loop does not spin.
        """
        self._keep_leases()
        # What the last step computed goes down the tiers now, when its tokens are out.
        self._store.pump()
        outputs = self._take_in()
        shares = self._scheduler.share(self._jobs())
        batch = self._make_room([(self._running[share.name], share.tokens) for share in shares])
        if batch:
            outputs += self._compute(batch)
        elif not outputs and not self.idle:
            self._rest()
        return outputs

    def _queue(self, request: Request, purpose: Purpose) -> Track:
        if not request.sampling.greedy and request.sampling.seed is None:
            # The seed is part of the request from here on: a preemption or a handoff goes on with it.
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(_SEED_BITS)))
        track = Track(request, self._arrivals, purpose, self._clock())
        self._arrivals += 1
        self._intake.add(track)
        return track

    def _take_in(self) -> list[StepOutput]:
        """Give memory to those whose turn it is, while a step has use for them."""
        outputs: list[StepOutput] = []
        while self._scheduler.takes_more(self._jobs()):
            alone = not (self._running or self._handed)
            track = self._intake.next(self._running.values(), alone=alone)
            if track is None:
                break
            if track.failed is not None:
                outputs.append(_failed(track.name, track.failed))
                continue
            self._running[track.name] = track
            if track.purpose is Purpose.RESUMED:
                outputs += self._join(track)
        return outputs

    def _join(self, track: Track) -> list[StepOutput]:
        """A request that another engine has prefilled has its memory here."""
        sequence, prompt = track.blocks_held, len(track.request.tokens)
        # The tail builds on the blocks before it: where one is lost, both are computed.
        if sequence.computed == prompt // self._root.block_size * self._root.block_size:
            write_tail(self._memory, sequence.table, prompt, track.tail)
            track.restore_tail()
        # When it comes back after a preemption, that is no news.
        outputs = [] if track.known else [StepOutput(track.name, admitted=True)]
        track.known = True
        finished = track.end(self._options.eos_ids)
        return outputs if finished is None else [*outputs, self._finish(track, None, finished)]

    def _make_room(self, batch: list[tuple[Track, int]]) -> list[tuple[Track, int]]:
        """A block for every answer that has filled its last one, at the cost of the newest if need be."""
        for track, tokens in sorted(batch, key=lambda each: each[0].number):
            while track.sequence is not None and track.sequence.capacity < track.sequence.computed + tokens:
                if not track.sequence.grow():
                    self._preempt(self._running[self._scheduler.victim(self._jobs())])
        # To let others in may have taken so long that a lease lapsed: what it held may be gone.
        return [(each, n) for each, n in batch if each.sequence is not None and not each.sequence.lease.over]

    def _preempt(self, track: Track) -> None:
        """Take a request's memory and let it wait; what it published is found again when it comes back."""
        _log.debug("request %r loses its memory after %d tokens", track.name, len(track.tokens))
        del self._running[track.name]
        track.drop()
        self._intake.add(track)
        self._preempted += 1

    def _compute(self, batch: list[tuple[Track, int]]) -> list[StepOutput]:
        """One step of the model. Where it fails, each request is tried alone: one ends, the others go on.

        To compute a span again is safe: nothing is published before a step is over.
        """
        spans = [Span(each.blocks_held.table, each.blocks_held.computed, each.next(n)) for each, n in batch]
        began = self._clock()
        try:
            logits = self._runner.step(spans)
            last = [row for row, (track, tokens) in enumerate(batch) if tokens == track.pending]
            draws = [Draw(batch[row][0].request.sampling, len(batch[row][0].output)) for row in last]
            chosen = dict(zip(last, choose(logits[last], draws), strict=True))
        except _STEP_ERRORS as error:
            if len(batch) == 1:
                return [self._fail(batch[0][0], error)]
            _log.warning("a step of %d requests failed (%s); each is tried alone", len(batch), error)
            return [output for each in batch for output in self._compute([each])]
        now = self._clock()
        prompts = sum(tokens for track, tokens in batch if track.prefilling)
        outputs = [
            output
            for row, (track, tokens) in enumerate(batch)
            if (output := self._advance(track, tokens, chosen.get(row), now)) is not None
        ]
        self._report(spans, prompts, now - began, outputs)
        return outputs

    def _advance(self, track: Track, tokens: int, token: int | None, now: float) -> StepOutput | None:
        """``tokens`` of a request are computed, and ``token`` follows if those were all."""
        track.advance(tokens)
        if token is None:
            return None
        track.choose(token, now)
        if track.purpose is Purpose.HANDOFF:
            return self._hand_over(track)
        finished = track.end(self._options.eos_ids)
        return StepOutput(track.name, token) if finished is None else self._finish(track, token, finished)

    def _hand_over(self, track: Track) -> StepOutput:
        """The prompt is computed: it waits with its lease for the decode side, which has all of its time."""
        self._handed[track.name] = self._running.pop(track.name)
        sequence = track.blocks_held
        self._store.renew(sequence.lease)
        tail = read_tail(self._memory, sequence.table, len(track.request.tokens))
        result = self._conclude(track, track.end(self._options.eos_ids) or FinishReason.LENGTH)
        return StepOutput(track.name, handoff=Handoff.of(track.request, sequence.chain, tail, result))

    def _finish(self, track: Track, token: int | None, finished: FinishReason) -> StepOutput:
        del self._running[track.name]
        track.drop()
        return StepOutput(track.name, token, finished, self._conclude(track, finished))

    def _conclude(self, track: Track, finished: FinishReason) -> Result:
        result = track.result(finished)
        for listener in self._options.result_listeners:
            listener(result)
        return result

    def _fail(self, track: Track, error: Exception) -> StepOutput:
        del self._running[track.name]
        track.drop()
        return _failed(track.name, error)

    def _report(self, spans: list[Span], prompts: int, seconds: float, outputs: list[StepOutput]) -> None:
        if prompts and seconds > 0:
            latest = prompts / seconds
            before = self._tokens_per_second or latest
            self._tokens_per_second = 0.9 * before + 0.1 * latest
        preempted, self._preempted = self._preempted, 0
        if self._options.step_listeners:
            decodes, flops = sum(len(span.tokens) for span in spans) - prompts, self._runner.flops(spans)
            counts = (preempted, self.running, self.waiting)
            report = StepReport(seconds, prompts, decodes, flops, *counts, tuple(outputs))
            for listener in self._options.step_listeners:
                listener(report)

    def _jobs(self) -> list[Job]:
        return [Job(each.name, each.number, each.pending, each.prefilling) for each in self._running.values()]

    def _keep_leases(self) -> None:
        """Renew what is worked on. What lapsed while this engine rested begins again.

        A handoff that nobody acknowledges is not renewed: its reader may be dead.
        """
        renew_before = self._clock() + self._store.options.lease_seconds / 2
        self._intake.keep_leases(renew_before)
        for track in list(self._running.values()):
            lease = track.blocks_held.lease
            if lease.over:
                self._preempt(track)
            elif lease.deadline < renew_before:
                self._store.renew(lease)
        self._store.tick()
        for name in [name for name, track in self._handed.items() if track.blocks_held.lease.over]:
            self.acknowledge(name)

    def _rest(self) -> None:
        if self._store.idle:
            time.sleep(_REST_SECONDS)
        else:
            self._store.pump(_REST_SECONDS)

    def _require_acceptable(self, requests: Sequence[Request], purpose: Purpose = Purpose.ANSWER) -> None:
        in_use = {*self._intake.names, *self._running, *self._handed}
        room = self._store.room(self._root.digest)
        for request in requests:
            require_possible(request, self._memory, room, answered=purpose is not Purpose.HANDOFF)
            if request.request_id in in_use:
                raise RequestError(
                    f"request id {request.request_id!r} is in use, expected one that no unfinished request "
                    "has; choose another"
                )
            in_use.add(request.request_id)
        if len(self._intake) + len(requests) > self._options.waiting_max:
            # A place is free when one of those who wait gets in.
            tokens = self._intake.tokens / max(1, len(self._intake))
            seconds = tokens / self._tokens_per_second if self._tokens_per_second else 0.0
            raise BusyError(
                f"{len(self._intake)} requests wait and {len(requests)} more came, expected at most "
                f"{self._options.waiting_max} together; try again later, or raise waiting_max",
                max(_RETRY_SECONDS_MIN, seconds),
            )


def _failed(request_id: str, error: Exception) -> StepOutput:
    return StepOutput(request_id, finished=FinishReason.ERROR, error=error)
