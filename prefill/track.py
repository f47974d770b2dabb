"""One request from its submission to its end, whatever memory it has at the moment."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np

from hashing import Root
from kvstore.block import Chain, Uint32Array
from prefill.plan import Plan, usable_blocks
from prefill.request import FinishReason, Request, Result
from prefill.sequence import Sequence


class Purpose(StrEnum):
    """What becomes of a request once its prompt is computed."""

    ANSWER = "answer"
    HANDOFF = "handoff"
    """Its first token and its blocks go to another engine."""
    RESUMED = "resumed"
    """Another engine computed the prompt and handed it over."""


class Track:
    """Tokens, times and memory of one request.

    ``number`` is its place in the order of arrival. While ``sequence`` is None it has no memory and
    waits. ``failed`` is why it could not start.
    """

    def __init__(self, request: Request, number: int, purpose: Purpose, queued: float) -> None:
        """``request`` has a seed unless it is greedy; ``queued`` is now, on the engine's clock."""
        self.request = request
        self.number = number
        self.purpose = purpose
        self.queued = queued
        self.output: list[int] = []
        self.tail = b""
        """KV of the prompt tokens past the last whole block, of a request that was resumed."""
        self.sequence: Sequence | None = None
        self.failed: Exception | None = None
        self.started: float | None = None
        self.known = False
        """Whether it was said that a resumed request has its memory."""
        self._tokens = np.empty(len(request.tokens) + request.max_new_tokens, dtype=np.uint32)
        self._tokens[: len(request.tokens)] = request.tokens
        self._chain: Chain | None = None
        self._plan = Plan(len(request.tokens), 0, {})
        self._first_token_at: float | None = None
        self._last_token_at = queued
        self._gaps: list[float] = []
        self._reached = 0
        self._recomputed = 0

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def tokens(self) -> Uint32Array:
        """Tokens that are known: the prompt and the answer so far."""
        return self._tokens[: len(self.request.tokens) + len(self.output)]

    @property
    def blocks_held(self) -> Sequence:
        """The sequence of a request that runs."""
        assert self.sequence is not None, f"{self.name!r} has no memory"
        return self.sequence

    @property
    def pending(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.blocks_held.computed

    def next(self, count: int) -> Uint32Array:
        """The first ``count`` of the pending tokens."""
        computed = self.blocks_held.computed
        return self.tokens[computed : computed + count]

    @property
    def prefilling(self) -> bool:
        """Whether there is more to compute than the last token that was chosen."""
        return not self.output or self.pending > 1

    def chain(self, root: Root) -> Chain:
        """Blocks that it may take from a cache: all whole ones before the last known token."""
        if self._chain is None:
            tokens = self.tokens
            blocks = usable_blocks(len(tokens), root.block_size) if self.request.reuse else 0
            self._chain = Chain.of(root, tokens, self.request.extras, max_blocks=blocks)
        return self._chain

    def start(self, sequence: Sequence, now: float) -> None:
        """It has memory. Queue time ends when this happens first."""
        self.sequence = sequence
        if self.started is None:
            self.started = now
            if self.output:
                # Its first token came with the handoff.
                self._first_token_at = self._last_token_at = now
            size, prompt = sequence.block_size, len(self.request.tokens)
            # Of an answer that another engine began, blocks behind the prompt may be cached too.
            hits = sequence.lease.hit_blocks(min(sequence.lease.blocks, prompt // size))
            cached = {tier: blocks * size for tier, blocks in hits.items()}
            self._plan = Plan(prompt, min(sequence.computed, prompt), cached)
        self._recomputed += max(0, self._reached - sequence.computed)

    def restore_tail(self) -> None:
        """The unfinished tail block is in place too: nothing of the prompt is left to compute."""
        sequence, prompt = self.blocks_held, len(self.request.tokens)
        self._recomputed -= max(0, min(self._reached, prompt) - sequence.computed)
        sequence.computed = prompt
        if not self.known:
            self._plan = replace(self._plan, start=prompt)

    def take_over(self, output: list[int], tail: bytes) -> None:
        """Go on behind what another engine has chosen."""
        self.tail = tail
        self._append(output)

    def drop(self) -> None:
        """Lose the memory; what was published of it is in the cache, and all tokens stay known."""
        if self.sequence is not None:
            self._reached = self.sequence.computed
            self.sequence.close()
            self.sequence = None
            self._chain = None

    def advance(self, count: int) -> None:
        """``count`` more of the known tokens are computed."""
        self.blocks_held.advance(count, self.tokens)

    def choose(self, token: int, now: float) -> None:
        """``token`` follows the known ones."""
        if self._first_token_at is None:
            self._first_token_at = now
        else:
            self._gaps.append(now - self._last_token_at)
        self._last_token_at = now
        self._append([token])

    def end(self, end_ids: tuple[int, ...]) -> FinishReason | None:
        """Whether the answer is complete; ``end_ids`` are the model's own end tokens."""
        if not self.output:
            return None
        last, request = self.output[-1], self.request
        if last in request.stop_ids or (last in end_ids and not request.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output) >= request.max_new_tokens else None

    def result(self, finished: FinishReason) -> Result:
        """What is told of a request that has its first token."""
        assert self.started is not None
        assert self._first_token_at is not None
        return Result(
            self.name,
            list(self.output),
            self._plan.prompt_tokens,
            self._plan.cached,
            self._plan.suffix,
            self.started - self.request.arrived,
            self._first_token_at - self.started,
            finished,
            self._recomputed,
            list(self._gaps),
        )

    def _append(self, output: list[int]) -> None:
        begin = len(self.tokens)
        self._tokens[begin : begin + len(output)] = output
        self.output += output
