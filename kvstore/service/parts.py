"""What the services of one server share."""

from __future__ import annotations

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
