"""The tenants file of a server that runs: read again when somebody says that it has changed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.service.parts import ServiceParts
from kvstore.service.tenants import Tenants, load_tenants

_log = logging.getLogger(__name__)


class TenantsFile:
    """Read at the start, and each time that ``changed`` is set. Used on one event loop."""

    def __init__(self, path: Path, pool_bytes: int) -> None:
        self.changed = asyncio.Event()
        """Set by whoever has changed it."""
        self._path = path
        self._pool_bytes = pool_bytes

    def read(self) -> Tenants:
        """ConfigError where it, or a file that it names, is not as it should be."""
        tenants = load_tenants(self._path)
        tenants.check_shares(self._pool_bytes)
        return tenants

    async def follow(self, parts: ServiceParts) -> None:
        """Wait for one change, and let it hold; where the file is not right, what it said before does."""
        await self.changed.wait()
        self.changed.clear()
        try:
            tenants = await asyncio.to_thread(self.read)
        except ConfigError as error:
            problems = "; ".join(str(error).splitlines())
            _log.error("the tenants are still those that were read before: %s", problems)
            return
        gone, came = _replace(parts, tenants)
        _log.info(
            "%s is read again: %d tenants; new: %s; gone: %s",
            self._path,
            len([*tenants]),
            ", ".join(came) or "none",
            ", ".join(gone) or "none",
        )


def _replace(parts: ServiceParts, tenants: Tenants) -> tuple[list[str], list[str]]:
    """From now on these are the tenants; the names of those that are gone, and of those that are new.

    One whose salt is another counts as gone and new: what its namespaces and pins hold is not its own
    any more.
    """
    before = {tenant.name: tenant.salt for tenant in parts.gate.tenants or ()}
    now = {tenant.name: tenant.salt for tenant in tenants}
    gone = sorted(name for name, salt in before.items() if now.get(name) != salt)
    came = sorted(name for name, salt in now.items() if before.get(name) != salt)
    parts.gate.tenants = tenants
    for name in gone:
        parts.namespaces.forget(name)
        for pin in parts.store.pins():
            if pin.name.startswith(f"{name}/"):
                parts.store.unpin(pin.name)
    parts.quotas.replace(tenants)
    return gone, came
