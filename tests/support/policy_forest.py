"""Blocks as a pool keeps them, in the open: what is resident, how it hangs together, who is pinned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore.block import HASH_BYTES, SlotArray
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.hints import NO_HINTS, Hints

SLOTS = 40
ROOT = -1


def slots_of(*numbers: int) -> SlotArray:
    return np.array(numbers, dtype=np.int64)


def hashes_of(names: list[str]) -> bytes:
    return b"".join(name.encode().ljust(HASH_BYTES, b"\0") for name in names)


def prefixes(prompt: str) -> list[str]:
    """The names of a prompt's blocks: all letters up to each."""
    return [prompt[:end] for end in range(1, len(prompt) + 1)]


@dataclass
class Forest:
    """Does to a policy what a pool does to it, and checks what it gets back.

    ``last_used`` is, for each block, when it was used, and how deep it is; ``backwards`` hands slots out
    from the other end.
    """

    make_evictor: Callable[[Occupancy], Evictor]
    backwards: bool = False
    parent: dict[str, str] = field(default_factory=dict)
    slot: dict[str, int] = field(default_factory=dict)
    last_used: dict[str, tuple[int, int]] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.occupancy = Occupancy(
            children=np.zeros(SLOTS, dtype=np.int32),
            parent=np.full(SLOTS, ROOT, dtype=np.int32),
            pins=np.zeros(SLOTS, dtype=np.int32),
        )
        self.evictor = self.make_evictor(self.occupancy)

    def request(self, prompt: str, hints: Hints = NO_HINTS) -> int:
        """Use a prompt's blocks and bring those that are missing, once there is room; those it hit."""
        names = prefixes(prompt)
        hits = sum(name in self.slot for name in names)
        while len(self.slot) + len(names) - hits > SLOTS:
            self.evict(1)
            hits = sum(name in self.slot for name in names)
        self.now += 1
        found = slots_of(*(self.slot[name] for name in names[:hits]))
        self.evictor.touch(Touch(hashes_of(names), found, hits, float(self.now), hints))
        for name in names[hits:]:
            self.add(name)
        for depth, name in enumerate(names):
            self.last_used[name] = (self.now, -depth)
        if hits < len(names):
            fresh = slots_of(*(self.slot[name] for name in names[hits:]))
            behind = int(found[-1]) if hits else ROOT
            self.evictor.add(fresh, hashes_of(names[hits:]), behind, float(self.now))
        return hits

    def add(self, name: str) -> None:
        free = set(range(SLOTS)) - set(self.slot.values())
        slot = max(free) if self.backwards else min(free)
        self.slot[name] = slot
        parent = self.slot.get(name[:-1], ROOT)
        self.occupancy.parent[slot] = parent
        if parent != ROOT:
            self.occupancy.children[parent] += 1

    def remove(self, name: str) -> None:
        slot = self.slot.pop(name)
        del self.last_used[name]
        assert not self.children(name), "a block was taken from under its children"
        parent = self.occupancy.parent[slot]
        if parent != ROOT:
            self.occupancy.children[parent] -= 1
        self.occupancy.parent[slot] = ROOT

    def lose(self, name: str) -> None:
        """Remove a block from under its children, as a pool does when it is corrupt or reclaimed."""
        slot = self.slot[name]
        orphans = slots_of(*(self.slot[child] for child in self.children(name)))
        self.evictor.forget(slots_of(slot))
        self.occupancy.parent[orphans] = ROOT
        self.occupancy.children[slot] = 0
        if self.occupancy.parent[slot] != ROOT:
            self.occupancy.children[self.occupancy.parent[slot]] -= 1
        self.occupancy.parent[slot] = ROOT
        del self.slot[name], self.last_used[name]
        self.evictor.orphan(orphans)

    def evict(self, count: int) -> list[str]:
        """Free ``count`` blocks as a pool does, and say which."""
        names = {slot: name for name, slot in self.slot.items()}
        freed: list[str] = []
        while len(freed) < count:
            victims = self.evictor.victims(count - len(freed)).tolist()
            if not victims:
                break
            assert len(victims) <= count - len(freed)
            for slot in victims:
                assert self.occupancy.pins[slot] == 0, "what is pinned was offered"
                self.remove(names[slot])
                freed.append(names[slot])
        return freed

    def pin(self, name: str) -> None:
        self.occupancy.pins[self.slot[name]] += 1

    def unpin(self, name: str) -> None:
        self.occupancy.pins[self.slot[name]] -= 1

    def leaves(self) -> list[str]:
        """Blocks that may go."""
        return [name for name in self.slot if not self.children(name)]

    def expected(self) -> str:
        """The leaf that was used longest ago; of one request's blocks, the deepest."""
        return min(self.leaves(), key=self.last_used.__getitem__)

    def children(self, name: str) -> list[str]:
        return [each for each in self.slot if each[:-1] == name]
