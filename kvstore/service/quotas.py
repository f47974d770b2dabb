"""Shares of the pools that tenants are guaranteed."""

from __future__ import annotations

import sys
from typing import NamedTuple

from kvstore.quantity import format_bytes
from kvstore.service.errors import InvalidRequestError, NotPossibleError
from kvstore.service.namespaces import Namespaces
from kvstore.service.tenants import Tenants
from kvstore.store import TieredStore

_SHARED = 0


class TenantUse(NamedTuple):
    """A tenant, what it is guaranteed and what it has, in bytes."""

    name: str
    share_bytes: int
    ready_bytes: int


class Quotas:
    """A group of the pool for each tenant that is guaranteed something; the others share one."""

    def __init__(self, store: TieredStore, namespaces: Namespaces, tenants: Tenants | None) -> None:
        self._pool = store.host.pool
        self._store = store
        self._namespaces = namespaces
        self._shares = {tenant.name: tenant.share_bytes for tenant in (tenants or ())}
        self._groups: dict[str, int] = {}
        for name, share_bytes in self._shares.items():
            if share_bytes:
                self._guarantee(name, share_bytes)

    def group_of(self, tenant: str) -> int:
        """The pool's number for whose blocks these are."""
        return self._groups.get(tenant, _SHARED)

    def set(self, tenant: str, share_bytes: int) -> None:
        """Guarantee a tenant other than before. NotPossibleError where the pool has not as much."""
        if tenant not in self._shares:
            known = ", ".join(map(repr, sorted(self._shares))) or "none: the server has no tenants"
            raise InvalidRequestError(
                f"tenant {tenant!r} is not known, expected one of {known}; correct the name"
            )
        total = sum(self._shares.values()) - self._shares[tenant] + share_bytes
        if total > self._pool.limit_bytes:
            raise NotPossibleError(
                f"{format_bytes(share_bytes)} for {tenant!r} make {format_bytes(total)} of guarantees, the "
                f"pool has {format_bytes(self._pool.limit_bytes)}; lower this or another share, or raise "
                "pool_bytes"
            )
        self._shares[tenant] = share_bytes
        self._guarantee(tenant, share_bytes)
        self._regroup()

    def replace(self, tenants: Tenants) -> None:
        """Guarantee what ``tenants`` say, and nothing else: what was ``set`` is over."""
        self._shares = {tenant.name: tenant.share_bytes for tenant in tenants}
        for name in {*self._groups, *self._shares}:
            share_bytes = self._shares.get(name, 0)
            if share_bytes or name in self._groups:
                self._guarantee(name, share_bytes)
        self._regroup()

    def stageable(self, tenant: str) -> int:
        """Bytes that a tenant may have staged: all but what others are guaranteed, if anything is."""
        others = sum(self._shares.values()) - self._shares.get(tenant, 0)
        return self._pool.limit_bytes - others if others else sys.maxsize

    def use(self) -> list[TenantUse]:
        """What each tenant has now."""
        ready = dict.fromkeys(self._shares, 0)
        for tier in self._store.memory:
            for space in tier.pool.spaces():
                tenant = self._namespaces.tenant_of(space.namespace)
                if tenant in ready:
                    ready[tenant] += len(space.ready) * space.payload_bytes
        return [TenantUse(name, share, ready[name]) for name, share in self._shares.items()]

    def _guarantee(self, tenant: str, share_bytes: int) -> None:
        group = self._groups.setdefault(tenant, len(self._groups) + 1)
        self._pool.guarantee(group, share_bytes)

    def _regroup(self) -> None:
        """Count every block for the tenant whose it is now."""
        for space in self._pool.spaces():
            tenant = self._namespaces.tenant_of(space.namespace)
            self._pool.regroup(space, _SHARED if tenant is None else self.group_of(tenant))
