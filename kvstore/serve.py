"""The sidecar as a whole: tiers, store, gRPC server and HTTP port, from one configuration."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from kvstore.assemble import open_host, open_redis, policy_of, store_options
from kvstore.config import Config
from kvstore.end_signals import EndSignals
from kvstore.failpoints import Failpoint, no_failpoint
from kvstore.monitor import Beside, Monitor
from kvstore.record import Recorder
from kvstore.service.admin import AdminService
from kvstore.service.adopted import register_adopted
from kvstore.service.blocks import BlockService
from kvstore.service.clients import ClientLimits, Clients
from kvstore.service.events import EventLog
from kvstore.service.gate import Gate
from kvstore.service.listening import server_credentials
from kvstore.service.lookup import LookupService
from kvstore.service.namespaces import Namespaces
from kvstore.service.owner import Owner, Wake
from kvstore.service.parts import ServiceParts
from kvstore.service.quotas import Quotas
from kvstore.service.server import Server
from kvstore.service.tenants import Tenants
from kvstore.service.tenants_file import TenantsFile
from kvstore.settings import LoadedConfig
from kvstore.store import TieredStore, Tiers
from kvstore.store.inventory import unread_bytes
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier
from kvstore.version import installed_version
from kvstore.web.readiness import State
from kvstore.whatif import WhatIf

_DRAIN_POLL_SECONDS = 0.02
_LAST_WORDS_SECONDS = 0.1
"""For answers that are on their way; health watches never end by themselves."""
_REACH_SECONDS = 2.0
"""For one attempt to reach a redis that does not answer."""
_REACH_PAUSE_SECONDS = 1.0

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
    _log.info("ended")


async def _serve(
    config: Config, clocks: Clocks, announce: Callable[[Serving], None], failpoint: Failpoint
) -> None:
    signals = EndSignals()
    with ExitStack() as opened:
        file = TenantsFile(config.tenants_file, config.pool_bytes) if config.tenants_file else None
        if file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, file.changed.set)
        sidecar = Sidecar(config, clocks, None if file is None else file.read(), failpoint, opened)
        announce(await sidecar.start())
        if file is not None:
            sidecar.follow(file)
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
        self._sizes: dict[bytes, int] = {}
        self._recorder = _recorder(config, clocks, self._block_bytes)
        if self._recorder is not None:
            opened.callback(self._recorder.close)
        self._host = open_host(config, clock, failpoint)
        opened.callback(self._host.close)
        self._redis = open_redis(config, clock)
        opened.callback(self._redis.close)
        self._parts = self._wire(self._redis, namespaces, tenants, clock, failpoint)
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
        self._what_if = WhatIf(
            policy_of(config),
            host.pool.limit_bytes,
            self._block_bytes,
            idle_ttl_seconds=config.idle_ttl_seconds,
        )
        self._what_if.take_over(host.pool)
        beside = Beside(self._what_if, self._recorder)
        self._store = TieredStore(
            Tiers(host, remote=redis),
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
        await self._look_for_redis()
        admin = AdminService(parts, self._log, self._metrics, self._what_if, self._version)
        await self._server.start(LookupService(parts), BlockService(parts), admin)
        self._monitor.state = self._state
        _log.info("serving on %s; metrics and health: %s", ", ".join(self._addresses), self._http or "none")
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

    def follow(self, file: TenantsFile) -> None:
        """Let what the tenants file says hold, whenever it has changed."""
        self._owner.repeat("tenants", partial(file.follow, self._parts))

    async def _look_for_redis(self) -> None:
        """Try to reach redis now, and whenever it is given up: what is told of it is true without a request.

        Waits no longer than a request would.
        """
        redis = self._redis
        if not isinstance(redis, RedisTier):
            return
        tried = asyncio.Event()

        async def look() -> None:
            if not redis.reached:
                await asyncio.to_thread(redis.reach, self._owner.now() + _REACH_SECONDS)
            tried.set()
            await asyncio.sleep(_REACH_PAUSE_SECONDS)

        self._owner.repeat("redis", look)
        with suppress(TimeoutError):
            await asyncio.wait_for(tried.wait(), self._config.redis_probe_seconds)

    def _state(self) -> State:
        if self._gate.draining:
            return State.DRAINING
        return State.FAILING if self._owner.failing else State.SERVING

    async def _tell(self) -> None:
        """A background task died, or goes on."""
        await self._server.tell(serving=self._state() is State.SERVING)

    def _block_bytes(self, namespace: bytes) -> int:
        """What a block takes of the pool on all ranks, its share of the unusable rest of extents included."""
        if not self._sizes.get(namespace):
            pool = self._host.pool
            own = [space.slot_class for space in pool.spaces() if space.namespace == namespace]
            shares = (pool.limit_bytes // max(1, pool.extents.most_slots(slot_class)) for slot_class in own)
            self._sizes[namespace] = sum(shares)
        return self._sizes[namespace]

    @property
    def _is_needed(self) -> bool:
        return bool(self._store.leases or self._store.writes or self._gate.running)


def _recorder(config: Config, clocks: Clocks, block_bytes: Callable[[bytes], int]) -> Recorder | None:
    if config.record_path is None:
        return None
    recorder = Recorder(
        config.record_path,
        config.record_max_bytes,
        block_bytes,
        clock=clocks.monotonic,
        wall_clock=clocks.wall,
    )
    _log.info("requests are recorded in %s", recorder.path)
    return recorder


def _warn_of_open_ports(config: Config) -> None:
    for address in config.listen:
        if address.path is None and config.tenants_file is None:
            _log.warning(
                "every user of this machine can read and write blocks through %s: there is no tenants_file",
                address,
            )
