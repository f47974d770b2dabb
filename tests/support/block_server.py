"""A sidecar's block service in this process, so that a test sees what its store and policies were told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from kvstore.block import TierName
from kvstore.events import Listener
from kvstore.evict.base import Evictor, Occupancy
from kvstore.failpoints import no_failpoint
from kvstore.service.blocks import BlockService
from kvstore.service.clients import ClientLimits, Clients
from kvstore.service.gate import Gate
from kvstore.service.namespaces import Namespaces
from kvstore.service.owner import Owner, Wake
from kvstore.service.parts import ServiceParts
from kvstore.service.quotas import Quotas
from kvstore.store import StoreOptions, TieredStore, Tiers
from kvstore.tiers.host import HostTier
from kvstore.tiers.null import NullTier
from kvstore.v1 import block_pb2_grpc
from tests.support.stores import EXTENT_BYTES

SECONDS = 10.0


class Nobody:
    """Counts no call."""

    def rpc(self, rpc: str, outcome: str, seconds: float) -> None:
        pass

    def refused(self, limit: str) -> None:
        pass


@contextmanager
def block_server(
    folder: Path, make_evictor: Callable[[Occupancy], Evictor], *listeners: Listener
) -> Iterator[str]:
    """A server with one extent of host memory and no redis; its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    host = HostTier(
        folder / "pool",
        pool_bytes=EXTENT_BYTES,
        extent_bytes=EXTENT_BYTES,
        make_evictor=make_evictor,
        clock=time.monotonic,
    )
    wake, options = Wake(), StoreOptions(readers_verify=True)
    tiers = Tiers(host, remote=NullTier(TierName.REDIS))
    store = TieredStore(tiers, clock=time.monotonic, options=options, listeners=listeners, wake=wake)
    end = asyncio.run_coroutine_threadsafe(_serve(store, wake, folder), loop).result(SECONDS)
    try:
        yield f"unix:{folder}/socket"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()
        store.check()
        store.close()


async def _serve(store: TieredStore, wake: Wake, folder: Path) -> Callable[[], Coroutine[None, None, None]]:
    async def healthy() -> None:
        pass

    gate = Gate(None, Nobody(), clock=time.monotonic, wall_clock=time.time)
    namespaces = Namespaces()
    quotas = Quotas(store, namespaces, None)
    clients = Clients(store, store.host.file.epoch, ClientLimits(), time.monotonic, quotas.stageable)
    owner = Owner(store, wake, lambda: clients.sweep(store.host.client_alive), time.monotonic, healthy)
    parts = ServiceParts(gate, store, owner, namespaces, clients, quotas, no_failpoint)
    server = grpc.aio.server()
    block_pb2_grpc.add_BlockServiceServicer_to_server(BlockService(parts), server)
    server.add_insecure_port(f"unix:{folder}/socket")
    owner.start()
    await server.start()

    async def end() -> None:
        await server.stop(None)
        await owner.stop()

    return end
