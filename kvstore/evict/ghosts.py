"""What is remembered of blocks that were evicted: a bounded list, oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvstore.block import HASH_BYTES


class Ghosts:
    """A number for each of the blocks that were evicted last, by hash."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    def put(self, name: bytes, number: int = 0) -> None:
        """The block was evicted just now."""
        self._by_name[name] = number
        self._by_name.move_to_end(name)

    def pop(self, name: bytes, default: int) -> int:
        """The block is back: its number, ``default`` where it is not remembered."""
        return self._by_name.pop(name, default)

    def trim(self, most: int) -> None:
        """Forget all but the latest ``most``."""
        while len(self._by_name) > max(0, most):
            self._by_name.popitem(last=False)


def names_of(hashes: bytes) -> list[bytes]:
    """Packed hashes as keys."""
    names: list[bytes] = np.frombuffer(hashes, dtype=f"V{HASH_BYTES}").tolist()
    return names
