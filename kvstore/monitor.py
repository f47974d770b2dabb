"""What a sidecar shows of itself: metrics that its parts feed, and its health, on one HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kvstore.address import Address
from kvstore.block import TierName
from kvstore.metrics import CollectorRegistry, Metrics, Readings, ServiceMetrics, StoreGauges, render
from kvstore.service.owner import Owner
from kvstore.store import TieredStore
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier
from kvstore.web.pages import Questions, Readiness, State
from kvstore.web.server import WebServer


class Monitor:
    """The counters of one server, and the pages that show them."""

    def __init__(self, model_of: Callable[[bytes], str], *, version: str, clients: Callable[[], int]) -> None:
        """``model_of`` and ``clients`` as in ``Metrics`` and ``ServiceMetrics``."""
        self._registry = CollectorRegistry()
        self._model_of = model_of
        self.service = ServiceMetrics(self._registry, version=version, clients=clients)
        self.state: Callable[[], State] = lambda: State.LOADING
        self._store: TieredStore | None = None
        self._web: WebServer | None = None

    def listener(self, unread_bytes: Mapping[TierName, int]) -> Metrics:
        """What counts the store's events; ``unread_bytes`` were there before the first. Made once."""
        return Metrics(self._registry, self._model_of, unread_bytes)

    def bind(self, address: Address | None, clock: Callable[[], float]) -> str | None:
        """Answer HTTP from now on; where, None when no address is wanted. Called on the owner's loop."""
        if address is None:
            return None

        async def metrics(accept: str) -> tuple[bytes, str]:
            return render(self._registry, accept)

        async def readiness() -> Readiness:
            return Readiness(self.state(), {} if self._store is None else self._store.status())

        questions = Questions(metrics, readiness)
        self._web = WebServer(address, questions, asyncio.get_running_loop(), clock=clock)
        self._web.start()
        return f"http://{Address(host=address.host, port=self._web.port)}"

    def attach(self, store: TieredStore, redis: Tier, owner: Owner) -> None:
        """Show what a store says of itself from now on."""
        self._store = store
        self._registry.register(StoreGauges(_readings(store, redis, owner)))

    def close(self) -> None:
        """Close the port; its threads give up on a loop that does not answer any more. Idempotent."""
        if self._web is not None:
            self._web.close()

    async def stop(self) -> None:
        """Close the port; its threads may still wait for the loop, so that goes on meanwhile."""
        await asyncio.to_thread(self.close)


def _readings(store: TieredStore, redis: Tier, owner: Owner) -> Readings:
    real = redis if isinstance(redis, RedisTier) else None
    return Readings(
        usage=store.usage,
        leases=lambda: store.leases,
        tiers=store.status,
        redis_errors=real.errors if real else dict,
        redis_breakers=real.breakers if real else dict,
        redis_queue_bytes=lambda: store.queued_bytes,
        listener_failures=lambda: store.listener_failures,
        background_failures=lambda: owner.failures,
    )
