"""Namespaces of the blocks that were taken over: known again before anybody registers them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvstore.adopt import Names
from kvstore.service.codec import Parallelism
from kvstore.service.gate import NOBODY
from kvstore.service.namespaces import Namespaces
from kvstore.service.quotas import Quotas
from kvstore.service.tenants import Tenant, Tenants
from kvstore.spec import NamespaceSpec
from kvstore.store import TieredStore


def register_adopted(
    store: TieredStore, names: Names, namespaces: Namespaces, quotas: Quotas, tenants: Tenants | None
) -> None:
    """Register what ``names`` describes, for the tenant whose salt gives it its digest.

    What fits no tenant is nobody's by now: its blocks are found by no one, and evicted.
    """
    shards: dict[bytes, set[Parallelism]] = {}
    for space in store.host.pool.spaces():
        cut = Parallelism(space.shard.tp_size, space.shard.pp_size)
        shards.setdefault(space.namespace, set()).add(cut)
    for digest, spec in names:
        found = None if spec is None else _salted(digest, spec, tenants or (NOBODY,))
        if found is None:
            continue
        tenant, salted = found
        for cut in sorted(shards.get(digest, ())):
            store.register(salted, cut.shards, group=quotas.group_of(tenant.name))
            namespaces.add(tenant, salted, cut)


def _salted(
    digest: bytes, spec: NamespaceSpec, tenants: Iterable[Tenant]
) -> tuple[Tenant, NamespaceSpec] | None:
    for tenant in tenants:
        namespace = dataclasses.replace(spec.namespace, tenant_salt=tenant.salt)
        if namespace.root().digest == digest:
            return tenant, NamespaceSpec(namespace, spec.payload_bytes)
    return None
