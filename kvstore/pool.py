"""One tier's blocks: slots through FREE, STAGED, READY and QUARANTINED, found by hash, freed by leaf.

Pure bookkeeping: no bytes are moved, no clock is read, nothing is waited for. One owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import BlockRows, MissCause, Residency, Shard, SlotArray
from kvstore.errors import NamespaceError, PoolError
from kvstore.events import RemovalCause
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.extents import Extent, ExtentMap, Memory, SlotClass, grown
from kvstore.index import (
    NO_PARENT,
    Space,
    await_parent,
    claim,
    distinct_head,
    link,
    orphan,
    split_hashes,
    unlink,
    unstage,
)
from kvstore.match import agreement, leading_run
from kvstore.reclaim import coldest_idle_extent, is_colder
from kvstore.spec import slot_bytes_for
from kvstore.stamps import History, Reuse, history, mark_stored, mark_used
from kvstore.table import SlotState

_NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)


class Match(NamedTuple):
    """The leading run found in a pool; ``cause`` says what ended it (None: nothing did)."""

    slots: SlotArray
    cause: MissCause | None


class Removed(NamedTuple):
    """Blocks that left the pool, for the owner's events."""

    space: Space
    hashes: bytes
    cause: RemovalCause
    history: History


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Bytes by state; they add up to ``reserved`` (docs/architecture.md, "conservation")."""

    reserved: int
    free: int
    staged: int
    ready: int
    quarantined: int
    leased: int


class BlockPool:
    """The metadata of one tier that holds blocks in memory."""

    def __init__(self, memory: Memory, make_evictor: Callable[[Occupancy], Evictor]) -> None:
        self.extents = ExtentMap(memory)
        self.occupancy = Occupancy(*(np.zeros(0, dtype=np.int32) for _ in range(3)))
        self.removed: list[Removed] = []
        """What left since the owner last looked; the owner empties it."""
        self._memory = memory
        self._make_evictor = make_evictor
        self._evictors: dict[SlotClass, Evictor] = {}
        self._spaces: dict[tuple[bytes, Shard], Space] = {}
        self._by_number: list[Space] = []
        self._space_of = np.zeros(0, dtype=np.int32)
        self._bytes = dict.fromkeys(SlotState, 0)
        self._leased_bytes = 0

    # -- spaces ---------------------------------------------------------------------------------

    def open_space(self, namespace: bytes, shard: Shard, payload_bytes: int, block_size: int) -> Space:
        """The space of a namespace and shard, made at first use."""
        space = self._spaces.get((namespace, shard))
        if space is None:
            slot_class = SlotClass(slot_bytes_for(payload_bytes), block_size)
            if self.extents.layout(slot_class)[0] == 0:
                raise PoolError(
                    f"one block of {payload_bytes} bytes does not fit an extent of "
                    f"{self.extents.extent_bytes} bytes; raise extent_bytes"
                )
            number, named = len(self._by_number), self._memory.namespace_id(namespace)
            space = Space(number, namespace, named, shard, payload_bytes, slot_class)
            self._spaces[namespace, shard] = space
            self._by_number.append(space)
        if (space.payload_bytes, space.slot_class.block_size) != (payload_bytes, block_size):
            raise NamespaceError(
                f"namespace {namespace.hex()} has blocks of {space.slot_class.block_size} tokens and "
                f"{space.payload_bytes} bytes on shard {shard}, not of {block_size} tokens and "
                f"{payload_bytes} bytes; use the spec that it was registered with"
            )
        return space

    def space(self, namespace: bytes, shard: Shard) -> Space | None:
        return self._spaces.get((namespace, shard))

    def spaces(self) -> list[Space]:
        return list(self._by_number)

    # -- finding --------------------------------------------------------------------------------

    def match(self, rows: BlockRows) -> Match:
        """The longest leading run of ``rows`` that is READY and agrees with all that is known."""
        space = self._spaces.get((rows.namespace, rows.shard))
        if space is None:
            return Match(_NO_SLOTS, MissCause.COLD if len(rows) else None)
        slots = leading_run(space, self.extents, self.occupancy, rows)
        agreed = agreement(self.extents, slots, rows)
        if agreed < len(slots):
            return Match(slots[:agreed], MissCause.COLLISION)
        if agreed == len(rows):
            return Match(slots, None)
        return Match(slots, MissCause.UNKNOWN if space.lost else MissCause.COLD)

    def residency(self, rows: BlockRows) -> list[Residency]:
        """Per block: READY, PENDING (being written) or MISS; by hash alone."""
        space = self._spaces.get((rows.namespace, rows.shard))
        if space is None:
            return [Residency.MISS] * len(rows)
        return [space.residency(key) for key in split_hashes(rows.hashes)]

    # -- writing --------------------------------------------------------------------------------

    def stage(self, space: Space, count: int, rows: BlockRows | None = None) -> SlotArray:
        """Take up to ``count`` slots for writing, evicting where needed; fewer when all is in use.

        With ``rows`` a second writer of the same blocks sees them PENDING, and what they hang from
        is not evicted to make room for them. A prompt that names a block twice, which takes a
        collision, gets no slot for the second and what follows it.
        """
        keys: list[bytes] = []
        parent = NO_PARENT
        if rows is not None and count:
            keys = distinct_head(split_hashes(rows.hashes, 0, count))
            count, parent = len(keys), self._parent_of(space, rows)
        behind = slice(parent, parent + 1)  # nothing for NO_PARENT
        self.occupancy.pins[behind] += 1
        try:
            slots = self._find_room(space.slot_class, count)
        finally:
            self.occupancy.pins[behind] -= 1
        self._move(slots, SlotState.FREE, SlotState.STAGED)
        self._space_of[slots] = space.number
        space.staged.update(zip(keys, slots.tolist(), strict=False))
        return slots

    def commit(
        self,
        slots: SlotArray,
        rows: BlockRows,
        checksums: Sequence[int] | None,
        *,
        time: float,
    ) -> NDArray[np.bool_]:
        """Make staged slots READY under these identities; True for each that became visible.

        A block that is READY already, or being written by somebody else, stays STAGED and
        unnamed here. ``checksums`` None means that the payload has none yet (device memory).
        The policy is told behind which block they hang.
        """
        space = self._spaces[rows.namespace, rows.shard]
        fresh = claim(space, rows, slots)
        kept = np.flatnonzero(fresh)
        if len(kept) < len(slots):
            slots, rows = slots[kept], rows.pick(kept)
            checksums = None if checksums is None else [checksums[block] for block in kept.tolist()]
        if len(slots):
            parent = self._parent_of(space, rows)
            mark_stored(self.extents, slots, time)
            self._publish(space, slots, rows, checksums)
            self._evictor(space.slot_class).add(slots, parent, time)
        return fresh

    def abort(self, slots: SlotArray, rows: BlockRows | None = None) -> None:
        """Give staged slots back, with the rows they were staged under; nothing was ever visible."""
        self._unname(slots, rows)
        self._move(slots, SlotState.STAGED, SlotState.FREE)

    def quarantine(self, slots: SlotArray, rows: BlockRows | None = None) -> None:
        """A writer's deadline passed, and it may yet write: keep the slots from everybody."""
        self._unname(slots, rows)
        self._move(slots, SlotState.STAGED, SlotState.QUARANTINED)

    def unquarantine(self, slots: SlotArray) -> None:
        """The writer has acknowledged, or is gone."""
        self._move(slots, SlotState.QUARANTINED, SlotState.FREE)

    # -- using ----------------------------------------------------------------------------------

    def touch(self, space: Space, touch: Touch) -> Reuse:
        """A request was made: recency and reads for the policy, for measures and for a restart."""
        reuse = mark_used(self.extents, touch.slots, touch.hit_blocks, touch.time)
        self._evictor(space.slot_class).touch(touch)
        return reuse

    def pin(self, slots: SlotArray, until: float) -> None:
        """One more lease on each; a pinned slot is neither evicted nor reclaimed."""
        assert (self.extents.state[slots] == SlotState.READY).all()
        pins = self.occupancy.pins
        self._leased_bytes += self._slot_bytes(slots[pins[slots] == 0])
        pins[slots] += 1
        self.extend_lease(slots, until)

    def extend_lease(self, slots: SlotArray, until: float) -> None:
        """Publish until when these slots are promised."""
        for extent, _, rows in self.extents.groups(slots):
            stamps = extent.table.lease_until
            stamps[rows] = np.maximum(stamps[rows], until)

    def unpin(self, slots: SlotArray) -> None:
        pins = self.occupancy.pins
        pins[slots] -= 1
        left = pins[slots]
        assert (left >= 0).all()
        self._leased_bytes -= self._slot_bytes(slots[left == 0])

    # -- removing -------------------------------------------------------------------------------

    def evict(self, slot_class: SlotClass, count: int) -> int:
        """Free up to ``count`` slots of a class, in the policy's order; the number freed."""
        evictor = self._evictor(slot_class)
        freed = 0
        while freed < count:
            victims = evictor.victims(count - freed)
            if not len(victims):
                break
            self._remove(victims, RemovalCause.CAPACITY)
            freed += len(victims)
        return freed

    def discard(self, slots: SlotArray, cause: RemovalCause) -> int:
        """Free those READY slots that no lease holds; children that stay become orphans."""
        loose = slots[self.occupancy.pins[slots] == 0]
        if len(loose):
            self._remove_inner(loose, cause)
        return len(loose)

    def rows_of(self, slots: SlotArray) -> BlockRows:
        """Identities of READY slots of one space."""
        space = self._space_at(int(slots[0]))
        return BlockRows.join(
            [
                extent.table.read_rows(rows, space.namespace, space.shard)
                for extent, _, rows in self.extents.groups(slots)
            ]
        )

    def usage(self) -> PoolUsage:
        held = {state: size for state, size in self._bytes.items() if state != SlotState.FREE}
        return PoolUsage(
            reserved=self.extents.reserved_bytes,
            free=self.extents.reserved_bytes - sum(held.values()),
            staged=held[SlotState.STAGED],
            ready=held[SlotState.READY],
            quarantined=held[SlotState.QUARANTINED],
            leased=self._leased_bytes,
        )

    @property
    def limit_bytes(self) -> int:
        """What the pool may grow to."""
        return self._memory.extents * self._memory.extent_bytes

    # -- inside ---------------------------------------------------------------------------------

    def _evictor(self, slot_class: SlotClass) -> Evictor:
        evictor = self._evictors.get(slot_class)
        if evictor is None:
            evictor = self._evictors[slot_class] = self._make_evictor(self.occupancy)
        return evictor

    def _find_room(self, slot_class: SlotClass, count: int) -> SlotArray:
        while (missing := count - sum(e.free for e in self.extents.of_class(slot_class))) > 0:
            if not self._add_extent(slot_class) and not self._make_room(slot_class, missing):
                break
        return self.extents.take(slot_class, count)

    def _add_extent(self, slot_class: SlotClass) -> bool:
        if not self.extents.assign(slot_class):
            return self.extents.reserve_next() and self._add_extent(slot_class)
        occupancy, size = self.occupancy, len(self.extents.state)
        if size > len(occupancy.pins):
            occupancy.pins = grown(occupancy.pins, size, 0)
            occupancy.children = grown(occupancy.children, size, 0)
            occupancy.parent = grown(occupancy.parent, size, NO_PARENT)
            self._space_of = grown(self._space_of, size, 0)
        return True

    def _make_room(self, slot_class: SlotClass, missing: int) -> bool:
        """Free something for a class: a colder extent of another class, else its own leaves."""
        other = coldest_idle_extent(self.extents, self.occupancy, slot_class)
        if other is not None and is_colder(other, self.extents.of_class(slot_class)):
            self._reclaim(other)
            return True
        if self.evict(slot_class, missing):
            return True
        if other is None:
            return False
        self._reclaim(other)
        return True

    def _reclaim(self, extent: Extent) -> None:
        """Empty an extent, whatever hangs below its blocks, so that another class may have it."""
        span = self.extents.state[extent.base : extent.base + extent.rows]
        leaving = np.flatnonzero(span == SlotState.READY) + extent.base
        if len(leaving):
            self._remove_inner(leaving, RemovalCause.RECLAIMED)
        self.extents.retire(extent)

    def _remove_inner(self, leaving: SlotArray, cause: RemovalCause) -> None:
        """Remove blocks that may have children elsewhere: those become orphans, first to go."""
        for space, part in self._by_space(leaving):
            self._evictor(space.slot_class).forget(part)
        lost = orphan(self.occupancy, leaving)
        self._remove(leaving, cause)
        for space, part in self._by_space(lost):
            await_parent(space, self.rows_of(part), part)
            self._evictor(space.slot_class).orphan(part)

    def _remove(self, slots: SlotArray, cause: RemovalCause) -> None:
        for extent, _, rows in self.extents.groups(slots):
            extent.table.generation[rows] += np.uint64(1)
        for space, part in self._by_space(slots):
            identities = self.rows_of(part)
            unlink(space, self.occupancy, identities, part)
            space.lost = True
            self.removed.append(Removed(space, identities.hashes, cause, history(self.extents, part)))
        self._move(slots, SlotState.READY, SlotState.FREE)

    def _publish(
        self, space: Space, slots: SlotArray, rows: BlockRows, checksums: Sequence[int] | None
    ) -> None:
        sums = np.zeros(len(slots), np.uint64) if checksums is None else np.array(checksums, np.uint64)
        for extent, positions, table_rows in self.extents.groups(slots):
            table = extent.table
            table.name_rows(table_rows, rows.slice(positions.start, positions.stop), space.namespace_id)
            table.checksum[table_rows] = sums[positions]
            table.lease_until[table_rows] = 0
            table.checked[table_rows] = 1
        link(space, self.occupancy, rows, slots)
        self._move(slots, SlotState.STAGED, SlotState.READY)
        # Last of all, so that a reader who sees an even generation sees the block whole.
        for extent, _, table_rows in self.extents.groups(slots):
            extent.table.generation[table_rows] += np.uint64(1)

    def _unname(self, slots: SlotArray, rows: BlockRows | None) -> None:
        if rows is not None and len(slots):
            unstage(self._space_at(int(slots[0])), split_hashes(rows.hashes), slots)

    def _move(self, slots: SlotArray, before: SlotState, after: SlotState) -> None:
        assert (self.extents.state[slots] == before).all(), f"expected slots to be {before.name}"
        self.extents.state[slots] = after
        for extent, _, rows in self.extents.groups(slots):
            extent.table.state[rows] = after
            count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            moved = count * extent.slot_class.slot_bytes
            self._bytes[before] -= moved
            self._bytes[after] += moved
            extent.free += count * ((after == SlotState.FREE) - (before == SlotState.FREE))

    def _slot_bytes(self, slots: SlotArray) -> int:
        return sum(
            (positions.stop - positions.start) * extent.slot_class.slot_bytes
            for extent, positions, _ in self.extents.groups(slots)
        )

    def _parent_of(self, space: Space, rows: BlockRows) -> int:
        """Slot of what the first of ``rows`` hangs from, NO_PARENT where that is not READY."""
        return space.ready.get(rows.parent_at(0), NO_PARENT)

    def _space_at(self, slot: int) -> Space:
        return self._by_number[int(self._space_of[slot])]

    def _by_space(self, slots: SlotArray) -> list[tuple[Space, SlotArray]]:
        numbers = self._space_of[slots]
        return [(self._by_number[number], slots[numbers == number]) for number in np.unique(numbers).tolist()]
