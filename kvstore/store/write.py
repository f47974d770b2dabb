"""The two-phase write of one prompt's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

from kvstore.block import BlockRows, SlotArray
from kvstore.errors import WriteError
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

    Used as a context manager it commits at the end and aborts on an exception. ``status`` has one
    entry a block from the write's first block on. ``payloads`` are the places to fill, for the
    blocks that are ``YOURS``, in order.
    """

    host: HostTier
    space: Space
    ahead: SlotArray
    rows: BlockRows
    status: list[BlockStatus]
    positions: SlotArray
    slots: SlotArray
    deadline: float
    clock: Callable[[], float]
    committed: Callable[[Write, BlockRows, SlotArray], None]
    open: bool = True
    quarantined: bool = False
    payloads: list[Payload] = field(init=False)

    def __post_init__(self) -> None:
        self.payloads = self.host.views(self.slots, self.space.payload_bytes)

    def commit(self, checksums: Sequence[int] | None = None) -> None:
        """Make the blocks visible. ``checksums`` are xxh3_64, computed here when not given.

        Raises WriteError past the deadline, or when the write is over already.
        """
        self._still_open()
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
        if len(self.slots):
            rows = self._own_rows()
            self.host.pool.commit(self.slots, rows, sums, ahead=self.ahead, time=self.clock())
            self.committed(self, rows, self.slots)

    def abort(self) -> None:
        """Give the slots back, which also acknowledges a deadline that has passed. Idempotent."""
        if not self.open:
            return
        self.open = False
        if self.quarantined:
            self.host.pool.unquarantine(self.slots)
        else:
            self.host.pool.abort(self.slots, self._own_rows())

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
