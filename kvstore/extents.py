"""Extents: equal pieces of a tier's memory, each cut into slots of one size at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.block import SlotArray
from kvstore.errors import PoolError
from kvstore.table import Rows, SlotState, Table, table_bytes

DATA_ALIGNMENT = 4096
_NO_EXTENT = -1
_T = TypeVar("_T", bound=np.generic)


class SlotClass(NamedTuple):
    """What slots of one extent have in common."""

    slot_bytes: int
    block_size: int


class Memory(Protocol):
    """Where a pool's extents are. ``inline_tables``: the table shares the extent with the slots."""

    extent_bytes: int
    extents: int
    inline_tables: bool

    def reserve(self, extent: int) -> bool:
        """Back an extent with real memory; False when there is none to be had."""

    def table_buffer(self, extent: int, size: int) -> NDArray[np.uint8]:
        """Zeroed or stale bytes for a table of a reserved extent, at the extent's start if inline.

        From here until ``assigned`` readers take the extent for one that is not laid out.
        """

    def assigned(self, extent: Extent) -> None:
        """The extent was laid out anew; record it where readers look."""

    def namespace_id(self, namespace: bytes) -> int:
        """The number by which rows name a namespace, made at first use."""


class Found(NamedTuple):
    """An extent as an earlier owner of the memory left it, laid out."""

    number: int
    generation: int
    slot_class: SlotClass
    table: Table


@dataclass(slots=True, eq=False)
class Extent:
    """One extent as it is laid out now. Slot ids are ``base`` … ``base + rows``.

    ``free``, ``busy`` and ``pinned`` count its slots that are FREE, that are STAGED or QUARANTINED,
    and that leases hold. ``last_used`` is when its blocks were last used, in the mean; None when that
    has to be computed again.
    """

    number: int
    generation: int
    slot_class: SlotClass
    rows: int
    base: int
    data_offset: int
    """Byte offset in the tier of slot ``base``."""
    table: Table
    free: int
    busy: int = 0
    pinned: int = 0
    last_used: float | None = None


def first_generation(extent_generation: int) -> int:
    """Generation of the slots of an extent that was just laid out.

    Odd, and above every generation that a slot in this place has had: a reader who compares
    generations cannot take another block for his, even when the extent changed hands and back.
    """
    return extent_generation << 32 | 1


def extents_in(pool_bytes: int, extent_bytes: int) -> int:
    """How many extents a pool has; PoolError when it has none."""
    if pool_bytes < extent_bytes:
        raise PoolError(
            f"a pool of {pool_bytes} bytes holds no extent of {extent_bytes} bytes; raise its size to at "
            f"least {extent_bytes}, or lower extent_bytes"
        )
    return pool_bytes // extent_bytes


class Group(NamedTuple):
    """Slots of one extent, in the order in which they were asked for."""

    extent: Extent
    positions: slice
    rows: Rows


