"""What a sidecar shows of itself: metrics that its parts feed, and its health, on one HTTP port."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstore.address import Address
from kvstore.block import TierName
from kvstore.events import Listener
from kvstore.metrics import CollectorRegistry, Metrics, Readings, ServiceMetrics, StoreGauges, render
from kvstore.record import Recorder
from kvstore.service.owner import Owner
from kvstore.store import TieredStore
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier
from kvstore.web.history import History, Past, read
from kvstore.web.live import NAMESPACES_MAX, Live, SpaceUse
from kvstore.web.pages import Questions
from kvstore.web.readiness import Readiness, State
from kvstore.web.server import WebServer
from kvstore.whatif import WhatIf


class Beside(NamedTuple):
    """What listens to a store beside the counters."""

    what_if: WhatIf
    recorder: Recorder | None = None

    @property
    def listeners(self) -> tuple[Listener, ...]:
        return (self.what_if,) if self.recorder is None else (self.what_if, self.recorder)


class Monitor:
    """The counters of one server, and the pages that show them."""

    def __init__(self, model_of: Callable[[bytes], str], *, version: str, clients: Callable[[], int]) -> None:
        """``model_of`` and ``clients`` as in ``Metrics`` and ``ServiceMetrics``."""
        self._registry = CollectorRegistry()
        self._model_of = model_of
        self._version = version
        self._instance = uuid.uuid4().hex
        self.service = ServiceMetrics(self._registry, version=version, clients=clients)
        self.state: Callable[[], State] = lambda: State.LOADING
        self._store: TieredStore | None = None
        self._web: WebServer | None = None
        self._history: History | None = None

    def listener(self, unread_bytes: Mapping[TierName, int]) -> Metrics:
        """What counts the store's events; ``unread_bytes`` were there before the first. Made once."""
        return Metrics(self._registry, self._model_of, unread_bytes)

    def bind(self, address: Address | None, clock: Callable[[], float]) -> str | None:
        """Answer HTTP from now on; where, None when no address is wanted. Called on the owner's loop."""
        if address is None:
            return None

        loop, began = asyncio.get_running_loop(), clock()
        history = self._history = History(lambda: read(self._registry), clock)

        async def metrics(accept: str) -> tuple[bytes, str]:
            return render(self._registry, accept)

        async def readiness() -> Readiness:
            return self._readiness()

        async def live() -> Live:
            return self._live(clock() - began)

        async def past() -> tuple[str, Past]:
            return self._instance, history.past()

        self._web = WebServer(address, Questions(metrics, readiness, live, past), loop, clock=clock)
        self._web.start()
        history.start(loop)
        return f"http://{Address(host=address.host, port=self._web.port)}"

    def attach(self, store: TieredStore, redis: Tier, owner: Owner, beside: Beside) -> None:
        """Show what a store, and what listens to it, say of themselves from now on."""
        self._store = store
        self._registry.register(StoreGauges(_readings(store, redis, owner, beside, self._model_of)))

    def close(self) -> None:
        """Close the port; its threads give up on a loop that does not answer any more. Idempotent.

        Called on the owner's loop, or after it.
        """
        self._stop_history()
        if self._web is not None:
            self._web.close()

    async def stop(self) -> None:
        """Close the port; its threads may still wait for the loop, so that goes on meanwhile."""
        self._stop_history()
        if self._web is not None:
            await asyncio.to_thread(self._web.close)

    def _stop_history(self) -> None:
        if self._history is not None:
            self._history.stop()

    def _readiness(self) -> Readiness:
        return Readiness(self.state(), {} if self._store is None else self._store.status())

    def _live(self, uptime_seconds: float) -> Live:
        return Live(
            self._instance,
            self._version,
            uptime_seconds,
            self._readiness(),
            read(self._registry),
            () if self._store is None else _largest_namespaces(self._store, self._model_of),
        )


def _readings(
    store: TieredStore, redis: Tier, owner: Owner, beside: Beside, model_of: Callable[[bytes], str]
) -> Readings:
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
        resident_bytes=lambda: _resident_bytes(store, model_of),
        what_if=beside.what_if.estimates,
        skipped_requests=lambda: {
            "whatif": beside.what_if.dropped,
            "recording": beside.recorder.dropped if beside.recorder else 0,
        },
    )


def _resident_bytes(store: TieredStore, model_of: Callable[[bytes], str]) -> dict[tuple[str, str], int]:
    """Payload bytes in each memory tier by model; tiers and models that have nothing are left out."""
    sizes: Counter[tuple[str, str]] = Counter()
    for tier in store.memory:
        for space in tier.pool.spaces():
            if space.ready:
                sizes[tier.name, model_of(space.namespace)] += len(space.ready) * space.payload_bytes
    return sizes


def _largest_namespaces(store: TieredStore, model_of: Callable[[bytes], str]) -> list[SpaceUse]:
    """Those with most bytes in the memory tiers, all ranks together."""
    blocks: Counter[bytes] = Counter()
    payload_bytes: Counter[bytes] = Counter()
    block_sizes: dict[bytes, int] = {}
    for tier in store.memory:
        for space in tier.pool.spaces():
            if space.ready:
                blocks[space.namespace] += len(space.ready)
                payload_bytes[space.namespace] += len(space.ready) * space.payload_bytes
                block_sizes[space.namespace] = space.slot_class.block_size
    return [
        SpaceUse(model_of(name), block_sizes[name], blocks[name], size)
        for name, size in payload_bytes.most_common(NAMESPACES_MAX)
    ]
