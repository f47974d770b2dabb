"""A two-phase write as the writer sees it, apart from how it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import WriteError
from kvstore.hints import Hints
from kvstore.service.client.calls import (
    COMMIT_WRITE,
    WRITE_BLOCKS,
    Steps,
    ask,
    send,
    work,
)
from kvstore.service.client.channel import StaleError
from kvstore.service.client.core import Core
from kvstore.service.client.messages import Slots, hints_message
from kvstore.service.client.options import CallError, Outcome
from kvstore.service.client.sessions import Session
from kvstore.service.client.streams import pieces
from kvstore.store.write import BlockStatus
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import payload_checksum
from kvstore.v1 import block_pb2

Source: TypeAlias = NDArray[Any] | bytes | bytearray | memoryview
"""The bytes of one block, in memory of the caller's."""

_USABLE_TIME = 0.95
"""Of a write's seconds, after which its writer gives up: the commit has to arrive in time."""


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """Slots of the server of ``session``, of ``size`` bytes each, the writer's until ``deadline``."""

    session: Session
    slots: Slots
    size: int
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """Answer to the begin of a write of ``blocks`` blocks; without ``begun`` there is nothing to fill."""

    outcome: Outcome
    blocks: int
    begun: Begun | None = None


def deadline_of(slots: Slots, asked_at: float) -> float:
    """When to give a write up, on the clock of ``asked_at``: before the server does."""
    return asked_at + slots.seconds * _USABLE_TIME


