"""Chains: what one request was the last to use, as long as it is resident, and shortly after."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.block import HASH_BYTES, SlotArray

NOBODY = 0
NO_SLOTS: SlotArray = np.zeros(0, dtype=np.int64)
_ANCHORS = 3
"""Last blocks by which a chain is known again when it is gone; the very last one is rarely full."""


@dataclass(slots=True, eq=False)
class Chain:
    """Blocks [first, length) of a prompt.

    ``slots`` are those that are resident, from ``first`` on; ``planned`` is how far it was let in.
    ``row`` is where it is watched, None when it is not. ``gate`` is the slot of its last block while that
    has children of other chains, else None. ``whole`` says that it is worth the same whatever its end lacks;
    ``lost`` that nothing of it can be reached.
    """

    number: int
    time: float
    length: int
    turn: int
    kind: int
    row: int | None
    first: int = 0
    planned: int = 0
    slots: SlotArray = field(default_factory=lambda: NO_SLOTS)
    anchors: list[bytes] = field(default_factory=list)
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


class Chains:
    """Chains by number, oldest use first; by the block that one gets next; by those that one ended with."""

    def __init__(self) -> None:
        self.by_number: dict[int, Chain] = {}
        self._anchored: dict[bytes, int] = {}
        self._awaited: dict[bytes, int] = {}
        self._next = NOBODY + 1

    def __len__(self) -> int:
        return len(self.by_number)

    def open(self, time: float, length: int, turn: int, kind: int, row: int | None) -> Chain:
        """A new chain, used last of all."""
        chain = Chain(self._next, time, length, turn, kind, row, planned=length)
        self.by_number[chain.number] = chain
        self._next += 1
        return chain

    def renew(self, chain: Chain) -> None:
        """It is as if it had been used last of all."""
        self.by_number[chain.number] = self.by_number.pop(chain.number)

    def close(self, chain: Chain) -> None:
        """Forget a chain."""
        self.await_block(chain, None)
        self._unname(chain)
        del self.by_number[chain.number]

    def name(self, chain: Chain, hashes: bytes) -> None:
        """Know a chain by the last of these blocks, with which it ends."""
        self._unname(chain)
        tail = hashes[-_ANCHORS * HASH_BYTES :]
        chain.anchors = [tail[at : at + HASH_BYTES] for at in range(0, len(tail), HASH_BYTES)]
        self._anchored.update(dict.fromkeys(chain.anchors, chain.number))

    def deepest(self, hashes: bytes) -> tuple[int, Chain] | None:
        """The last of these blocks with which a chain ended, and that chain."""
        names: list[bytes] = np.frombuffer(hashes, dtype=f"V{HASH_BYTES}").tolist()
        if self._anchored.keys().isdisjoint(names):
            return None
        place = max(place for place, name in enumerate(names) if name in self._anchored)
        return place, self.by_number[self._anchored[names[place]]]

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
