"""Tiers and store options from a configuration: what every process that owns a store puts together."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.block import TierName
from kvstore.config import Config
from kvstore.evict.arc import ARC
from kvstore.evict.base import Evictor, Occupancy
from kvstore.evict.lfu import LFU
from kvstore.evict.lru import LRU
from kvstore.evict.reuse import Reuse
from kvstore.evict.s3fifo import S3FIFO
from kvstore.failpoints import Failpoint, no_failpoint
from kvstore.store import Demotion, StoreOptions
from kvstore.tiers.base import Tier
from kvstore.tiers.host import HostTier
from kvstore.tiers.null import NullTier
from kvstore.tiers.redis import RedisOptions, RedisTier

_POLICIES: dict[str, Callable[[Occupancy], Evictor]] = {
    "lru": LRU,
    "lfu": LFU,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "reuse": Reuse,
}


def policy_of(config: Config) -> Callable[[Occupancy], Evictor]:
    """What makes the eviction policy of the host tier."""
    return _POLICIES[config.eviction_policy]


def open_host(config: Config, clock: Callable[[], float], failpoint: Failpoint = no_failpoint) -> HostTier:
    """The host tier; PoolError where the pool file cannot be had."""
    return HostTier(
        config.pool_path,
        pool_bytes=config.pool_bytes,
        extent_bytes=config.extent_bytes,
        make_evictor=policy_of(config),
        clock=clock,
        failpoint=failpoint,
    )


def open_redis(config: Config, clock: Callable[[], float]) -> Tier:
    """The redis tier, or the one that has nothing where no Redis is configured. Connects to nothing yet."""
    if config.redis_url is None:
        return NullTier(TierName.REDIS)
    options = RedisOptions(
        url=config.redis_url,
        prefix=config.redis_prefix,
        ttl_seconds=config.redis_ttl_seconds,
        connections=config.redis_connections,
    )
    return RedisTier(options, clock)


def store_options(config: Config, *, readers_verify: bool = False) -> StoreOptions:
    """The store's own limits and times; ``readers_verify`` as in ``StoreOptions``."""
    return StoreOptions(
        lease_seconds=config.lease_seconds,
        write_seconds=config.write_seconds,
        probe_seconds=config.redis_probe_seconds,
        ttl_seconds=config.redis_ttl_seconds,
        idle_ttl_seconds=config.idle_ttl_seconds,
        demotion=Demotion(config.redis_demotion),
        reuse_count=config.redis_reuse_count,
        recompute_tokens_per_second=config.recompute_tokens_per_second,
        queue_bytes=config.redis_queue_bytes,
        threads=config.redis_connections + 1,
        readers_verify=readers_verify,
    )
