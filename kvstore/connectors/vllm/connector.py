"""The class that vLLM loads; it finds the scheduler's or the worker's side and translates for it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.block import TierName
from kvstore.connectors.vllm.engine import (
    cut_of,
    groups_of,
    identity_of,
    require_supported_version,
    shard_of,
)
from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.connectors.vllm.lookups import Lookups
from kvstore.connectors.vllm.messages import Orders, Progress
from kvstore.connectors.vllm.options import ConnectorOptions
from kvstore.connectors.vllm.scheduler import Policy, SchedulerSide
from kvstore.connectors.vllm.stats import KVStoreMetrics, KVStoreStats
from kvstore.connectors.vllm.tally import Tally
from kvstore.connectors.vllm.worker import Rank, WorkerSide
from kvstore.tiers.device_pin import pinned_pool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)
_SOURCES = {
    TierName.HOST: CacheHitSource.HOST,
    TierName.REDIS: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


@dataclass(eq=False)
class StoreMetadata(KVConnectorMetadata):
    """Orders, as they travel to workers."""

    orders: Orders = field(default_factory=Orders)


@dataclass(eq=False)
class StoreProgress(KVConnectorWorkerMetadata):
    """Progress, as it travels back."""

    progress: Progress

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StoreProgress)
        self.progress.add(other.progress)
        return self


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefixes from a prefix-kvstore sidecar, for any number of engines.

    An engine that cannot be served, and one whose sidecar is away, runs as if there were none.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """ConfigError for an option that does not exist or has no sense."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
        self._tally = Tally()
        self._clock = time.perf_counter
        self._failures = 0
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        try:
            require_supported_version()
            self._groups = groups_of(kv_cache_config)
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = self._scheduler_side(options)
            else:
                self._worker = self._worker_side(options)
        except UnsupportedError as error:
            if role is KVConnectorRole.SCHEDULER:
                _log.error("kvstore serves nothing: %s", error)

    def _scheduler_side(self, options: ConnectorOptions) -> SchedulerSide:
        config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        spec = identity_of(config, self._kv_cache_config, options).spec()
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "kv_load_failure_policy is %r: a cache must not fail requests, so it is set to 'recompute'",
                transfer.kv_load_failure_policy,
            )
            transfer.kv_load_failure_policy = "recompute"
        if self._groups.hybrid and not options.asynchronous_loads:
            _log.warning(
                "asynchronous_loads is false: vLLM stops when a synchronous load of a model with sliding "
                "windows fails, so its loads are asynchronous"
            )
        cut = cut_of(config)
        policy = Policy(
            spec,
            self._groups,
            ranks=cut[0] * cut[1],
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
            asynchronous=self._asynchronous(options),
            lookup_seconds=options.lookup_seconds,
            request_hints=options.request_hints,
        )
        lookups = Lookups(options.open_client(populate=False), cut, options.redis_seconds, self._clock)
        lookups.greet(spec)
        return SchedulerSide(policy, lookups, self._tally, self._clock, lambda: secrets.token_hex(8))

    def _worker_side(self, options: ConnectorOptions) -> WorkerSide:
        shard = shard_of(self._vllm_config)
        rank = Rank(shard, shard.tp_size * shard.pp_size, self._groups)
        around = None
        if torch.cuda.is_available():
            around = partial(pinned_pool, device=torch.device("cuda", torch.cuda.current_device()))
        return WorkerSide(
            options.open_client(around),
            rank,
            self._tally,
            self._clock,
            asynchronous=self._asynchronous(options),
        )

    def _asynchronous(self, options: ConnectorOptions) -> bool:
        return options.asynchronous_loads or self._groups.hybrid

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later on."""
        return False

    @contextmanager
    def _planning(self) -> Iterator[SchedulerSide | None]:
        with self._tally.span("scheduler_seconds", self._clock):
            yield self._scheduler

    @contextmanager
    def _copying(self) -> Iterator[WorkerSide | None]:
        with self._tally.span("worker_seconds", self._clock):
            yield self._worker

    # The scheduler's.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.saves.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        with self._planning() as side:
            if side is not None:
                side.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._planning() as side:
            return (0, False) if side is None else side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        with self._planning() as side:
            if side is not None:
                side.allocated(request, self._groups.listed(blocks.get_block_ids()), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        side = self._scheduler
        tiers = {} if side is None else side.hit_tiers(request.request_id, num_external_tokens)
        found: dict[CacheHitSource, int] = {}
        for tier, tokens in tiers.items():
            source = _SOURCES.get(tier, CacheHitSource.HOST)
            found[source] = found.get(source, 0) + tokens
        return found or super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        with self._planning() as side:
            if side is None:
                return StoreMetadata()
            state = scheduler_output.kv_connector_block_state

            def table_of(request_id: str) -> list[int]:
                tables = None if state is None else state.get_block_ids(request_id)
                return [] if tables is None else self._groups.listed(tables)

            return StoreMetadata(side.orders(scheduler_output.num_scheduled_tokens.items(), table_of))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        with self._planning() as side:
            if side is None:
                return
            meta = connector_output.kv_connector_worker_meta
            progress = meta.progress if isinstance(meta, StoreProgress) else Progress()
            side.progressed(progress, connector_output.invalid_block_ids or set())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._planning() as side:
            if side is not None:
                side.finished(request, self._groups.listed(block_ids))
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and len(self._scheduler.saves) > 0

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and len(self._scheduler.saves) > 0

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # The worker's.

    @property
    def _orders(self) -> Orders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, StoreMetadata) else Orders()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        with self._copying() as side:
            if side is not None:
                side.load(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole blocks of all layers are loaded before the step that uses them."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Whole blocks of all layers are saved after the step that computed them."""

    def wait_for_save(self) -> None:
        """Begin saves; their blocks are pinned, so nobody waits for their end."""
        with self._copying() as side:
            if side is not None:
                side.save(self._orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        side = self._worker
        if side is None:
            return None, None
        orders = self._orders
        if orders.idle:
            return None, side.finished_loads(orders) or None
        with self._copying():
            return None, side.finished_loads(orders) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving = self._worker.take_failed_loads()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        progress = None if self._worker is None else self._worker.take_progress()
        return StoreProgress(progress) if progress else None

    # Both sides'.

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        side = self._scheduler or self._worker
        if side is not None:
            failures = sum(side.failures.values())
            if failures > self._failures:
                self._tally.add("server_failures", failures - self._failures)
                self._failures = failures
        sums = self._tally.take()
        return KVStoreStats(sums) if sums else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        return KVStoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStoreMetrics:
        return KVStoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        self._scheduler = self._worker = None
        if side is not None:
            side.close()
