"""Which slot holds which block: one dictionary a (namespace, shard), and how blocks hang together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HASH_BYTES, BlockRows, Residency, Shard, SlotArray
from kvstore.evict.base import Occupancy
from kvstore.extents import ExtentMap, SlotClass
from kvstore.table import hash_words

NO_PARENT = -1


@dataclass(slots=True, eq=False)
class Space:
    """The blocks of one namespace and shard in one pool.

    ``awaiting`` lists, by the parent's hash, resident blocks whose parent is not resident. ``lost``
    says that some block has left, so that a missing one need not be new.
    """

    number: int
    namespace: bytes
    namespace_id: int
    shard: Shard
    payload_bytes: int
    slot_class: SlotClass
    ready: dict[bytes, int] = field(default_factory=dict)
    lost: bool = False
    staged: dict[bytes, int] = field(default_factory=dict)
    awaiting: dict[bytes, set[int]] = field(default_factory=dict)

    def residency(self, block_hash: bytes) -> Residency:
        if block_hash in self.ready:
            return Residency.READY
        return Residency.PENDING if block_hash in self.staged else Residency.MISS


def split_hashes(packed: bytes, start: int = 0, stop: int | None = None) -> list[bytes]:
    """Packed hashes [start, stop) as dictionary keys."""
    keys: list[bytes] = np.frombuffer(packed, dtype=f"V{HASH_BYTES}")[start:stop].tolist()
    return keys


def distinct_head(keys: list[bytes]) -> list[bytes]:
    """The keys before the first one that is there for the second time."""
    if len(set(keys)) == len(keys):
        return keys
    seen: set[bytes] = set()
    for place, key in enumerate(keys):
        if key in seen:
            return keys[:place]
        seen.add(key)
    return keys


def claim(space: Space, rows: BlockRows, slots: SlotArray) -> NDArray[np.bool_]:
    """Which of the blocks nobody else has or writes; names of the slots are given up."""
    keys = split_hashes(rows.hashes)
    if list(map(space.staged.get, keys)) == slots.tolist() and space.ready.keys().isdisjoint(keys):
        # All are named as these slots' own, so none of them is there twice: as it almost always is.
        for key in keys:
            del space.staged[key]
        return np.ones(len(keys), dtype=np.bool_)
    fresh = np.zeros(len(keys), dtype=np.bool_)
    claimed: set[bytes] = set()
    for block, (key, slot) in enumerate(zip(keys, slots.tolist(), strict=True)):
        writer = space.staged.get(key)
        if writer == slot:
            del space.staged[key]
        if key not in space.ready and key not in claimed and writer in (None, slot):
            fresh[block] = True
            claimed.add(key)
    return fresh


def link(space: Space, occupancy: Occupancy, extents: ExtentMap, rows: BlockRows, slots: SlotArray) -> None:
    """Make blocks findable, and count each as a child of its parent, which is the block before it.

    Hashes that a client makes up may name a parent of another place in a prompt. It is awaited for ever:
    so no block can hang from itself over others, and each can go.
    """
    keys = split_hashes(rows.hashes)
    numbers = slots.tolist()
    space.ready.update(zip(keys, numbers, strict=True))
    follows = np.zeros(len(numbers), dtype=np.bool_)
    follows[1:] = (hash_words(rows.parents)[1:] == hash_words(rows.hashes)[:-1]).all(axis=1)
    follows[1:] &= np.diff(rows.indexes) == 1
    followers = np.flatnonzero(follows)
    occupancy.parent[slots[followers]] = slots[followers - 1]
    occupancy.children[slots[followers - 1]] += 1
    for head in np.flatnonzero(~follows).tolist():
        if rows.indexes[head] == 0:
            occupancy.parent[numbers[head]] = NO_PARENT
            continue
        parent = bytes(rows.parent_at(head))
        parent_slot = space.ready.get(parent, NO_PARENT)
        if parent_slot != NO_PARENT and precedes(extents, parent_slot, numbers[head]):
            occupancy.parent[numbers[head]] = parent_slot
            occupancy.children[parent_slot] += 1
        else:
            occupancy.parent[numbers[head]] = NO_PARENT
            space.awaiting.setdefault(parent, set()).add(numbers[head])
    if space.awaiting:
        for key, number in zip(keys, numbers, strict=True):
            _adopt_waiting(space, occupancy, extents, key, number)


def precedes(extents: ExtentMap, parent: int, child: int) -> bool:
    """Whether a slot's block has the place in its prompt before that of another slot's."""
    return _index_at(extents, parent) + 1 == _index_at(extents, child)


def unlink(space: Space, occupancy: Occupancy, rows: BlockRows, slots: SlotArray) -> None:
    """Forget leaves. Blocks with resident children are orphaned first (see ``orphan``)."""
    for key in split_hashes(rows.hashes):
        del space.ready[key]
    parents = occupancy.parent[slots]
    np.subtract.at(occupancy.children, parents[parents != NO_PARENT], 1)
    occupancy.parent[slots] = NO_PARENT
    if space.awaiting:
        numbers = slots.tolist()
        for block in np.flatnonzero((parents == NO_PARENT) & (rows.indexes > 0)).tolist():
            _stop_waiting(space, bytes(rows.parent_at(block)), numbers[block])


def orphan(occupancy: Occupancy, leaving: SlotArray) -> SlotArray:
    """Blocks that stay while their parent leaves: cut loose, returned for ``await_parent``."""
    if not occupancy.children[leaving].any():
        return leaving[:0]
    going = np.zeros(len(occupancy.parent) + 1, dtype=np.bool_)
    going[leaving] = True
    lost = np.flatnonzero(going[occupancy.parent] & ~going[:-1])
    occupancy.children[leaving] = 0
    kept_parent = occupancy.parent[leaving]
    inner = leaving[going[kept_parent]]
    occupancy.parent[inner] = NO_PARENT
    occupancy.parent[lost] = NO_PARENT
    return lost


def await_parent(space: Space, rows: BlockRows, slots: SlotArray) -> None:
    """Remember orphans, so that a parent that comes back finds them."""
    for block, slot in enumerate(slots.tolist()):
        space.awaiting.setdefault(bytes(rows.parent_at(block)), set()).add(slot)


def _adopt_waiting(space: Space, occupancy: Occupancy, extents: ExtentMap, key: bytes, slot: int) -> None:
    """Those that wait for the block of this name hang from it now."""
    for child in list(space.awaiting.get(key, ())):
        if precedes(extents, slot, child):
            occupancy.parent[child] = slot
            occupancy.children[slot] += 1
            _stop_waiting(space, key, child)


def _index_at(extents: ExtentMap, slot: int) -> int:
    extent = extents.containing(slot)
    return int(extent.table.index[slot - extent.base])


def _stop_waiting(space: Space, parent: bytes, slot: int) -> None:
    waiting = space.awaiting.get(parent)
    if waiting is None:
        return
    # Who left together with its parent did not wait, though others may: for a name that a client made up.
    waiting.discard(slot)
    if not waiting:
        del space.awaiting[parent]


def unstage(space: Space, keys: list[bytes], slots: SlotArray) -> None:
    """Give up the names of staged slots, where they are still theirs."""
    for key, slot in zip(keys, slots.tolist(), strict=True):
        if space.staged.get(key) == slot:
            del space.staged[key]