def inline_layout(extent_bytes: int, slot_class: SlotClass) -> tuple[int, int]:
    """(rows, offset of the first slot) of an extent that holds its own table."""
    rows = extent_bytes // (slot_class.slot_bytes + table_bytes(1024, slot_class.block_size) // 1024)
    while rows > 0:
        head = table_bytes(rows, slot_class.block_size)
        head = -(-head // DATA_ALIGNMENT) * DATA_ALIGNMENT
        if head + rows * slot_class.slot_bytes <= extent_bytes:
            return rows, head
        rows -= max(1, rows // 1024)
    return 0, 0


class ExtentMap:
    """Reserves, lays out and finds extents; hands out free slots. Owner: one pool.

    Slot ids are dense within an extent and never shared by two extents, so that whatever is known
    of slots can be kept in flat arrays. ``state`` is the truth; tables publish copies of it.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._by_number: dict[int, Extent] = {}
        self._classes: dict[SlotClass, list[Extent]] = {}
        self._unassigned: list[int] = []
        self._spans: dict[int, tuple[int, int]] = {}
        self._generations: dict[int, int] = {}
        self._next_base = 0
        self._next_number = 0
        self._refused = False
        self.reserved = 0
        self.extent_of = np.zeros(0, dtype=np.int32)
        self.state = np.zeros(0, dtype=np.uint8)

    @property
    def slots(self) -> int:
        """Slot ids handed out so far; flat arrays must be at least this long."""
        return self._next_base

    @property
    def extent_bytes(self) -> int:
        return self._memory.extent_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.reserved * self._memory.extent_bytes

    @property
    def unassigned_bytes(self) -> int:
        return len(self._unassigned) * self._memory.extent_bytes

    def extents(self) -> list[Extent]:
        """Extents laid out now."""
        return [extent for extents in self._classes.values() for extent in extents]

    def of_class(self, slot_class: SlotClass) -> list[Extent]:
        return self._classes.get(slot_class, [])

    def classes(self) -> list[SlotClass]:
        return [slot_class for slot_class, extents in self._classes.items() if extents]

    def containing(self, slot: int) -> Extent:
        return self._by_number[int(self.extent_of[slot])]

    def layout(self, slot_class: SlotClass) -> tuple[int, int]:
        """(rows, offset of the first slot) of an extent of this class."""
        if self._memory.inline_tables:
            return inline_layout(self._memory.extent_bytes, slot_class)
        return self._memory.extent_bytes // slot_class.slot_bytes, 0

    def most_slots(self, slot_class: SlotClass) -> int:
        """Slots of a class in a memory that has no other."""
        return self.layout(slot_class)[0] * self._memory.extents

    def reserve_next(self) -> bool:
        """Back one more extent with memory; False at the limit or when memory is refused."""
        number = self._skip_known()
        if number >= self._memory.extents:
            return False
        self._refused = not self._memory.reserve(number)
        if self._refused:
            return False
        self._unassigned.append(number)
        self._next_number += 1
        self.reserved += 1
        return True

    @property
    def may_grow(self) -> bool:
        """Whether there is memory that no class has: unassigned, or not refused when last asked for."""
        unreserved = not self._refused and self._skip_known() < self._memory.extents
        return bool(self._unassigned) or unreserved

    def unreserved(self) -> list[int]:
        """Numbers of the extents that ``reserve_next`` has yet to back with memory, in its order."""
        numbers = range(self._skip_known(), self._memory.extents)
        return [number for number in numbers if number not in self._by_number]

    def take_over(self, found: Found) -> Extent:
        """Make an extent of an earlier owner this one's, with its table as it is; all slots FREE here."""
        data_offset = found.number * self._memory.extent_bytes + self.layout(found.slot_class)[1]
        extent = self._enter(found, data_offset)
        self.reserved += 1
        return extent

    def continue_from(self, number: int, generation: int) -> None:
        """An earlier owner has laid the extent out so often; generations must not repeat."""
        self._generations[number] = generation

    def assign(self, slot_class: SlotClass) -> bool:
        """Lay an unassigned extent out for a class; False when there is none."""
        if not self._unassigned:
            return False
        rows, data_start = self.layout(slot_class)
        if rows == 0:
            raise PoolError(
                f"a slot of {slot_class.slot_bytes} bytes does not fit an extent of "
                f"{self._memory.extent_bytes} bytes; raise extent_bytes"
            )
        self._lay_out(self._unassigned.pop(), slot_class, rows, data_start)
        return True

    def retire(self, extent: Extent) -> None:
        """Take an extent whose slots are all free back from its class."""
        assert extent.free == extent.rows
        self._classes[extent.slot_class].remove(extent)
        self._unassigned.append(extent.number)

    def take(self, slot_class: SlotClass, count: int) -> SlotArray:
        """Up to ``count`` free slots, next to each other where it can be; they stay FREE."""
        taken: list[SlotArray] = []
        for extent in sorted(self.of_class(slot_class), key=lambda e: e.free, reverse=True):
            if count <= 0 or not extent.free:
                break
            span = self.state[extent.base : extent.base + extent.rows]
            rows = _choose(np.flatnonzero(span == SlotState.FREE), count)
            taken.append(rows + extent.base)
            count -= len(rows)
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)

    def groups(self, slots: SlotArray) -> Iterator[Group]:
        """Cut slots where the extent changes."""
        if not len(slots):
            return
        first, last = int(slots[0]), int(slots[-1])
        extent = self.containing(first)
        if last < extent.base + extent.rows and _consecutive(slots):
            # One run in one extent, as most prompts are.
            yield Group(extent, slice(0, len(slots)), slice(first - extent.base, last + 1 - extent.base))
            return
        numbers = self.extent_of[slots]
        cuts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        start = 0
        for stop in [*cuts.tolist(), len(slots)]:
            extent = self._by_number[int(numbers[start])]
            yield Group(extent, slice(start, stop), as_rows(slots[start:stop] - extent.base))
            start = stop

    def offsets(self, slots: SlotArray) -> NDArray[np.int64]:
        """Byte offset of each slot in the tier."""
        result = np.empty(len(slots), dtype=np.int64)
        for extent, positions, _ in self.groups(slots):
            rows = slots[positions] - extent.base
            result[positions] = extent.data_offset + rows * extent.slot_class.slot_bytes
        return result

    def _lay_out(self, number: int, slot_class: SlotClass, rows: int, data_start: int) -> None:
        table = Table(
            self._memory.table_buffer(number, table_bytes(rows, slot_class.block_size)),
            rows,
            slot_class.block_size,
        )
        generation = self._generations.get(number, 0) + 1
        table.generation[:] = first_generation(generation)
        table.state[:] = SlotState.FREE
        table.lease_until[:] = 0
        found = Found(number, generation, slot_class, table)
        self._memory.assigned(self._enter(found, number * self._memory.extent_bytes + data_start))

    def _enter(self, found: Found, data_offset: int) -> Extent:
        """Keep an extent under the slot ids that it gets; all of its slots are FREE."""
        rows = found.table.rows
        extent = Extent(
            number=found.number,
            generation=found.generation,
            slot_class=found.slot_class,
            rows=rows,
            base=self._base_for(found.number, rows),
            data_offset=data_offset,
            table=found.table,
            free=rows,
        )
        self.extent_of[extent.base : extent.base + rows] = found.number
        self.state[extent.base : extent.base + rows] = SlotState.FREE
        self._by_number[found.number] = extent
        self._generations[found.number] = found.generation
        self._classes.setdefault(found.slot_class, []).append(extent)
        return extent

    def _skip_known(self) -> int:
        """The next number to reserve, past those that were taken over."""
        while self._next_number in self._by_number:
            self._next_number += 1
        return self._next_number

    def _base_for(self, number: int, rows: int) -> int:
        """Slot ids for an extent: those that it had before where they suffice."""
        base, span = self._spans.get(number, (0, 0))
        if span >= rows:
            return base
        base = self._next_base
        self._next_base += rows
        self._spans[number] = (base, rows)
        if self._next_base > len(self.state):
            size = max(self._next_base, len(self.state) * 3 // 2)
            self.state = grown(self.state, size, SlotState.FREE)
            self.extent_of = grown(self.extent_of, size, _NO_EXTENT)
        return base


def grown(array: NDArray[_T], size: int, fill: int) -> NDArray[_T]:
    """A longer copy of a flat array."""
    result = np.full(size, fill, dtype=array.dtype)
    result[: len(array)] = array
    return result


def as_rows(rows: NDArray[np.int64]) -> Rows:
    """A slice where rows are consecutive: numpy then works on a view."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if _consecutive(rows) else rows


def _consecutive(numbers: NDArray[np.int64]) -> bool:
    if int(numbers[-1]) - int(numbers[0]) != len(numbers) - 1:
        return False
    return len(numbers) < 3 or bool((numbers[1:] - numbers[:-1] == 1).all())


def _choose(free: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """``count`` of the free rows: the tightest run that holds them all, else the longest runs."""
    if len(free) <= count:
        return free
    cuts = np.flatnonzero(np.diff(free) != 1) + 1
    if not len(cuts):
        return free[:count]
    starts = np.concatenate(([0], cuts))
    lengths = np.diff(np.concatenate((starts, [len(free)])))
    fitting = np.flatnonzero(lengths >= count)
    if len(fitting):
        start = int(starts[fitting[lengths[fitting].argmin()]])
        return free[start : start + count]
    chosen: list[NDArray[np.int64]] = []
    for run in np.argsort(-lengths, kind="stable").tolist():
        part = free[starts[run] : starts[run] + min(count, int(lengths[run]))]
        chosen.append(part)
        count -= len(part)
        if count == 0:
            break
    return np.concatenate(chosen)
