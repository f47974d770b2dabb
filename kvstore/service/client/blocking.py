"""The client for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from hashing import Extras
from kvstore.block import WHOLE, MissCause, Shard, TierName
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client.core import Core
from kvstore.service.client.lease import Grant, Lease
from kvstore.service.client.messages import Acquisition, LookupResult, PrefetchResult
from kvstore.service.client.namespace import Namespace, Prompt
from kvstore.service.client.options import REDIS_WAIT_SECONDS, TLS, ClientOptions, Clock, Outcome
from kvstore.service.client.ticket import BorrowedBlocks, Ticket
from kvstore.service.client.transport import BlockingTransport
from kvstore.service.client.write import Opened, Source, Write
from kvstore.service.codec import Parallelism
from kvstore.spec import NamespaceSpec
from kvstore.tiers.base import Payload

_DEFAULTS = ClientOptions()
_NOT_BORROWED = range(0)


class Client:
    """One server's client: any number of namespaces and threads, one connection, one mapping.

    A server that is away, or goes away, costs hits and nothing else: calls come back at once with
    an outcome, and find the server again by themselves. Mistakes of the caller raise KVStoreErrors.

    Make it after forking: in a forked child every call raises KVStoreError. Memory that is mapped
    stays readable there, and the server counts the client as living while the child has it.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: TLS | None = None,
        options: ClientOptions = _DEFAULTS,
        clock: Clock = time.monotonic,  # noqa: TID251 - the caller's program has no composition root of ours
    ) -> None:
        """``address`` is ``unix:<path>`` or ``host:port``. Nothing is sent before the first call.

        ConfigError for an address or a token that cannot be, and where a file of ``tls`` cannot be read.
        """
        self._core = Core(address, options, clock)
        self._transport = BlockingTransport(self._core.link, token, tls, options.reconnect_seconds, clock)
        self._renewal = _Renewal(self._core, self._transport)

    def namespace(self, spec: NamespaceSpec, *, tp_size: int = 1, pp_size: int = 1) -> ClientNamespace:
        """A namespace of a model that is cut over ``tp_size`` × ``pp_size`` ranks."""
        return ClientNamespace(
            self._core, self._transport, self._renewal, spec, Parallelism(tp_size, pp_size)
        )

    @property
    def failures(self) -> dict[Outcome, int]:
        """Calls, leases and writes that came to nothing since the start, by outcome."""
        return self._core.link.failures

    @property
    def shortened(self) -> dict[MissCause, int]:
        """Runs that turned out to be shorter than the server had promised, by cause."""
        return self._core.shortened

    @property
    def state(self) -> tuple[Outcome, str]:
        """OK, or that the server is unreachable or rejects the token and why, as its last calls say."""
        return self._core.link.state

    def until(self, deadline: float) -> AbstractContextManager[None]:
        """Whatever this thread calls in the block ends by ``deadline``, on the client's clock.

        A call that is not through by then is ``unreachable``; one that would begin later is not made.
        """
        return self._transport.until(deadline)

    def close(self) -> None:
        """Release all leases and let go of connection and mapping. Idempotent.

        Memory that somebody has a view of stays mapped until the view is gone. Leases do not
        outlive the client.
        """
        if not self._core.begin_close():
            return
        self._renewal.stop()
        self._transport.run(self._core.release_all())
        self._core.finish_close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Renewal:
    """The thread that keeps leases and tells of lost writes; there is none before the first of either."""

    def __init__(self, core: Core, transport: BlockingTransport) -> None:
        self._core = core
        self._transport = transport
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """See to it that it runs, also after it died."""
        with self._lock:
            if self._stopped.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="kvstore-renewal", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._core.period_seconds):
            self._transport.run(self._core.renew())


