"""One namespace as an engine uses it, apart from how it waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from hashing import Extras, Root, TokenInput, pack_tokens
from kvstore.block import Chain, MissCause, Shard, TierName
from kvstore.errors import LeaseError, NamespaceError, WriteError
from kvstore.service.client.calls import (
    ACQUIRE,
    BEGIN_WRITE,
    LOOKUP,
    PREFETCH,
    Result,
    Steps,
    ask,
)
from kvstore.service.client.channel import StaleError
from kvstore.service.client.core import Core
from kvstore.service.client.lease import Grant, Held
from kvstore.service.client.leases import Use
from kvstore.service.client.messages import (
    Acquisition,
    LookupResult,
    PrefetchResult,
    Promise,
    hints_message,
    lookup_of,
    promise_of,
    prompt_message,
    shard_message,
    slots_of,
)
from kvstore.service.client.options import CallError, Outcome
from kvstore.service.client.sessions import Registration, Session
from kvstore.service.client.ticket import BorrowedBlocks, Ticket
from kvstore.service.client.write import Begun, Opened, deadline_of
from kvstore.service.codec import TIERS, Parallelism
from kvstore.spec import NamespaceSpec
from kvstore.v1 import block_pb2, lookup_pb2

Prompt: TypeAlias = TokenInput | Chain
"""Token ids, or the whole blocks that were hashed from them under this namespace's root."""

_TOKEN_BYTES = 4


