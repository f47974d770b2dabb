"""What a sidecar shows of itself: metrics that its parts feed, and its health, on one HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kvstore.address import Address
from kvstore.block import TierName
from kvstore.metrics import CollectorRegistry, Metrics, Readings, ServiceMetrics, StoreGauges, render
from kvstore.store import TieredStore
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier
from kvstore.web.pages import Questions, Readiness, State
from kvstore.web.server import WebServer


class Monitor:
    """The counters of one server, and the pages that show them."""

    def __init__(
        self,
        model_of: Callable[[bytes], str],
        *,
        version: str,
        clients: Callable[[], int],
        unread_bytes: Mapping[TierName, int],
    ) -> None:
        """``clients`` and ``unread_bytes`` as in ``ServiceMetrics`` and ``Metrics``."""
        self._registry = CollectorRegistry()
        self.metrics = Metrics(self._registry, model_of, unread_bytes)
        self.service = ServiceMetrics(self._registry, version=version, clients=clients)
        self.state = State.LOADING
        self._web: WebServer | None = None

    def start(
        self, address: Address | None, store: TieredStore, redis: Tier, clock: Callable[[], float]
    ) -> str | None:
        """Answer HTTP from now on; where, None when no address is wanted. Called on the store's loop."""
        self._registry.register(StoreGauges(_readings(store, redis)))
        if address is None:
            return None

        async def metrics(accept: str) -> tuple[bytes, str]:
            return render(self._registry, accept)

        async def readiness() -> Readiness:
            return Readiness(self.state, store.status())

        self._web = WebServer(address, Questions(metrics, readiness), asyncio.get_running_loop(), clock=clock)
        self._web.start()
        return f"http://{Address(host=address.host, port=self._web.port)}"

    async def stop(self) -> None:
        """Close the port; its threads may still wait for the loop, so that goes on meanwhile."""
        if self._web is not None:
            await asyncio.to_thread(self._web.close)


def _readings(store: TieredStore, redis: Tier) -> Readings:
    real = redis if isinstance(redis, RedisTier) else None
    return Readings(
        usage=store.usage,
        leases=lambda: store.leases,
        tiers=store.status,
        redis_errors=real.errors if real else dict,
        redis_breakers=real.breakers if real else dict,
        redis_queue_bytes=lambda: store.queued_bytes,
        listener_failures=lambda: store.listener_failures,
    )
