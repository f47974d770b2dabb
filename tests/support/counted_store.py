"""A store over a redis that a test may look into, with all that is counted of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry

from kvstore.block import WHOLE, Chain, TierName
from kvstore.metrics import Metrics, Readings, StoreGauges
from kvstore.spec import NamespaceSpec
from kvstore.store import TieredStore, Tiers
from kvstore.tiers.host import HostTier
from kvstore.whatif import Estimate
from tests.support.dict_tier import DictTier
from tests.support.stores import FakeClock, Recorder, Rig, make_chain, make_host, pool_folder

Samples = dict[str, float]


def samples_of(registry: CollectorRegistry) -> Samples:
    """What is not zero, by name and labels in PromQL's form; without times and buckets."""
    skipped = ("_created", "_bucket", "_sum")
    found: Samples = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            if sample.value and not sample.name.endswith(skipped):
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@dataclass
class Counted:
    """A store over a redis that a test may look into, and what its listener has counted."""

    rig: Rig
    redis: DictTier
    registry: CollectorRegistry
    clock: FakeClock


def readings_of(store: TieredStore) -> Readings:
    """All that a store without redis says of itself."""
    return Readings(
        usage=store.usage,
        leases=lambda: store.leases,
        tiers=store.status,
        redis_errors=dict,
        redis_breakers=dict,
        redis_queue_bytes=lambda: store.queued_bytes,
        listener_failures=lambda: store.listener_failures,
        background_failures=lambda: {"tick": 1, "growth": 1},
        resident_bytes=lambda: {("host", "tiny"): store.usage()[TierName.HOST].ready},
        what_if=lambda: [Estimate(1.0, 1000, 30, 10)],
        skipped_requests=lambda: {"whatif": 1, "recording": 1},
    )


@contextmanager
def counted_store(spec: NamespaceSpec) -> Iterator[Counted]:
    """A store whose listener counts into a registry of its own, with gauges of its pools."""
    clock, registry, woken, redis = FakeClock(), CollectorRegistry(), threading.Semaphore(0), DictTier()
    metrics = Metrics(registry, {spec.root.digest: spec.namespace.model}.__getitem__)
    with pool_folder() as folder:
        host = make_host(folder, clock)
        store = TieredStore(Tiers(host, None, redis), clock=clock, listeners=(metrics,), wake=woken.release)
        store.register(spec)
        registry.register(StoreGauges(readings_of(store)))
        try:
            yield Counted(Rig(store, host, None, Recorder(), woken), redis, registry, clock)
        finally:
            store.close()


def run_script(counted: Counted, spec: NamespaceSpec) -> None:
    """Every way in which a request, a block or a write ends: ``GOLDEN`` has the sums, term by term."""
    store = counted.rig.store
    counted.rig.write(make_chain(spec, "abcdef", tail=2))
    counted.rig.settle()
    ask(counted, make_chain(spec, "abcdef", tail=2))
    ask(counted, make_chain(spec, "abcxyz"))
    ask(counted, make_chain(spec, "uvw", tail=1))
    ask(counted, make_chain(spec, "abcdef"), used_blocks=4)
    ask(counted, make_chain(spec, "", tail=3))
    store.lookup(make_chain(spec, "abcdef", tail=2))
    forget_in_memory(counted)
    ask(counted, make_chain(spec, "abcdef"))
    forget_in_memory(counted)
    flip_byte_in_redis(counted, make_chain(spec, "abcd"))
    ask(counted, make_chain(spec, "abcdef"))
    silent = store.write(make_chain(spec, "gh"))
    counted.clock.advance(31.0)
    store.tick()
    silent.abort()


def ask(counted: Counted, chain: Chain, used_blocks: int | None = None) -> None:
    """A request from acquire to release; what it does twice counts once."""
    store = counted.rig.store
    lease = store.acquire("r", chain)
    assert store.acquire("r", chain) is lease
    store.wait(lease, 10.0)
    store.release(lease, used_blocks)
    store.release(lease)
    counted.rig.settle()


def forget_in_memory(counted: Counted) -> None:
    """Only redis keeps what was stored."""
    pool = counted.rig.host.pool
    [slot_class] = pool.extents.classes()
    pool.evict(slot_class, pool.extents.slots)
    counted.rig.store.pump()


def flip_byte_in_redis(counted: Counted, chain: Chain) -> None:
    """Damage the last block of a chain."""
    last = chain.rows(WHOLE).hash_at(len(chain) - 1)
    [key] = [key for key in counted.redis.values if key[2] == last]
    value = counted.redis.values[key]
    counted.redis.values[key] = value._replace(payload=bytes([value.payload[0] ^ 1]) + value.payload[1:])


def unread_in(host: HostTier) -> int:
    """The pool's own books of blocks that nobody has read, in bytes."""
    pool = host.pool
    unread = 0
    for space in pool.spaces():
        slots = np.fromiter(space.ready.values(), dtype=np.int64, count=len(space.ready))
        for extent, _, rows in pool.extents.groups(slots):
            unread += int((extent.table.reads[rows] == 0).sum()) * space.payload_bytes
    return unread
