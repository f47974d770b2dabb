"""A worker as a server: model, store, the engine's thread and both APIs, from one configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvstore.config import Config
from kvstore.end_signals import EndSignals
from kvstore.events import Event
from kvstore.metrics import CollectorRegistry, Metrics, Readings, StoreGauges, render
from kvstore.store.inventory import unread_bytes
from kvstore.tiers.redis import RedisTier
from prefill.assemble import Beside, Worker, build_worker
from prefill.config import Role, ServeConfig, Started
from prefill.engine import EngineOptions
from prefill.flops import matmul_peak
from prefill.metrics import ResultMetrics, StepMetrics
from prefill.model import LoadedModel
from prefill.service.access import Access, read_access
from prefill.service.app import build_app
from prefill.service.driver import Driver, DriverLimits, Wake
from prefill.service.endpoints import Serving
from prefill.service.errors import Refusal, ServiceError
from prefill.service.front import Front
from prefill.service.gate import Gate
from prefill.service.metrics import FrontMetrics, ServiceGauges, ServiceMetrics
from prefill.service.peers import Peers
from prefill.service.rpc import PrefillService, RpcParts
from prefill.service.rpc_server import RpcServer
from prefill.service.web_server import WebServer
from prefill.sidecar import sidecar_of
from prefill.text import Text

_POLL_SECONDS = 0.02
_DRAIN_SECONDS = 0.25
"""Between two looks at whether somebody is in a hurry."""
_LAST_WORDS_SECONDS = 0.5
"""For errors to reach those whose answers are cut short."""
_REACH_SECONDS = 1.0
"""For Redis to be connected to before the first request, whose time for it is short."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clocks:
    """``monotonic`` is for times and deadlines; ``wall`` for what clients are told."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


def run(
    config: Config,
    serve: ServeConfig,
    load: Callable[[], LoadedModel],
    clocks: Clocks,
    announce: Callable[[Started], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. KVStoreError or PrefillError where it cannot begin."""
    asyncio.run(_serve(config, serve, load, clocks, announce))


async def _serve(
    config: Config,
    serve: ServeConfig,
    load: Callable[[], LoadedModel],
    clocks: Clocks,
    announce: Callable[[Started], None],
) -> None:
    sidecar_of(serve, config)  # what is wrong with it need not wait for the model either
    with ExitStack() as opened:
        # The addresses first: who asks for one that is taken need not wait for the model to hear it.
        access = read_access(serve)
        rpc = RpcServer(access.rpc)
        addresses = rpc.bind(serve.listen)
        web = None if serve.http is None else WebServer(serve.http, serve.stall_seconds, access.web)
        if web is not None:
            opened.callback(web.close)
        service = Service(config, serve, load(), access, clocks, opened)
        signals = EndSignals()
        await service.start(rpc, web)
        announce(
            Started(
                serve.role,
                service.model,
                service.dtype,
                addresses,
                None if web is None else web.url,
                service.context_tokens,
            )
        )
        places = [*addresses, *([] if web is None else [web.url])]
        _log.info("serving %s, role %s, at %s", service.model, serve.role, ", ".join(places))
        await signals.stop.wait()
        await service.stop(rpc, web, signals.hurry)
    _log.info("ended")


