"""Shares of a pool: what a group of namespaces is guaranteed, and who gives way when there is no room.

A group's blocks of one slot size are in one evictor of its own. Group 0 is everybody without a
guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvstore.block import SlotArray
from kvstore.evict.base import Evictor, Occupancy
from kvstore.extents import SlotClass
from kvstore.index import Space

NO_GROUP = 0
"""The group of all spaces that were not given another one."""


class Turn(NamedTuple):
    """Whose blocks go next, and at most how many of them before somebody else's turn."""

    group: int
    evictor: Evictor
    most: int


class Shares:
    """Groups of spaces: their evictors, their READY bytes, and what they are guaranteed."""

    def __init__(self, make_evictor: Callable[[Occupancy], Evictor], occupancy: Occupancy) -> None:
        self._make_evictor = make_evictor
        self._occupancy = occupancy
        self._groups: dict[int, int] = {}
        self._evictors: dict[SlotClass, dict[int, Evictor]] = {}
        self._guaranteed: dict[int, int] = {}
        self._ready_bytes: dict[int, int] = {}

    def enter(self, space: Space, group: int) -> None:
        """A new space belongs to a group; of one that is known already nothing changes."""
        self._groups.setdefault(space.number, group)

    def change(self, space: Space, group: int, resident: SlotArray) -> None:
        """A space with its READY blocks belongs to another group; the caller queues them up there."""
        self.evictor(space).forget(resident)
        self.count(space, -len(resident))
        self._groups[space.number] = group
        self.count(space, len(resident))

    def group_of(self, space: Space) -> int:
        return self._groups[space.number]

    def evictor(self, space: Space) -> Evictor:
        """Where a space's blocks wait for their turn."""
        return self._evictor(space.slot_class, self._groups[space.number])

    def guarantee(self, group: int, size: int) -> None:
        """Others do not push a group below ``size`` bytes; 0 takes the guarantee back."""
        self._guaranteed.pop(group, None)
        if size:
            self._guaranteed[group] = size

    def ready_bytes(self, group: int) -> int:
        """Bytes of a group's READY slots."""
        return self._ready_bytes.get(group, 0)

    def count(self, space: Space, blocks: int) -> None:
        """So many blocks of a space became READY, or fewer by so many."""
        group = self._groups[space.number]
        moved = blocks * space.slot_class.slot_bytes
        self._ready_bytes[group] = self.ready_bytes(group) + moved

    def over(self, group: int) -> int:
        """Bytes by which a group exceeds its guarantee; negative where it has less."""
        return self.ready_bytes(group) - self._guaranteed.get(group, 0)

    def turn(self, slot_class: SlotClass, wanted: int, asker: int, spent: set[int]) -> Turn | None:
        """Who gives way next to a group that wants so many slots, out of those over their guarantee.

        The one that exceeds it most, down to where the next one is, so that they shrink together.
        ``spent`` groups have nothing to give. The asker's own blocks below its guarantee are not in
        this: see ``own``.
        """
        size = slot_class.slot_bytes
        surplus = {
            group: self.over(group)
            for group in self._evictors.get(slot_class, {})
            if group not in spent and self.over(group) >= (1 if group == asker else size)
        }
        if not surplus:
            return None
        first, *rest = sorted(surplus, key=lambda group: (-surplus[group], group))
        most = wanted
        if rest:
            step = max((surplus[first] - surplus[rest[0]]) // size, -(-wanted // len(surplus)))
            most = min(wanted, step)
        if first != asker:
            most = min(most, surplus[first] // size)
        return Turn(first, self._evictors[slot_class][first], most)

    def own(self, slot_class: SlotClass, group: int) -> Evictor | None:
        """The evictor of blocks that are within a group's guarantee; None where it has no such thing."""
        return self._evictor(slot_class, group) if group in self._guaranteed else None

    @property
    def promised(self) -> bool:
        """Whether any group has a guarantee."""
        return bool(self._guaranteed)

    def spares(self, losses: Iterable[tuple[Space, int]], asker: int) -> bool:
        """Whether every group but the asker keeps its guarantee when spaces lose so many blocks."""
        lost: dict[int, int] = {}
        for space, blocks in losses:
            group = self._groups[space.number]
            lost[group] = lost.get(group, 0) + blocks * space.slot_class.slot_bytes
        return all(
            group == asker or group not in self._guaranteed or self.over(group) >= size
            for group, size in lost.items()
        )

    def _evictor(self, slot_class: SlotClass, group: int) -> Evictor:
        evictors = self._evictors.setdefault(slot_class, {})
        evictor = evictors.get(group)
        if evictor is None:
            evictor = evictors[group] = self._make_evictor(self._occupancy)
        return evictor
