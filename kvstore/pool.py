"""One tier's blocks: slots through FREE, STAGED, READY and QUARANTINED, found by hash, freed by leaf.

Pure bookkeeping: no bytes are moved, no clock is read, nothing is waited for. One owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, BlockRows, MissCause, Residency, Shard, SlotArray
from kvstore.events import RemovalCause
from kvstore.evict.base import Evictor, Occupancy, TakesHints, Touch
from kvstore.evict.order import runs_by_use
from kvstore.extents import Extent, ExtentMap, Found, Memory, SlotClass
from kvstore.index import NO_PARENT, Space, claim, distinct_head, link, split_hashes, unstage
from kvstore.ledger import Ledger
from kvstore.match import agreement, leading_run
from kvstore.removal import Removals, Removed
from kvstore.room import Room
from kvstore.shares import NO_GROUP, Shares
from kvstore.spaces import Spaces
from kvstore.stamps import Reuse, history, mark_idle_over, mark_stored, mark_used
from kvstore.table import SlotState

_NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)


class Match(NamedTuple):
    """The leading run found in a pool; ``cause`` says what ended it (None: nothing did)."""

    slots: SlotArray
    cause: MissCause | None


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
        self._memory = memory
        self.extents = ExtentMap(memory)
        self._ledger = Ledger(self.extents)
        self._spaces = Spaces(memory, self.extents)
        self._shares = Shares(make_evictor, self._ledger.occupancy)
        self._removals = Removals(self.extents, self._ledger, self._spaces, self._shares)
        self._room = Room(self.extents, self._ledger, self._spaces, self._shares, self._removals)

    @property
    def occupancy(self) -> Occupancy:
        """Children, parents and pins by slot."""
        return self._ledger.occupancy

    @property
    def removed(self) -> list[Removed]:
        """What left since the owner last looked; the owner empties it."""
        return self._removals.removed

    # -- spaces ---------------------------------------------------------------------------------

    def open_space(
        self, namespace: bytes, shard: Shard, payload_bytes: int, block_size: int, *, group: int = NO_GROUP
    ) -> Space:
        """The space of a namespace and shard, made at first use, then in share group ``group``."""
        space = self._spaces.open(namespace, shard, payload_bytes, block_size)
        self._shares.enter(space, group)
        return space

    def require_fit(self, payload_bytes: int, block_size: int) -> None:
        """PoolError where a block of that size fits no extent."""
        self._spaces.require_fit(payload_bytes, block_size)

    def space(self, namespace: bytes, shard: Shard) -> Space | None:
        return self._spaces.get(namespace, shard)

    def spaces(self) -> list[Space]:
        return self._spaces.all()

    # -- shares ---------------------------------------------------------------------------------

    def guarantee(self, group: int, size: int) -> None:
        """Others do not push a share group below ``size`` READY bytes; 0 takes the guarantee back.

        Group 0 is shared by all spaces of no other group, and is guaranteed nothing.
        """
        assert group != NO_GROUP, "group 0 is everybody without a guarantee"
        self._shares.guarantee(group, size)

    def group_bytes(self, group: int) -> int:
        """Bytes of a share group's READY slots."""
        return self._shares.ready_bytes(group)

    def group_of(self, space: Space) -> int:
        """The share group that a space's blocks count for."""
        return self._shares.group_of(space)

    def regroup(self, space: Space, group: int) -> None:
        """Move a space with its blocks to another share group, in the order in which they were used."""
        if self._shares.group_of(space) == group:
            return
        slots = np.fromiter(space.ready.values(), dtype=np.int64, count=len(space.ready))
        self._shares.change(space, group, slots)
        self._queue_up([(space, slots)])

    # -- finding --------------------------------------------------------------------------------

    def match(self, rows: BlockRows) -> Match:
        """The longest leading run of ``rows`` that is READY and agrees with all that is known."""
        space = self._spaces.get(rows.namespace, rows.shard)
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
        space = self._spaces.get(rows.namespace, rows.shard)
        if space is None:
            return [Residency.MISS] * len(rows)
        keys = split_hashes(rows.hashes)
        if space.ready.keys().isdisjoint(keys) and space.staged.keys().isdisjoint(keys):
            return [Residency.MISS] * len(keys)
        return [space.residency(key) for key in keys]

    # -- writing --------------------------------------------------------------------------------

    def stage(
        self,
        space: Space,
        count: int,
        rows: BlockRows | None = None,
        *,
        writer: int = 0,
        selective: bool = False,
    ) -> SlotArray:
        """Take up to ``count`` slots for writing, evicting where needed; fewer when all is in use.

        ``writer`` is the number of the client that fills them, 0 for this process and its threads.
        With ``rows`` a second writer of the same blocks sees them PENDING, and what they hang from
        is not evicted to make room for them. A prompt that names a block twice, which takes a
        collision, gets no slot for the second and what follows it. Where ``selective``, the policy may
        also decide that the rest of ``rows`` is worth less than what would have to go.
        """
        keys: list[bytes] = []
        parent = NO_PARENT
        if rows is not None and count:
            keys = distinct_head(split_hashes(rows.hashes, 0, count))
            count, parent = len(keys), self._parent_of(space, rows)
        behind = _NO_SLOTS if parent == NO_PARENT else np.array([parent])
        self._ledger.pin(behind)
        try:
            slots = self._room.find(space, count, rows.hashes if selective and rows is not None else b"")
        finally:
            self._ledger.unpin(behind)
        # Before the state says that somebody writes, the table says who: a server may find it so.
        for extent, _, table_rows in self.extents.groups(slots):
            extent.table.writer[table_rows] = writer
        self._ledger.move(slots, SlotState.FREE, SlotState.STAGED)
        self._spaces.give(slots, space)
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
        space = self._spaces.get(rows.namespace, rows.shard)
        assert space is not None, "slots are staged in a space"
        fresh = claim(space, rows, slots)
        kept = np.flatnonzero(fresh)
        if len(kept) < len(slots):
            slots, rows = slots[kept], rows.pick(kept)
            checksums = None if checksums is None else [checksums[block] for block in kept.tolist()]
        if len(slots):
            mark_stored(self.extents, slots, time)
            self._publish(space, slots, rows, checksums)
            self._tell_of_new(space, slots, rows.hashes, time)
        return fresh

    def _tell_of_new(self, space: Space, slots: SlotArray, hashes: bytes, time: float) -> None:
        """Tell the policy of each run of neighbours: what was there already parts them."""
        evictor, parents = self._shares.evictor(space), self.occupancy.parent
        parted = np.flatnonzero(parents[slots[1:]] != slots[:-1]) + 1
        for start, stop in pairwise((0, *parted.tolist(), len(slots))):
            run = hashes[start * HASH_BYTES : stop * HASH_BYTES]
            evictor.add(slots[start:stop], run, int(parents[slots[start]]), time)

    def abort(self, slots: SlotArray, rows: BlockRows | None = None) -> None:
        """Give staged slots back, with the rows they were staged under; nothing was ever visible."""
        self._unname(slots, rows)
        self._ledger.move(slots, SlotState.STAGED, SlotState.FREE)

    def quarantine(self, slots: SlotArray, rows: BlockRows | None = None) -> None:
        """A writer's deadline passed, and it may yet write: keep the slots from everybody."""
        self._unname(slots, rows)
        self._ledger.move(slots, SlotState.STAGED, SlotState.QUARANTINED)

    def unquarantine(self, slots: SlotArray) -> None:
        """The writer has acknowledged, or is gone."""
        self._ledger.move(slots, SlotState.QUARANTINED, SlotState.FREE)

    # -- using ----------------------------------------------------------------------------------

    def touch(self, space: Space, touch: Touch) -> Reuse:
        """A request was made: recency and reads for the policy, for measures and for a restart."""
        brought = touch.brought_blocks
        mark_idle_over(self.extents, touch.slots[:brought], touch.time)
        reuse = mark_used(self.extents, touch.slots[brought:], touch.hit_blocks - brought, touch.time)
        for extent, _, _ in self.extents.groups(touch.slots):
            extent.last_used = None
        self._shares.evictor(space).touch(touch)
        return reuse

    def hint(self, space: Space, touch: Touch) -> None:
        """A request says something else of its future than when it was made, or a write does."""
        evictor = self._shares.evictor(space)
        if isinstance(evictor, TakesHints):
            evictor.hint(touch)

    def pin(self, slots: SlotArray, until: float) -> None:
        """One more lease on each; a pinned slot is neither evicted nor reclaimed."""
        self._ledger.pin(slots)
        self.extend_lease(slots, until)

    def extend_lease(self, slots: SlotArray, until: float) -> None:
        """Publish until when these slots are promised."""
        for extent, _, rows in self.extents.groups(slots):
            stamps = extent.table.lease_until
            stamps[rows] = np.maximum(stamps[rows], until)

    def unpin(self, slots: SlotArray) -> None:
        """One lease less on each; what nobody holds any more is promised to nobody, also after a restart."""
        self._ledger.unpin(slots)
        for extent, _, rows in self.extents.groups(slots[self.occupancy.pins[slots] == 0]):
            extent.table.lease_until[rows] = 0

    # -- removing -------------------------------------------------------------------------------

    def evict(self, slot_class: SlotClass, count: int, group: int = NO_GROUP) -> int:
        """Free up to ``count`` slots of a class on behalf of a group; the number freed.

        First what groups have beyond their guarantee, then what the asking group has within its own;
        each in the policy's order.
        """
        return self._room.evict(slot_class, count, group)

    def vacate(self, slot_class: SlotClass, count: int) -> list[tuple[Space, SlotArray]]:
        """Evict up to ``count`` blocks of a class and keep their slots STAGED, with their rows and bytes.

        They are the caller's to ``abort`` once it has a copy; until then ``rows_of`` tells what they hold.
        """
        told = len(self.removed)
        self._room.vacate(slot_class, count)
        return [(gone.space, gone.slots) for gone in self.removed[told:]]

    def discard(self, slots: SlotArray, cause: RemovalCause) -> int:
        """Free those READY slots that no lease holds; children that stay become orphans."""
        loose = slots[self.occupancy.pins[slots] == 0]
        if len(loose):
            self._removals.inner(loose, cause)
        return len(loose)

    def expire(self, slots: SlotArray) -> None:
        """Free blocks whose time to live is over (``Expiry.due``)."""
        self._removals.expired(slots)

    def rows_of(self, slots: SlotArray) -> BlockRows:
        """Identities of READY slots of one space."""
        return self._spaces.rows_of(slots)

    def usage(self) -> PoolUsage:
        held = {state: size for state, size in self._ledger.bytes_in.items() if state != SlotState.FREE}
        return PoolUsage(
            reserved=self.extents.reserved_bytes,
            free=self.extents.reserved_bytes - sum(held.values()),
            staged=held[SlotState.STAGED],
            ready=held[SlotState.READY],
            quarantined=held[SlotState.QUARANTINED],
            leased=self._ledger.leased_bytes,
        )

    @property
    def limit_bytes(self) -> int:
        """What the pool may grow to."""
        return self._memory.extents * self._memory.extent_bytes

    # -- taking over ----------------------------------------------------------------------------

    def take_over(self, found: Found) -> Extent:
        """An extent that an earlier owner of the memory laid out; its slots are FREE until restored."""
        extent = self.extents.take_over(found)
        self._ledger.cover()
        return extent

    def restore(self, blocks: list[tuple[Space, SlotArray]]) -> None:
        """Blocks that an earlier owner left READY, each once: findable again, to go in order of use."""
        for space, slots in blocks:
            self._spaces.give(slots, space)
            self._ledger.move(slots, SlotState.FREE, SlotState.READY)
            link(space, self.occupancy, self.extents, self.rows_of(slots), slots)
            self._shares.count(space, len(slots))
            space.lost = True  # what is not among them need not be new
        self._queue_up(blocks)

    def restore_quarantined(self, slots: SlotArray) -> None:
        """Slots that a writer which is not proven dead may yet write to."""
        self._ledger.move(slots, SlotState.FREE, SlotState.QUARANTINED)

    # -- inside ---------------------------------------------------------------------------------

    def _queue_up(self, blocks: list[tuple[Space, SlotArray]]) -> None:
        """Hand resident blocks to policies that have not seen them used."""
        queues: dict[Evictor, list[tuple[Space, SlotArray]]] = {}
        for space, slots in blocks:
            if len(slots):
                queues.setdefault(self._shares.evictor(space), []).append((space, slots))
        for evictor, parts in queues.items():
            slots = np.concatenate([part for _, part in parts])
            parents = self.occupancy.parent[slots].astype(np.int64)
            rows = [self.rows_of(part) for _, part in parts]
            inner = np.concatenate([part.indexes > 0 for part in rows])
            keys = [key for part in rows for key in split_hashes(part.hashes)]
            names = dict(zip(slots.tolist(), keys, strict=True))
            used_at = history(self.extents, slots).used_at
            for time, run in runs_by_use(slots, parents, used_at, inner & (parents == NO_PARENT)):
                evictor.add(run, b"".join(map(names.__getitem__, run.tolist())), NO_PARENT, time)

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
        link(space, self.occupancy, self.extents, rows, slots)
        self._shares.count(space, len(slots))
        self._ledger.move(slots, SlotState.STAGED, SlotState.READY)
        # Last of all, so that a reader who sees an even generation sees the block whole.
        for extent, _, table_rows in self.extents.groups(slots):
            extent.table.generation[table_rows] += np.uint64(1)

    def _unname(self, slots: SlotArray, rows: BlockRows | None) -> None:
        if rows is not None and len(slots):
            unstage(self._spaces.at(int(slots[0])), split_hashes(rows.hashes), slots)

    def _parent_of(self, space: Space, rows: BlockRows) -> int:
        """Slot of what the first of ``rows`` hangs from, NO_PARENT where that is not READY."""
        return space.ready.get(rows.parent_at(0), NO_PARENT)
