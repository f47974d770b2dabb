"""The spaces of a pool, and which of them each slot serves."""

from __future__ import annotations

import numpy as np

from kvstore.block import BlockRows, Shard, SlotArray
from kvstore.errors import NamespaceError, PoolError
from kvstore.extents import ExtentMap, Memory, SlotClass, grown
from kvstore.index import Space
from kvstore.spec import slot_bytes_for


class Spaces:
    """Spaces by namespace and shard, by number, and by slot. Owner: one pool."""

    def __init__(self, memory: Memory, extents: ExtentMap) -> None:
        self._memory = memory
        self._extents = extents
        self._by_name: dict[tuple[bytes, Shard], Space] = {}
        self._by_number: list[Space] = []
        self._number_of = np.zeros(0, dtype=np.int32)

    def open(self, namespace: bytes, shard: Shard, payload_bytes: int, block_size: int) -> Space:
        """The space of a namespace and shard, made at first use.

        Raises NamespaceError where it has blocks of another size, PoolError where one fits no extent.
        """
        space = self._by_name.get((namespace, shard))
        if space is None:
            space = self._make(namespace, shard, payload_bytes, block_size)
        if (space.payload_bytes, space.slot_class.block_size) != (payload_bytes, block_size):
            raise NamespaceError(
                f"namespace {namespace.hex()} has blocks of {space.slot_class.block_size} tokens and "
                f"{space.payload_bytes} bytes on shard {shard}, not of {block_size} tokens and "
                f"{payload_bytes} bytes; use the spec that it was registered with"
            )
        return space

    def require_fit(self, payload_bytes: int, block_size: int) -> SlotClass:
        """The slots that such blocks take; PoolError where one fits no extent."""
        slot_class = SlotClass(slot_bytes_for(payload_bytes), block_size)
        if self._extents.layout(slot_class)[0] == 0:
            raise PoolError(
                f"one block of {payload_bytes} bytes does not fit an extent of "
                f"{self._extents.extent_bytes} bytes; raise extent_bytes"
            )
        return slot_class

    def get(self, namespace: bytes, shard: Shard) -> Space | None:
        return self._by_name.get((namespace, shard))

    def all(self) -> list[Space]:
        return list(self._by_number)

    def at(self, slot: int) -> Space:
        """The space that a slot serves, which is not FREE."""
        return self._by_number[int(self._number_of[slot])]

    def give(self, slots: SlotArray, space: Space) -> None:
        """Slots serve a space from now on."""
        if len(self._extents.state) > len(self._number_of):
            self._number_of = grown(self._number_of, len(self._extents.state), 0)
        self._number_of[slots] = space.number

    def split(self, slots: SlotArray) -> list[tuple[Space, SlotArray]]:
        """Slots by the space that they serve."""
        numbers = self._number_of[slots]
        return [(self._by_number[number], slots[numbers == number]) for number in np.unique(numbers).tolist()]

    def rows_of(self, slots: SlotArray) -> BlockRows:
        """Identities of READY slots of one space."""
        space = self.at(int(slots[0]))
        return BlockRows.join(
            [
                extent.table.read_rows(rows, space.namespace, space.shard)
                for extent, _, rows in self._extents.groups(slots)
            ]
        )

    def _make(self, namespace: bytes, shard: Shard, payload_bytes: int, block_size: int) -> Space:
        slot_class = self.require_fit(payload_bytes, block_size)
        number, named = len(self._by_number), self._memory.namespace_id(namespace)
        space = Space(number, namespace, named, shard, payload_bytes, slot_class)
        self._by_name[namespace, shard] = space
        self._by_number.append(space)
        return space
