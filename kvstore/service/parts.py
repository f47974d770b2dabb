"""What the services of one server share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from kvstore.failpoints import Failpoint
from kvstore.service.clients import Clients
from kvstore.service.gate import Gate
from kvstore.service.namespaces import Namespaces
from kvstore.service.owner import Owner
from kvstore.service.quotas import Quotas
from kvstore.store import TieredStore


@dataclass(frozen=True, slots=True, eq=False)
class ServiceParts:
    """The store, its owner, and who may ask what of it."""

    gate: Gate
    store: TieredStore
    owner: Owner
    namespaces: Namespaces
    clients: Clients
    quotas: Quotas
    failpoint: Failpoint


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
