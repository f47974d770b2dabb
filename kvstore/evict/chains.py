"""Chains: what one request was the last to use, as long as it is resident, and shortly after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.block import HASH_BYTES, SlotArray
from kvstore.evict.columns import NOBODY

NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)
_ANCHORS = 3
"""Last blocks by which a chain is known again when it is gone; the very last one is rarely full."""
ALL_OF_IT = 1 << 30


@dataclass(slots=True, eq=False)
class Chain:
    """Blocks [first, length) of a prompt.

    ``time`` is when it was used, ``born`` when the first of those was used that it goes on from. ``fresh`` of
    its last blocks nobody had asked for before, ALL_OF_IT where that is all of them. ``slots`` are those that
    are resident, from ``first`` on; ``planned`` is how far it was let in. ``row`` is its row of columns.
    ``gate`` is the slot of its last block while that has children of other chains, else None. ``whole`` says
    that it is worth the same whatever its end lacks; ``lost`` that nothing of it can be reached.
    """

    number: int
    time: float
    length: int
    turn: int
    born: float
    slots: SlotArray
    fresh: int = ALL_OF_IT
    first: int = 0
    planned: int = 0
    row: int = -1
    anchors: Sequence[int] = ()
    awaits: bytes | None = None
    gate: int | None = None
    whole: bool = False
    lost: bool = False

    @property
    def end(self) -> int:
        """Where the resident part ends."""
        return self.first + len(self.slots)

    @property
    def missing(self) -> int:
        """Blocks at its end that are not resident."""
        return self.length - self.first - len(self.slots)

    def grow(self, blocks: int) -> None:
        """The prompt goes on: so many blocks more, which nobody had asked for before."""
        self.length += blocks
        self.planned += blocks
        self.fresh += blocks


class Chains:
    """Chains by number, oldest use first; by the block that one gets next; by blocks that tell one."""

    def __init__(self) -> None:
        self.by_number: dict[int, Chain] = {}
        self._anchored: dict[int, int] = {}
        self._awaited: dict[bytes, int] = {}
        self.next = NOBODY + 1

    def __len__(self) -> int:
        return len(self.by_number)

    def enter(self, chain: Chain) -> None:
        """A new chain, used last of all, whose number is ``next``."""
        self.by_number[chain.number] = chain
        self.next += 1

    def renew(self, chain: Chain) -> None:
        """It is as if it had been used last of all."""
        self.by_number[chain.number] = self.by_number.pop(chain.number)

    def close(self, chain: Chain) -> None:
        """Forget a chain."""
        if chain.awaits is not None:
            self.await_block(chain, None)
        self._unname(chain)
        del self.by_number[chain.number]

    def name(self, chain: Chain, keys: list[int], known: int) -> None:
        """Know a new chain by its last blocks, and by one that whoever goes on from it uses too.

        ``keys`` are those of the prompt. Where its first ``known`` blocks were known before, that is where
        prompts part; else it is the middle, as to use less is not to go on from it.
        """
        middle = known - 1 if known else len(keys) // 2
        self._anchor(chain, (*keys[-_ANCHORS:], keys[middle]))

    def rename(self, chain: Chain, hashes: bytes) -> None:
        """A chain ends with these blocks now."""
        kept = chain.anchors[-1:]
        self._unname(chain)
        self._anchor(chain, (*keys_of(hashes[-_ANCHORS * HASH_BYTES :]), *kept))

    def deepest(self, keys: list[int]) -> tuple[int, Chain] | None:
        """The last of these blocks by which a chain is known, and that chain."""
        anchored = self._anchored
        if anchored.keys().isdisjoint(keys):
            return None
        place = next(place for place in range(len(keys) - 1, -1, -1) if keys[place] in anchored)
        return place, self.by_number[anchored[keys[place]]]

    def ending(self, hashes: bytes) -> Chain | None:
        """The chain of this very prompt."""
        number = self._anchored.get(keys_of(hashes[-HASH_BYTES:])[0], NOBODY)
        chain = self.by_number.get(number)
        return chain if chain is not None and chain.length * HASH_BYTES == len(hashes) else None

    def await_block(self, chain: Chain, name: bytes | None) -> None:
        """The block that a chain gets next, by which it is found when that is added."""
        if chain.awaits is not None and self._awaited.get(chain.awaits) == chain.number:
            del self._awaited[chain.awaits]
        chain.awaits = name
        if name is not None:
            self._awaited[name] = chain.number

    def awaiting(self, name: bytes) -> Chain | None:
        """Whoever asked last for a block that was not there."""
        return self.by_number.get(self._awaited.get(name, NOBODY))

    def _anchor(self, chain: Chain, keys: tuple[int, ...]) -> None:
        chain.anchors = keys
        for key in keys:
            self._anchored[key] = chain.number

    def _unname(self, chain: Chain) -> None:
        for anchor in chain.anchors:
            if self._anchored.get(anchor) == chain.number:
                del self._anchored[anchor]


def keys_of(hashes: bytes) -> list[int]:
    """Half of each hash: to take one chain for another costs a wrong guess, and next to never happens."""
    return memoryview(hashes).cast("Q")[::2].tolist()
