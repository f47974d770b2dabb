"""Putting a prefill worker together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hashing import KVShape, Namespace
from kvstore.assemble import open_host, open_redis, store_options
from kvstore.config import Config
from kvstore.errors import ConfigError, PoolError
from kvstore.events import Listener
from kvstore.evict.lru import LRU
from kvstore.spec import NamespaceSpec, slot_bytes_for
from kvstore.store import TieredStore, Tiers
from kvstore.tiers.device import DeviceTier, free_share
from kvstore.tiers.host import HostTier
from prefill.config import Dtype
from prefill.engine import Engine, EngineOptions
from prefill.model import LoadedModel, load_model
from prefill.paged import KVMemory
from prefill.runner import Runner
from prefill.sidecar import SidecarOptions, open_sidecar
from prefill.spec import LAYOUT, ModelSpec

PLANES = 2
_DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True)
class Beside:
    """What there is beside a worker. ``sidecar`` is its lowest tier, in place of redis.

    ``wake`` is called from other threads when the store has something to do.
    """

    wake: Callable[[], None] | None = None
    sidecar: SidecarOptions | None = None


_NOTHING = Beside()


@dataclass(frozen=True, slots=True)
class Worker:
    """An engine and the store that it owns; both are used from one thread."""

    engine: Engine
    store: TieredStore
    tiers: Tiers
    memory: KVMemory
    runner: Runner
    spec: NamespaceSpec

    def close(self, *, remove_pool: bool = False) -> None:
        """Give back memory, files and sockets. What was queued for redis is lost.

        ``remove_pool`` is for a pool file that no later worker will be given the path of.
        """
        self.engine.close()
        if remove_pool:
            self.tiers.host.file.remove()
        self.store.close()


def load_configured(
    name: str | None, config: Config, cache_dir: Path, dtype: Dtype = Dtype.FLOAT32
) -> LoadedModel:
    """The model that ``name`` means (None: the packaged one), on the configured device.

    Raises ConfigError where this machine has no such device, and what ``load_model`` raises.
    """
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {config.device}, and torch finds {torch.cuda.device_count()} CUDA devices here; "
            "choose one of those, or cpu"
        )
    return load_model(name, dtype=getattr(torch, dtype), device=config.device, cache_dir=cache_dir)


def namespace_of(model: ModelSpec, config: Config) -> Namespace:
    """What makes this model's blocks interchangeable, under this configuration."""
    return Namespace(
        model=model.name,
        weights_id=model.weights_id,
        kv_dtype=model.kv_dtype,
        layout=LAYOUT,
        block_size=config.block_size,
        kv_shape=KVShape(model.layers, PLANES, model.kv_heads, model.head_size),
        algorithm=config.hash_algorithm,
    )


def build_worker(
    model: LoadedModel,
    config: Config,
    *,
    clock: Callable[[], float],
    listeners: tuple[Listener, ...] = (),
    options: EngineOptions = _DEFAULTS,
    beside: Beside = _NOTHING,
) -> Worker:
    """Open the tiers and wire them to the model. Raises PoolError, and what the tiers raise.

    The configuration and the model decide ``redis_seconds`` and ``eos_ids`` of the engine's options.
    """
    block_bytes = slot_bytes_for(model.spec.block_bytes(config.block_size))
    if config.device_share is not None:
        share = free_share(torch.device(config.device), config.device_share)
        config = config.model_copy(update={"device_bytes": share})
    if config.device_bytes < block_bytes:
        raise PoolError(
            f"device_bytes is {config.device_bytes}, expected at least {block_bytes}, one block of "
            f"{model.spec.name!r}; raise device_bytes to what the longest prompt needs"
        )
    with ExitStack() as opened:
        spec = NamespaceSpec(namespace_of(model.spec, config))
        host, device = _open_memory(config, clock, opened)
        stored = store_options(config)
        if beside.sidecar is None:
            lowest = open_redis(config, clock)
        else:
            lowest = open_sidecar(beside.sidecar, spec, clock)
            # It may ask a Redis of its own first, for as long as this worker would have asked one.
            stored = replace(stored, probe_seconds=2 * stored.probe_seconds)
        opened.callback(lowest.close)
        tiers = Tiers(host, device, lowest)
        store = TieredStore(tiers, clock=clock, options=stored, listeners=listeners, wake=beside.wake)
        decided = replace(options, redis_seconds=config.redis_acquire_seconds, eos_ids=model.spec.eos_ids)
        worker = _wire(model, spec, tiers, store, clock, decided)
        opened.pop_all()
    return worker


def _open_memory(
    config: Config, clock: Callable[[], float], opened: ExitStack
) -> tuple[HostTier, DeviceTier]:
    """The tiers in memory, each closed by ``opened`` should a later one fail."""
    host = open_host(config, clock)
    opened.callback(host.close)
    # One model has one slot size, so its device memory is one extent: kernels then see one table.
    device = DeviceTier(
        torch.device(config.device),
        pool_bytes=config.device_bytes,
        extent_bytes=config.device_bytes,
        make_evictor=LRU,
        clock=clock,
    )
    opened.callback(device.close)
    device.pin(host.file.data)
    return host, device


def _wire(
    model: LoadedModel,
    spec: NamespaceSpec,
    tiers: Tiers,
    store: TieredStore,
    clock: Callable[[], float],
    options: EngineOptions,
) -> Worker:
    store.register(spec)
    assert isinstance(tiers.device, DeviceTier)
    memory = KVMemory(tiers.device.tensor, model.spec, spec.block_size)
    runner = Runner(model.model, memory)
    engine = Engine(runner, memory, store, spec.root, clock=clock, options=options)
    return Worker(engine, store, tiers, memory, runner, spec)