class Service:
    """One worker's parts, wired. Used on one event loop."""

    def __init__(
        self,
        config: Config,
        serve: ServeConfig,
        model: LoadedModel,
        access: Access,
        clocks: Clocks,
        opened: ExitStack,
    ) -> None:
        """Opens the tiers; ``opened`` closes them, whatever happens later."""
        self._config = config
        self._serve = serve
        self._access = access
        self._clocks = clocks
        self._loaded = model
        self.model = serve.served_model_name or model.spec.name
        self.dtype = model.spec.kv_dtype
        self.context_tokens = model.spec.max_positions
        self._registry = CollectorRegistry()
        self._gate = Gate(access.key, ServiceMetrics(self._registry).count)
        self._driver = self._open_driver(model, opened)
        self._peers: Peers | None = None
        self._following: asyncio.Task[None] | None = None
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="prefill-tokenize")
        opened.callback(self._tokenizing.shutdown)

    def _open_driver(self, model: LoadedModel, opened: ExitStack) -> Driver:
        config, serve, clock, wake = self._config, self._serve, self._clocks.monotonic, Wake()
        relay = _Relay()
        peak = matmul_peak(config.device, model.spec.dtype, clock)
        options = EngineOptions(
            step_tokens=serve.step_tokens,
            policy=serve.policy,
            chunked=serve.chunked,
            running_max=serve.running_max,
            waiting_max=serve.waiting_max,
            step_listeners=(StepMetrics(self._registry, peak),),
            result_listeners=(ResultMetrics(self._registry, config.block_size),),
        )
        beside = Beside(wake, sidecar_of(serve, config))
        self._worker = worker = build_worker(
            model, config, clock=clock, listeners=(relay,), options=options, beside=beside
        )
        opened.callback(worker.close)
        host, remote = worker.tiers.host, worker.tiers.remote
        if isinstance(remote, RedisTier):
            remote.reach(clock() + _REACH_SECONDS)
        relay.target = Metrics(self._registry, lambda _: self.model, {host.name: unread_bytes(host.pool)})
        limits = DriverLimits(serve.stream_tokens, serve.landing_seconds)
        driver = Driver(worker, wake, clock, limits)
        self._registry.register(StoreGauges(_readings(worker, self.model)))
        engine = worker.engine
        self._registry.register(
            ServiceGauges(lambda: engine.waiting, lambda: engine.running, lambda: self._gate.running)
        )
        return driver

    async def start(self, rpc: RpcServer, web: WebServer | None) -> None:
        """Serve from now on."""
        serve, clocks = self._serve, self._clocks
        if serve.role is Role.DECODE:
            self._peers = Peers(
                serve.prefill_at,
                self.model,
                key=self._access.key,
                seconds=serve.prefill_seconds,
                clock=clocks.monotonic,
                credentials=self._access.peers,
            )
        self._warn_of_short_memory()
        front = Front(self._driver, self._peers, self._loaded.spec.eos_ids, FrontMetrics(self._registry))
        self._driver.start()
        await rpc.start(
            PrefillService(
                RpcParts(self._gate, self._driver, front, serve.role, self.model, serve.stall_seconds)
            )
        )
        if web is not None:
            await web.start(build_app(self._serving(front), self._metrics, self._driver.is_healthy))
        following = rpc.follow(self._driver.health_changed, self._driver.is_healthy)
        self._following = asyncio.create_task(following, name="prefill-health")

    async def stop(self, rpc: RpcServer, web: WebServer | None, hurry: asyncio.Event) -> None:
        """Turn new requests away, let those that run end, hand on what is queued for others, and stop.

        For at most ``drain_seconds``, or until ``hurry`` is set; what then still runs is told so.
        """
        clock, seconds = self._clocks.monotonic, self._config.drain_seconds
        self._gate.draining = True
        if self._following is not None:
            self._following.cancel()
        await rpc.tell(serving=False)
        ends_at = clock() + seconds
        if self._gate.running:
            _log.info(
                "draining %d requests for up to %g s; a second signal ends it", self._gate.running, seconds
            )
        while self._gate.running and clock() < ends_at and not hurry.is_set():
            await asyncio.sleep(_POLL_SECONDS)
        self._driver.fail_all(
            ServiceError(Refusal.DRAINING, "the worker ended before the answer did; send the request again")
        )
        last_words = clock() + _LAST_WORDS_SECONDS
        while self._gate.running and clock() < last_words:
            await asyncio.sleep(_POLL_SECONDS)
        if web is not None:
            await web.stop()
        await rpc.stop(_LAST_WORDS_SECONDS)
        if self._peers is not None:
            await self._peers.close()
        is_empty = not self._driver.is_healthy()
        while not (is_empty or hurry.is_set()) and (left := ends_at - clock()) > 0:
            is_empty = await self._driver.ask(partial(self._worker.store.drain, min(left, _DRAIN_SECONDS)))
        await self._driver.stop()

    @property
    def _pool_tokens(self) -> int:
        root = self._worker.spec.root
        return self._worker.store.room(root.digest) * root.block_size

    def _warn_of_short_memory(self) -> None:
        if self._pool_tokens < self.context_tokens:
            _log.warning(
                "device memory holds %d tokens, the model's context %d: longer requests are refused; raise "
                "device_bytes",
                self._pool_tokens,
                self.context_tokens,
            )

    def _serving(self, front: Front) -> Serving:
        tokenizer = self._loaded.tokenizer
        return Serving(
            gate=self._gate,
            front=front,
            role=self._serve.role,
            model=self.model,
            text=None if tokenizer is None else Text(tokenizer),
            tokenizing=self._tokenizing,
            context_tokens=self.context_tokens,
            pool_tokens=self._pool_tokens,
            default_max_tokens=self._serve.default_max_tokens,
            stall_seconds=self._serve.stall_seconds,
            clock=self._clocks.monotonic,
            wall_clock=self._clocks.wall,
        )

    async def _metrics(self, accept: str) -> tuple[bytes, str]:
        """Rendered on the engine's thread, which alone may look at the store."""
        return await self._driver.ask(partial(render, self._registry, accept))


class _Relay:
    """A listener of the store that is made before the one that it passes events on to."""

    def __init__(self) -> None:
        self.target: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        if self.target is not None:
            self.target(event)


def _readings(worker: Worker, model: str) -> Readings:
    store, redis, namespace = worker.store, worker.tiers.remote, worker.spec.root.digest
    real = redis if isinstance(redis, RedisTier) else None

    def resident_bytes() -> dict[tuple[str, str], int]:
        return {(tier, model): size for tier, (_, size) in store.resident(namespace).items()}

    return Readings(
        usage=store.usage,
        leases=lambda: store.leases,
        tiers=store.status,
        redis_errors=real.errors if real else dict,
        redis_breakers=real.breakers if real else dict,
        redis_queue_bytes=lambda: store.queued_bytes,
        listener_failures=lambda: store.listener_failures,
        background_failures=dict,
        resident_bytes=resident_bytes,
        what_if=tuple,
        skipped_requests=dict,
    )
