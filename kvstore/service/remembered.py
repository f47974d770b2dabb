"""A bounded memory of keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class Remembered:
    """The last keys that were added, at most ``size`` of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def add(self, key: Hashable) -> None:
        self._keys[key] = None
        if len(self._keys) > self._size:
            self._keys.popitem(last=False)
