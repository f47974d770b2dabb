"""The two-phase write of one prompt's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

from kvstore.block import BlockRows, SlotArray
from kvstore.errors import WriteError
from kvstore.hints import Hints, checked
from kvstore.index import Space
from kvstore.tiers.base import Payload
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import payload_checksum


class BlockStatus(StrEnum):
    """What a writer is told of each block."""

    PRESENT = "present"
    PENDING = "being_written"
    YOURS = "yours"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Write:
    """Slots that one writer fills; nothing is visible before ``commit``.

    Used as a context manager it commits at the end and aborts on an exception. ``prompt`` are all its
    blocks, ``rows`` those from the write's first block on, and ``status`` has one entry for each of these.
    """

    host: HostTier
    space: Space
    prompt: BlockRows
    rows: BlockRows
    status: list[BlockStatus]
    positions: SlotArray
    slots: SlotArray
    deadline: float
    clock: Callable[[], float]
    over: Callable[[Write, BlockRows | None, Hints | None], None]
    """Called once: with the identities that became visible, or None after an abort; and with what the
    writer said of the prompt's future."""
    writer: int = 0
    """Number of the client whose process fills the slots; 0 where that is this one."""
    open: bool = True
    quarantined: bool = False
    _payloads: list[Payload] | None = field(default=None, init=False)

    @property
    def payloads(self) -> list[Payload]:
        """The places to fill, for the blocks that are ``YOURS``, in order."""
        if self._payloads is None:  # a writer in another process has views of its own
            self._payloads = self.host.views(self.slots, self.space.payload_bytes)
        return self._payloads

    def commit(self, checksums: Sequence[int] | None = None, hints: Hints | None = None) -> None:
        """Make the blocks visible. ``checksums`` are xxh3_64, computed here when not given.

        ``hints`` are what the prompt says of its own future, with these blocks at its end. Raises
        WriteError past the deadline, or when the write is over already; HintsError.
        """
        self._still_open()
        if hints is not None:
            checked(hints)
        if self.clock() > self.deadline:
            self.abort()
            raise WriteError(
                "the write's deadline has passed and its slots are given back; write again, or "
                "raise write_seconds"
            )
        sums = [payload_checksum(payload) for payload in self.payloads] if checksums is None else checksums
        if len(sums) != len(self.slots):
            raise WriteError(
                f"{len(sums)} checksums for {len(self.slots)} blocks to fill; give one for each "
                "block whose status is yours"
            )
        self.open = False
        rows = self._own_rows()
        if len(self.slots):
            fresh = self.host.pool.commit(self.slots, rows, sums, time=self.clock())
            assert fresh.all(), "a named staged slot is its block's only writer"
        self.over(self, rows, hints)

    def abort(self) -> None:
        """Give the slots back, which also acknowledges a deadline that has passed. Idempotent."""
        if not self.open:
            return
        self.open = False
        if self.quarantined:
            self.host.pool.unquarantine(self.slots)
        else:
            self.host.pool.abort(self.slots, self._own_rows())
        self.over(self, None, None)

    def expire(self) -> None:
        """The deadline passed and the writer may yet write: nobody gets its slots."""
        assert self.open
        self.quarantined = True
        self.host.pool.quarantine(self.slots, self._own_rows())

    def _own_rows(self) -> BlockRows:
        return self.rows.pick(self.positions)

    def _still_open(self) -> None:
        if not self.open:
            raise WriteError("the write is committed or aborted already; begin another")

    def __enter__(self) -> Write:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self.open:
            self.commit()
        else:
            self.abort()
