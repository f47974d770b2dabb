"""The sidecar as a whole: tiers, store, gRPC server and HTTP port, from one configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvstore.assemble import open_host, open_redis, policy_of, store_options
from kvstore.config import Config
from kvstore.end_signals import EndSignals
from kvstore.failpoints import Failpoint, no_failpoint
from kvstore.monitor import Beside, Monitor
from kvstore.pool import BlockPool
from kvstore.record import Recorder
from kvstore.service.admin import AdminService
from kvstore.service.adopted import register_adopted
from kvstore.service.blocks import BlockService
from kvstore.service.clients import ClientLimits, Clients
from kvstore.service.events import EventLog
from kvstore.service.gate import Gate
from kvstore.service.lookup import LookupService
from kvstore.service.namespaces import Namespaces
from kvstore.service.owner import Owner, Wake
from kvstore.service.parts import ServiceParts
from kvstore.service.quotas import Quotas
from kvstore.service.server import Server, server_credentials
from kvstore.service.tenants import Tenants, load_tenants
from kvstore.settings import LoadedConfig
from kvstore.store import TieredStore, Tiers
from kvstore.store.inventory import unread_bytes
from kvstore.tiers.base import Tier
from kvstore.version import installed_version
from kvstore.web.readiness import State
from kvstore.whatif import WhatIf

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
    signals = EndSignals()
    with ExitStack() as opened:
        tenants = load_tenants(config.tenants_file) if config.tenants_file else None
        if tenants is not None:
            tenants.check_shares(config.pool_bytes)
        sidecar = Sidecar(config, clocks, tenants, failpoint, opened)
        announce(await sidecar.start())
        await signals.stop.wait()
        await sidecar.stop(signals.hurry)


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
        """Takes the addresses, then opens the tiers; ``opened`` closes them, whatever happens later.

        In this order, so that a server that cannot be reached leaves the pool of the one before alone.
        """
        self._config = config
        self._version = installed_version()
        credentials = None
        if config.tls_cert is not None and config.tls_key is not None:
            credentials = server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
        clock, namespaces = clocks.monotonic, Namespaces()
        self._clock_began_at = clocks.wall() - clocks.monotonic()
        self._monitor = Monitor(
            namespaces.model_of, version=self._version, clients=lambda: len(self._parts.clients)
        )
        self._gate = Gate(tenants, self._monitor.service, clock=clock, wall_clock=clocks.wall)
        self._server = Server(self._gate, credentials)
        opened.callback(self._server.remove_sockets)
        self._addresses = self._server.bind(config.listen)
        self._http = self._monitor.bind(config.http_listen, clock)
        opened.callback(self._monitor.close)
        _warn_of_open_ports(config)
        self._recorder = _recorder(config, clocks)
        if self._recorder is not None:
            opened.callback(self._recorder.close)
        self._host = open_host(config, clock, failpoint)
        opened.callback(self._host.close)
        redis = open_redis(config, clock)
        opened.callback(redis.close)
        self._parts = self._wire(redis, namespaces, tenants, clock, failpoint)
        opened.callback(self._what_if.close)
        opened.callback(self._store.close)

    def _wire(
        self,
        redis: Tier,
        namespaces: Namespaces,
        tenants: Tenants | None,
        clock: Callable[[], float],
        failpoint: Failpoint,
    ) -> ServiceParts:
        config, host, wake = self._config, self._host, Wake()
        self._log = EventLog(clock_began_at=self._clock_began_at)
        self._metrics = self._monitor.listener({host.name: unread_bytes(host.pool)})
        self._what_if = WhatIf(policy_of(config), host.pool.limit_bytes, partial(_block_bytes, host.pool))
        beside = Beside(self._what_if, self._recorder)
        self._store = TieredStore(
            Tiers(host, redis=redis),
            clock=clock,
            options=store_options(config, readers_verify=True),
            listeners=(self._metrics, self._log, *beside.listeners),
            wake=wake,
            failpoint=failpoint,
        )
        limits = ClientLimits(config.client_leases, config.client_staged_bytes, config.client_streams)
        quotas = Quotas(self._store, namespaces, tenants)
        clients = Clients(self._store, host.file.epoch, limits, clock, quotas.stageable)
        sweep = partial(clients.sweep, host.client_alive)
        self._owner = Owner(self._store, wake, sweep, clock, self._tell)
        self._monitor.attach(self._store, redis, self._owner, beside)
        if host.file.inherited is not None:
            register_adopted(self._store, host.file.inherited.names, namespaces, quotas, tenants)
        return ServiceParts(self._gate, self._store, self._owner, namespaces, clients, quotas, failpoint)

    async def start(self) -> Serving:
        """Serve; where."""
        host, parts = self._host, self._parts
        # Clients are served from the first extent on; the others follow while they are.
        host.pool.extents.reserve_next()
        self._owner.start()
        admin = AdminService(parts, self._log, self._metrics, self._what_if, self._version)
        await self._server.start(LookupService(parts), BlockService(parts), admin)
        self._monitor.state = self._state
        return Serving(
            addresses=self._addresses,
            http=self._http,
            pool_path=str(self._config.pool_path),
            pool_bytes=host.pool.limit_bytes,
            epoch=host.file.epoch,
            adopted_blocks=host.adopted.blocks,
            pool=host.adopted.reason,
        )

    async def stop(self, hurry: asyncio.Event) -> None:
        """Turn new calls away, let those that run end, hand what is queued to redis, and stop.

        For at most ``drain_seconds``, or until ``hurry`` is set.
        """
        self._gate.draining = True
        self._log.close()
        await self._server.tell(serving=False)
        ends_at = self._owner.now() + self._config.drain_seconds
        if self._is_needed:
            _log.info(
                "draining for up to %g s: %d leases, %d writes, %d calls; a second signal ends it",
                self._config.drain_seconds,
                self._store.leases,
                self._store.writes,
                self._gate.running,
            )

        def in_time() -> bool:
            return self._owner.now() < ends_at and not hurry.is_set()

        # What clients hold they may give back, and what they have begun they may end.
        while self._is_needed and in_time():
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self._server.stop(_LAST_WORDS_SECONDS)
        while not self._store.idle and in_time():
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self._owner.stop()
        await self._monitor.stop()

    def _state(self) -> State:
        if self._gate.draining:
            return State.DRAINING
        return State.FAILING if self._owner.failing else State.SERVING

    async def _tell(self) -> None:
        """A background task died, or goes on."""
        await self._server.tell(serving=self._state() is State.SERVING)

    @property
    def _is_needed(self) -> bool:
        return bool(self._store.leases or self._store.writes or self._gate.running)


def _recorder(config: Config, clocks: Clocks) -> Recorder | None:
    if config.record_path is None:
        return None
    recorder = Recorder(
        config.record_path, config.record_max_bytes, clock=clocks.monotonic, wall_clock=clocks.wall
    )
    _log.info("requests are recorded in %s", recorder.path)
    return recorder


def _block_bytes(pool: BlockPool, namespace: bytes) -> int:
    """What a block takes of a pool on all ranks, its share of the unusable rest of extents included."""
    own = [space.slot_class for space in pool.spaces() if space.namespace == namespace]
    return sum(pool.limit_bytes // max(1, pool.extents.most_slots(slot_class)) for slot_class in own)


def _warn_of_open_ports(config: Config) -> None:
    for address in config.listen:
        if address.path is None and config.tenants_file is None:
            _log.warning(
                "every user of this machine can read and write blocks through %s: there is no tenants_file",
                address,
            )