class ClientNamespace(Namespace):
    """What an engine asks of one namespace. Safe for threads."""

    def __init__(
        self,
        core: Core,
        transport: BlockingTransport,
        renewal: _Renewal,
        spec: NamespaceSpec,
        cut: Parallelism,
    ) -> None:
        super().__init__(core, spec, cut)
        self._transport = transport
        self._renewal = renewal

    def register(self) -> Outcome:
        """Make the namespace known now, for its ``root``; every other call does it by itself."""
        return self._transport.run(self._register())

    def lookup(
        self,
        prompt: Prompt,
        *,
        extras: Extras | None = None,
        tiers: Sequence[TierName] = (),
        max_blocks: int = 0,
    ) -> LookupResult:
        """How much is cached, and where; changes nothing. No ``tiers`` asks all, 0 blocks is no limit."""
        return self._transport.run(self._look_up(prompt, extras, tiers, max_blocks))

    def prefetch(
        self, prompt: Prompt, *, extras: Extras | None = None, wait_seconds: float = 0.0
    ) -> PrefetchResult:
        """Bring blocks from redis into memory ahead of time, without a lease."""
        return self._transport.run(self._prefetch(prompt, extras, wait_seconds))

    def acquire(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        extras: Extras | None = None,
        wait_seconds: float = REDIS_WAIT_SECONDS,
        hints: Hints = NO_HINTS,
        first_block: int = 0,
    ) -> HeldLease:
        """Pin the run that is resident from ``first_block`` on, and compare it with the prompt.

        The caller has the blocks before ``first_block`` itself: they are neither looked for nor
        counted. Waits up to ``wait_seconds`` for what redis has; with less, what it has not answered by
        the release counts as a miss ``timeout``. The same ``request_id`` gets the same lease with its
        progress. LeaseError for a first block beyond the
        prompt's, or another one than the request asked for before.
        """
        asked = Acquisition(request_id or self._core.request_id(), wait_seconds, hints, first_block)
        grant = self._transport.run(self._acquire(prompt, extras, asked))
        if grant.held is not None and grant.held.kept is not None:
            self._renewal.start()
        return HeldLease(self._core, self._transport, grant)

    def write(
        self,
        prompt: Prompt,
        *,
        shard: Shard = WHOLE,
        extras: Extras | None = None,
        first_block: int = 0,
    ) -> StagedWrite:
        """Begin to write blocks ``first_block`` … of a prompt; see ``StagedWrite``."""
        try:
            opened = self._transport.run(self._begin_write(prompt, extras, shard, first_block))
        finally:
            if self._core.may_owe:
                self._renewal.start()
        return StagedWrite(self._core, self._transport, opened)

    def borrow(self, ticket: Ticket) -> BorrowedLease:
        """Blocks of a lease that another client of this server holds, by its ``ticket``."""
        return BorrowedLease(self._transport, self._transport.run(self._borrow(ticket)))


class BorrowedLease:
    """Blocks that are readable as long as somebody else's lease lasts."""

    def __init__(self, transport: BlockingTransport, blocks: BorrowedBlocks) -> None:
        self._transport = transport
        self._blocks = blocks

    def views(self, shard: Shard = WHOLE) -> list[Payload]:
        """The payloads, as ``HeldLease.views``: fewer where they are damaged or the server is gone."""
        return self._transport.run(self._blocks.fetch(shard))

    def valid(self, shard: Shard = WHOLE) -> int:
        """Leading blocks of those views that are right. Ask after reading."""
        return self._blocks.valid(shard)


class HeldLease(Lease):
    """A lease, kept by a background thread until it is released or the client is closed.

    As a context manager it is released at the end, with all blocks that are valid then as used.
    """

    def __init__(self, core: Core, transport: BlockingTransport, grant: Grant) -> None:
        super().__init__(core, grant)
        self._transport = transport

    def views(self, shard: Shard = WHOLE) -> list[Payload]:
        """The payloads of the run, in order, as numpy uint8 arrays.

        In place they are read-only, and right as far as ``valid`` says after reading; streamed ones
        were received and compared, and are the caller's. LeaseError after a release.
        """
        return self._transport.run(self._fetch(shard))

    def checksums(self, shard: Shard = WHOLE) -> list[int]:
        """xxh3_64 of each payload that ``views`` gives, as its writer gave it."""
        return self._transport.run(self._sums(shard))

    def copy_out(self, destinations: Sequence[Payload], shard: Shard = WHOLE) -> int:
        """Copy the run's first blocks, one a destination; how many of them are right afterwards."""
        return self._transport.run(self._copy(destinations, shard))

    def release(
        self,
        used_blocks: int | None = None,
        *,
        borrowed: range = _NOT_BORROWED,
        hints: Hints | None = None,
    ) -> None:
        """End the lease and report how many blocks were used; all valid ones if not said. Idempotent.

        ``borrowed`` are blocks that borrowers have read on every rank and found valid. ``hints`` replace
        those of the acquire; HintsError where one is out of range, and the lease is not ended.
        """
        self._transport.run(self._release(used_blocks, borrowed, hints))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StagedWrite(Write):
    """A write: as a context manager it commits at the end and aborts on an exception.

    What goes wrong on the way is in ``outcome`` and costs the blocks, nothing else.
    """

    def __init__(self, core: Core, transport: BlockingTransport, opened: Opened) -> None:
        super().__init__(core, opened)
        self._transport = transport

    def copy_in(self, sources: Sequence[Source], checksums: Sequence[int] | None = None) -> None:
        """Fill all payloads, one source each in order, and sum them on the way: faster than by hand.

        ``checksums`` are xxh3_64 of the sources, where they are known: then nothing is summed.

        A source is any buffer with the bytes of one block, of whatever dtype. WriteError, with nothing
        filled, where one is no buffer or has other than that many bytes. The payloads must not be
        changed afterwards.
        """
        self._transport.run(self._fill(sources, checksums))

    def commit(self, hints: Hints | None = None) -> None:
        """Make the blocks visible, all or none. WriteError where the write is over already.

        ``hints`` are what the prompt says of its own future, with these blocks at its end; HintsError
        where one is out of range, and the write stays open.
        """
        self._transport.run(self._commit(hints))

    def abort(self) -> None:
        """Give the slots back; nothing becomes visible. Idempotent."""
        self._transport.run(self._abort())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._open:
            self.commit()
        else:
            self.abort()