class Write:
    """Blocks that one writer brings; nothing is visible before ``commit``."""

    def __init__(self, core: Core, opened: Opened) -> None:
        self._open = False
        self.status: list[BlockStatus] = [BlockStatus.REFUSED] * opened.blocks
        """What is to be done with each block, from the write's first block on."""
        self.payloads: list[Payload] = []
        """The places to fill, for the blocks that are YOURS, in order. Empty once the write is over:
        nothing may be written through views of them any more."""
        self.outcome = opened.outcome
        """OK as long as nothing went wrong. LOST: it took too long, or the server is another."""
        self.committed_blocks = 0
        """Blocks that this write made visible."""
        self._core = core
        self._begun = opened.begun
        self._buffer = np.empty((0, 0), dtype=np.uint8)
        self._sums: list[int] | None = None
        self._open = True
        if opened.begun is not None:
            self.status = opened.begun.slots.status
            self.payloads = self._places(opened.begun)
            if len(self.payloads) < opened.begun.slots.yours:
                self._end(Outcome.LOST)  # the server restarted in between

    def __del__(self) -> None:
        # Out of reach and neither committed nor aborted, as when its taker was cancelled: nobody else would
        # ever give the slots back.
        if self._open and self._begun is not None:
            self._drop_views()
            self._core.owe(self._begun.session, self._begun.slots.write_id)

    def _places(self, begun: Begun) -> list[Payload]:
        if begun.slots.offsets is not None:
            return begun.session.views(begun.slots.offsets, begun.size, writable=True)
        self._buffer = np.empty((begun.slots.yours, begun.size), dtype=np.uint8)
        return list(self._buffer)

    @property
    def _late(self) -> bool:
        begun = self._begun
        return begun is None or self._core.clock() > begun.deadline or not begun.session.current

    def _fill(self, sources: Sequence[Source], checksums: Sequence[int] | None = None) -> Steps[None]:
        """Copy one source into each payload, summing each while it is in the processor's cache.

        Sources whose ``checksums`` are known keep them: what has been damaged since is found by readers.
        """
        if self.payloads and len(sources) != len(self.payloads):
            raise WriteError(
                f"{len(sources)} payloads were given for {len(self.payloads)} blocks to fill; give one for "
                "each block whose status is yours"
            )
        pairs = [
            (target, _bytes_of(source, len(target)))
            for target, source in zip(self.payloads, sources, strict=False)
        ]
        if checksums is None:
            self._sums = yield from work(lambda: [_copy_and_sum(target, source) for target, source in pairs])
        else:
            yield from work(lambda: _copy_all(pairs))
            self._sums = list(checksums)

    def _commit(self, hints: Hints | None = None) -> Steps[None]:
        """Make the blocks visible; WriteError where the write is over already."""
        if not self._open:
            raise WriteError("the write is committed or aborted already; begin another")
        said = hints_message(hints)
        begun = self._begun
        if begun is None:
            self._open = False
            return
        settled = False
        try:
            settled = yield from self._try_commit(begun, said)
        finally:  # also when the caller was cancelled
            self._drop_views()
            if not settled:
                self._core.owe(begun.session, begun.slots.write_id)
        if not settled:
            yield from self._core.settle()

    def _try_commit(self, begun: Begun, hints: block_pb2.Hints | None) -> Steps[bool]:
        """Whether the server knows that the write is over."""
        sums = [] if self._late else (yield from work(self._checksums))
        if self._late:
            self._end(Outcome.LOST)
            return False
        try:
            answer = yield from self._send_commit(begun, sums, hints)
        except StaleError:
            self._end(Outcome.LOST)
        except CallError as error:
            # A stream has no more time than the write.
            self._end(Outcome.LOST if self._late else error.outcome)
            return False
        else:
            self.committed_blocks = answer.blocks
        return True

    def _send_commit(
        self, begun: Begun, sums: list[int], hints: block_pb2.Hints | None
    ) -> Steps[block_pb2.CommitWriteResponse]:
        if not begun.session.mapped and self.payloads:
            yield from self._send_payloads(begun)
        # The server may give the slots away as soon as it has heard of the commit.
        self._drop_views()
        request = block_pb2.CommitWriteRequest(
            client=begun.session.number,
            epoch=begun.session.epoch,
            write_id=begun.slots.write_id,
            checksums=np.array(sums, dtype="<u8").tobytes(),
            hints=hints,
        )
        return (yield from ask(COMMIT_WRITE, request, self._core.options.rpc_seconds))

    def _abort(self) -> Steps[None]:
        """Give the slots back; nothing becomes visible. Idempotent."""
        if self._open:
            self._drop_views()
            if self._begun is not None:
                self._core.owe(self._begun.session, self._begun.slots.write_id)
                yield from self._core.settle()

    def _end(self, outcome: Outcome) -> None:
        self._drop_views()
        if outcome is Outcome.LOST:
            self._core.link.count(Outcome.LOST)
        self.outcome = outcome

    def _drop_views(self) -> None:
        """From here on the slots may be somebody else's."""
        self._open = False
        for payload in self.payloads:
            payload.setflags(write=False)
        self.payloads = []

    def _checksums(self) -> list[int]:
        if self._sums is not None:
            return self._sums
        return [payload_checksum(payload) for payload in self.payloads]

    def _send_payloads(self, begun: Begun) -> Steps[None]:
        head = block_pb2.WriteBlocksRequest(
            client=begun.session.number, epoch=begun.session.epoch, write_id=begun.slots.write_id
        )
        seconds = min(self._core.options.transfer_seconds, begun.deadline - self._core.clock())
        yield from send(WRITE_BLOCKS, pieces(self._buffer, head), seconds)


def _bytes_of(source: Source, size: int) -> Payload:
    """WriteError where ``source`` is no buffer of ``size`` bytes."""
    try:
        array = source if isinstance(source, np.ndarray) else np.frombuffer(source, dtype=np.uint8)
        if array.dtype != np.uint8 or array.ndim != 1:
            array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise WriteError(
            f"a payload is a {type(source).__name__} ({error}), expected a buffer of {size} bytes; pass the "
            "block's bytes, or an array of them"
        ) from error
    if len(array) != size:
        raise WriteError(f"a payload has {len(array)} bytes, expected {size}; pass the block's bytes")
    return array


def _copy_all(pairs: list[tuple[Payload, Payload]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def _copy_and_sum(target: Payload, source: Payload) -> int:
    np.copyto(target, source)
    return payload_checksum(target)