class Namespace:
    """A namespace, registered when it is first needed and again after each restart of the server."""

    def __init__(self, core: Core, spec: NamespaceSpec, cut: Parallelism) -> None:
        self.spec = spec
        self._core = core
        self._cut = cut
        self._registration: Registration | None = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The ranks that read a prompt."""
        return self._cut.shards

    @property
    def root(self) -> Root | None:
        """What chains are hashed under: the server's, since it may hold a tenant's salt.

        None before the first registration.
        """
        return None if self._registration is None else self._registration.root

    @property
    def siblings(self) -> tuple[NamespaceSpec, ...]:
        """Other namespaces of this model name: their block sizes and dtypes explain misses."""
        return () if self._registration is None else self._registration.siblings

    @property
    def mapped(self) -> bool:
        """Whether payloads are in place in the pool file; they are streamed otherwise."""
        return self._registration is not None and self._registration.session.mapped

    def _register(self) -> Steps[Outcome]:
        try:
            yield from self._current()
        except CallError as error:
            return error.outcome
        return Outcome.OK

    def _look_up(
        self, prompt: Prompt, extras: Extras | None, tiers: Sequence[TierName], max_blocks: int
    ) -> Steps[LookupResult]:
        def steps(known: Registration) -> Steps[LookupResult]:
            request = lookup_pb2.LookupRequest(
                prompt=prompt_message(self._chain(known, prompt, extras), extras, self._cut),
                tiers=[TIERS[tier] for tier in tiers],
                max_blocks=max_blocks,
            )
            return lookup_of((yield from ask(LOOKUP, request, self._core.options.rpc_seconds)))

        try:
            return (yield from self._registered(steps))
        except CallError as error:
            return LookupResult(error.outcome, self.spec.block_size)

    def _prefetch(self, prompt: Prompt, extras: Extras | None, wait_seconds: float) -> Steps[PrefetchResult]:
        def steps(known: Registration) -> Steps[PrefetchResult]:
            request = block_pb2.PrefetchRequest(
                prompt=prompt_message(self._chain(known, prompt, extras), extras, self._cut),
                wait_seconds=wait_seconds,
            )
            seconds = self._core.options.rpc_seconds + wait_seconds
            answer = yield from ask(PREFETCH, request, seconds)
            return PrefetchResult(Outcome.OK, answer.resident_tokens, answer.pending)

        try:
            return (yield from self._registered(steps))
        except CallError as error:
            return PrefetchResult(error.outcome)

    def _acquire(self, prompt: Prompt, extras: Extras | None, asked: Acquisition) -> Steps[Grant]:
        if asked.first_block and not 0 < asked.first_block <= self._blocks_of(prompt):
            raise LeaseError(
                f"first_block is {asked.first_block} of {self._blocks_of(prompt)} blocks; name the first "
                "block that the caller does not have"
            )

        def steps(known: Registration) -> Steps[Held]:
            chain, session = self._chain(known, prompt, extras), known.session
            request = block_pb2.AcquireRequest(
                client=session.number,
                epoch=session.epoch,
                request_id=asked.request_id,
                prompt=prompt_message(chain, extras, self._cut),
                wait_seconds=asked.wait_seconds,
                hints=hints_message(asked.hints),
                first_block=asked.first_block,
            )
            asked_at = self._core.clock()
            seconds = self._core.options.rpc_seconds + asked.wait_seconds
            promise = promise_of((yield from ask(ACQUIRE, request, seconds)), self.shards)
            blocks, cause = self._verified(session, chain, asked.first_block, promise)
            kept = None
            if promise.lease_id:
                use = Use(blocks, _compared(session, promise, blocks))
                kept = self._core.leases.keep(session, promise.lease_id, use, asked_at)
            return Held(session, kept, known.payload_bytes, promise, blocks, cause)

        try:
            held = yield from self._registered(steps)
        except CallError as error:
            return Grant(error.outcome, self.spec.block_size)
        return Grant(Outcome.OK, self.spec.block_size, held)

    def _begin_write(
        self, prompt: Prompt, extras: Extras | None, shard: Shard, first_block: int
    ) -> Steps[Opened]:
        blocks = self._blocks_of(prompt)
        if not 0 <= first_block <= blocks:
            raise WriteError(
                f"first_block is {first_block} of {blocks} blocks; start the write inside the prompt"
            )

        def steps(known: Registration) -> Steps[Begun]:
            chain, session = self._chain(known, prompt, extras), known.session
            if chain.tokens is None:
                raise WriteError("the chain has no token ids, which are stored with the blocks; pass them")
            if shard not in known.payload_bytes:
                raise WriteError(
                    f"the namespace is cut over shards {', '.join(map(str, self.shards))}, not {shard}; "
                    "write one of them"
                )
            request = block_pb2.BeginWriteRequest(
                client=session.number,
                epoch=session.epoch,
                prompt=prompt_message(chain, extras, self._cut),
                shard=shard_message(shard),
                first_block=first_block,
                write_id=session.name_write(),
            )
            asked_at = self._core.clock()
            answer = yield from self._answer_to(session, request)
            slots = slots_of(answer, mapped=session.mapped)
            return Begun(session, slots, known.payload_bytes[shard], deadline_of(slots, asked_at))

        yield from self._core.settle()
        try:
            return Opened(Outcome.OK, blocks - first_block, (yield from self._registered(steps)))
        except CallError as error:
            return Opened(error.outcome, blocks - first_block)

    def _answer_to(
        self, session: Session, request: block_pb2.BeginWriteRequest
    ) -> Steps[block_pb2.BeginWriteResponse]:
        """Ask for slots. Whoever does not hear the answer may have some, and owes the server their end."""
        heard = False
        try:
            answer = yield from ask(BEGIN_WRITE, request, self._core.options.rpc_seconds)
            heard = True
        except CallError as error:
            heard = error.left_nothing
            raise
        except (StaleError, WriteError):
            heard = True  # it said no
            raise
        finally:  # also when the caller was cancelled
            if not heard:
                self._core.owe(session, request.write_id)
        return answer

    def _borrow(self, ticket: Ticket) -> Steps[BorrowedBlocks]:
        """Blocks of another client's lease, once this one knows the server that granted it."""
        try:
            session = (yield from self._current()).session
            if session.epoch != ticket.epoch:
                # Either this client has not noticed a restart, or the ticket is from before one.
                session = (yield from self._renewed()).session
        except CallError:  # counted where it was noticed
            return BorrowedBlocks(self._core, None, ticket)
        return BorrowedBlocks(self._core, session if session.epoch == ticket.epoch else None, ticket)

    def _registered(self, steps: Callable[[Registration], Steps[Result]]) -> Steps[Result]:
        """Ask under the current registration; once more under a new one where the server knows it no more."""
        known = yield from self._current()
        try:
            return (yield from steps(known))
        except StaleError:
            self._registration = None
        known = yield from self._current()
        try:
            return (yield from steps(known))
        except StaleError as stale:
            raise stale.error from None

    def _current(self) -> Steps[Registration]:
        known = self._registration
        if known is None or known.session is not self._core.sessions.current:
            known = yield from self._renewed()
        return known

    def _renewed(self) -> Steps[Registration]:
        try:
            known = yield from self._core.sessions.register(self.spec, self._cut)
        except StaleError as stale:
            raise stale.error from None
        self._registration = known
        return known

    def _chain(self, known: Registration, prompt: Prompt, extras: Extras | None) -> Chain:
        if not isinstance(prompt, Chain):
            return Chain.of(known.root, prompt, extras)
        if prompt.root != known.root:
            raise NamespaceError(
                f"the chain has root {prompt.root.digest.hex()} and block size {prompt.root.block_size}, the "
                f"server gave {known.root.digest.hex()} and {known.root.block_size}; hash under the "
                "namespace's own root"
            )
        return prompt

    def _blocks_of(self, prompt: Prompt) -> int:
        if isinstance(prompt, Chain):
            return len(prompt)
        return len(pack_tokens(prompt)) // _TOKEN_BYTES // self.spec.block_size

    def _verified(
        self, session: Session, chain: Chain, first_block: int, promise: Promise
    ) -> tuple[int, MissCause | None]:
        """The part of the promised run whose rows say that they are this prompt's, on every rank."""
        blocks, cause = promise.blocks, promise.cause
        if not session.mapped or not blocks:
            return blocks, cause
        if len(promise.places) < len(self.shards):
            raise StaleError(
                NamespaceError("the server takes this client for one that streams; acquire again")
            )
        for shard, places in promise.places.items():
            found, ended = session.verify(
                chain.rows(shard, first_block, first_block + promise.blocks), places
            )
            if found < blocks:
                blocks, cause = found, ended
        if not session.current:
            raise StaleError(NamespaceError("the server restarted while it answered; acquire again"))
        if blocks < promise.blocks and cause is not None:
            self._core.count_shortened(cause)
        return blocks, cause


def _compared(session: Session, promise: Promise, blocks: int) -> int:
    """Of a run, the blocks whose payload this client may use without comparing it, on every rank."""
    if not session.mapped:
        return 0
    for places in promise.places.values():
        blocks = session.compared(places.offsets[:blocks])
    return blocks
