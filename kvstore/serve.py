"""The sidecar as a whole: tiers, store, gRPC server and HTTP port, from one configuration."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvstore.assemble import open_host, open_redis, store_options
from kvstore.config import Config, LoadedConfig
from kvstore.events import Event
from kvstore.failpoints import Failpoint, no_failpoint
from kvstore.monitor import Monitor
from kvstore.service.admin import AdminService
from kvstore.service.adopted import register_adopted
from kvstore.service.blocks import BlockService
from kvstore.service.clients import ClientLimits, Clients
from kvstore.service.events import EventLog, Totals
from kvstore.service.gate import Gate
from kvstore.service.lookup import LookupService
from kvstore.service.namespaces import Namespaces
from kvstore.service.owner import Owner, Wake
from kvstore.service.parts import ServiceParts
from kvstore.service.quotas import Quotas
from kvstore.service.server import Server, server_credentials
from kvstore.service.tenants import Tenants, load_tenants
from kvstore.store import TieredStore, Tiers
from kvstore.store.inventory import unread_bytes
from kvstore.web.pages import State

PACKAGE = "prefix-kvstore"
_DRAIN_POLL_SECONDS = 0.02
_LAST_WORDS_SECONDS = 0.1
"""For answers that are on their way; health watches never end by themselves."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """What a server says once it serves: where, and from which memory. ``http`` None where it has no port."""

    addresses: list[str]
    http: str | None
    pool_path: str
    pool_bytes: int
    epoch: int
    adopted_blocks: int
    pool: str


@dataclass(frozen=True, slots=True)
class Clocks:
    """``monotonic`` is for deadlines, and comparable between processes; ``wall`` for what expires by date."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


def run(
    loaded: LoadedConfig,
    clocks: Clocks,
    announce: Callable[[Serving], None],
    failpoint: Failpoint = no_failpoint,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises KVStoreError where it cannot begin."""
    asyncio.run(_serve(loaded.config, clocks, announce, failpoint))


async def _serve(
    config: Config, clocks: Clocks, announce: Callable[[Serving], None], failpoint: Failpoint
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with ExitStack() as opened:
        tenants = load_tenants(config.tenants_file) if config.tenants_file else None
        if tenants is not None:
            tenants.check_shares(config.pool_bytes)
        sidecar = Sidecar(config, clocks, tenants, failpoint, opened)
        announce(await sidecar.start())
        await stop.wait()
        _log.info("draining for up to %g s", config.drain_seconds)
        await sidecar.stop()


def _installed_version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "not installed"


class Sidecar:
    """One server, from its configuration to its end. Used on one event loop."""

    def __init__(
        self,
        config: Config,
        clocks: Clocks,
        tenants: Tenants | None,
        failpoint: Failpoint,
        opened: ExitStack,
    ) -> None:
        """Opens the tiers; ``opened`` closes them, whatever happens later."""
        self._config = config
        self._version = _installed_version()
        credentials = None
        if config.tls_cert is not None and config.tls_key is not None:
            credentials = server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
        clock = clocks.monotonic
        host = open_host(config, clock, failpoint)
        opened.callback(host.close)
        redis = open_redis(config, clock)
        opened.callback(redis.close)
        wake, namespaces = Wake(), Namespaces()
        self._monitor = Monitor(
            namespaces.model_of,
            version=self._version,
            clients=lambda: len(self._parts.clients),
            unread_bytes={host.name: unread_bytes(host.pool)},
        )
        self._log, self._totals = EventLog(), Totals()
        listeners: tuple[Callable[[Event], None], ...] = (self._monitor.metrics, self._log, self._totals)
        self._store = TieredStore(
            Tiers(host, redis=redis),
            clock=clock,
            options=store_options(config, readers_verify=True),
            listeners=listeners,
            wake=wake,
            failpoint=failpoint,
        )
        opened.callback(self._store.close)
        self._host, self._redis = host, redis
        limits = ClientLimits(config.client_leases, config.client_staged_bytes, config.client_streams)
        clients = Clients(self._store, host.file.epoch, limits, clock)
        self._gate = Gate(tenants, self._monitor.service, clock=clock, wall_clock=clocks.wall)
        self._owner = Owner(self._store, wake, lambda: clients.sweep(host.client_alive), clock)
        quotas = Quotas(self._store, namespaces, tenants)
        if host.file.inherited is not None:
            register_adopted(self._store, host.file.inherited.names, namespaces, quotas, tenants)
        self._parts = ServiceParts(
            self._gate, self._store, self._owner, namespaces, clients, quotas, failpoint
        )
        self._server = Server(
            LookupService(self._parts),
            BlockService(self._parts),
            AdminService(self._parts, self._log, self._totals, self._version),
            credentials,
        )

    async def start(self) -> Serving:
        """Serve; where. ConfigError where an address cannot be had."""
        host, config = self._host, self._config
        # Clients are served from the first extent on; the others follow while they are.
        host.pool.extents.reserve_next()
        self._owner.start()
        http = self._monitor.start(config.http_listen, self._store, self._redis, self._owner.now)
        addresses = await self._server.start(config.listen)
        self._monitor.state = State.SERVING
        return Serving(
            addresses=addresses,
            http=http,
            pool_path=str(config.pool_path),
            pool_bytes=host.pool.limit_bytes,
            epoch=host.file.epoch,
            adopted_blocks=host.adopted.blocks,
            pool=host.adopted.reason,
        )

    async def stop(self) -> None:
        """Turn new calls away, let those that run end, hand what is queued to redis, and stop."""
        self._monitor.state = State.DRAINING
        self._gate.draining = True
        self._log.close()
        await self._server.drain()
        ends_at = self._owner.now() + self._config.drain_seconds
        # What clients hold they may give back, and what they have begun they may end.
        while self._is_needed and self._owner.now() < ends_at:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self._server.stop(_LAST_WORDS_SECONDS)
        while not self._store.idle and self._owner.now() < ends_at:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self._owner.stop()
        await self._monitor.stop()

    @property
    def _is_needed(self) -> bool:
        return bool(self._store.leases or self._store.writes or self._gate.running)
