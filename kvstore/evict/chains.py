"""Chains: what one request was the last to use, as long as it is resident, and shortly after."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.block import HASH_BYTES, SlotArray

NOBODY = 0
NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)
_ANCHORS = 3
"""Last blocks by which a chain is known again when it is gone; the very last one is rarely full."""
ALL_OF_IT = 1 << 30


@dataclass(slots=True, eq=False)
class Chain:
    """Blocks [first, length) of a prompt.

    ``time`` is when it was used, ``idle`` for how many seconds nobody was expected from then on, ``born``
    when the first of those was used that it goes on from. ``fresh`` of its last blocks nobody had asked for
    before, ALL_OF_IT where that is all of them. ``slots`` are those that are resident, from ``first`` on;
    ``planned`` is how far it was let in. ``row`` is where it is watched, None when it is not. ``gate`` is the
    slot of its last block while that has children of other chains, else None. ``whole`` says that it is worth
    the same whatever its end lacks; ``lost`` that nothing of it can be reached. ``favour`` is the factor of
    its priority.
    """

    number: int
    time: float
    length: int
    turn: int
    kind: int
    row: int | None
    born: float
    fresh: int = ALL_OF_IT
    idle: float = 0.0
    first: int = 0
    planned: int = 0
    slots: SlotArray = field(default_factory=lambda: NO_SLOTS)
    anchors: list[int] = field(default_factory=list)
    awaits: bytes | None = None
    gate: int | None = None
    whole: bool = False
    lost: bool = False
    favour: float = 1.0

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
        self.await_block(chain, None)
        self._unname(chain)
        del self.by_number[chain.number]

    def name(self, chain: Chain, keys: list[int], known: int) -> None:
        """Know a chain by its last blocks, and by one that whoever goes on from it uses too.

        ``keys`` are those of the prompt. Where its first ``known`` blocks were known before, that is where
        prompts part; else it is the middle, as to use less is not to go on from it.
        """
        self._unname(chain)
        middle = known - 1 if known else len(keys) // 2
        chain.anchors = [*keys[-_ANCHORS:], keys[middle]]
        self._anchored.update(dict.fromkeys(chain.anchors, chain.number))

    def rename(self, chain: Chain, hashes: bytes) -> None:
        """A chain ends with these blocks now."""
        kept = chain.anchors[-1:]
        self._unname(chain)
        chain.anchors = [*keys_of(hashes[-_ANCHORS * HASH_BYTES :]), *kept]
        self._anchored.update(dict.fromkeys(chain.anchors, chain.number))

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

    def _unname(self, chain: Chain) -> None:
        for anchor in chain.anchors:
            if self._anchored.get(anchor) == chain.number:
                del self._anchored[anchor]


def keys_of(hashes: bytes) -> list[int]:
    """Half of each hash: to take one chain for another costs a wrong guess, and next to never happens."""
    keys: list[int] = np.frombuffer(hashes, dtype="<u8")[::2].tolist()
    return keys
