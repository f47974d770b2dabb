"""However slow Redis is, the process keeps no more than its pool: what waits is pinned there, not copied."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.block import TierName
from kvstore.events import BlocksDropped, BytesMoved, DropCause, Event
from kvstore.evict.lru import LRU
from kvstore.store import StoreOptions, TieredStore, Tiers
from kvstore.tiers.host import HostTier
from kvstore.tiers.redis import RedisOptions, RedisTier
from tests.support.proxy import Behaviour, Proxy
from tests.support.stores import make_chain, make_spec, pool_folder
from tests.support.valkey import ValkeyServer, start_valkey

__all__ = ["start_valkey"]

pytestmark = pytest.mark.redis

PAYLOAD_BYTES = 256 << 10
POOL_BYTES = 16 << 20
QUEUE_BYTES = 4 << 20
WRITTEN_BYTES = 512 << 20
SPEC = make_spec(payload_bytes=PAYLOAD_BYTES)


class Tally:
    """Bytes that reached Redis, and blocks that the full queue turned away: no event is kept."""

    def __init__(self) -> None:
        self.seen: Counter[object] = Counter()

    def __call__(self, event: Event) -> None:
        match event:
            case BytesMoved(target=TierName.REDIS):
                self.seen[TierName.REDIS] += event.payload_bytes
            case BlocksDropped(tier=TierName.REDIS):
                self.seen[event.cause] += event.blocks


def resident_bytes() -> int:
    """Memory of this process, with the pages of the pool that it has touched."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def store(start_valkey: Callable[..., ValkeyServer], tally: Tally) -> Iterator[TieredStore]:
    """Write-through to a real server, each of whose answers takes 20 ms."""
    server = start_valkey(maxmemory="64mb")
    with Proxy(server.port, Behaviour(delay_seconds=0.02)) as proxy, pool_folder() as folder:
        redis = RedisTier(RedisOptions(f"redis://127.0.0.1:{proxy.port}"), time.monotonic)
        store = TieredStore(
            Tiers(
                HostTier(
                    folder / "pool",
                    pool_bytes=POOL_BYTES,
                    extent_bytes=POOL_BYTES // 4,
                    make_evictor=LRU,
                    clock=time.monotonic,
                ),
                None,
                redis,
            ),
            clock=time.monotonic,
            options=StoreOptions(queue_bytes=QUEUE_BYTES, batch_bytes=1 << 20),
            listeners=(tally,),
        )
        store.register(SPEC)
        yield store
        store.close()


def write(store: TieredStore, first: int, blocks: int) -> None:
    """Prompts of one block, each of which writes all of its payload."""
    for number in range(first, first + blocks):
        with store.write(make_chain(SPEC, chr(0x4E00 + number))) as write:
            for payload in write.payloads:
                payload[:] = number % 251
        store.pump()


def test_memory_is_flat_however_much_is_written_to_a_slow_redis(store: TieredStore, tally: Tally) -> None:
    """production-stack #923, LMCache #2017: puts queued up behind a slow Redis until the host was full."""
    warm = 2 * POOL_BYTES // PAYLOAD_BYTES
    write(store, 0, warm)
    assert store.usage()[TierName.HOST].ready > POOL_BYTES // 2
    before = resident_bytes()
    blocks = WRITTEN_BYTES // PAYLOAD_BYTES
    write(store, warm, blocks)
    grown = resident_bytes() - before
    assert grown < POOL_BYTES // 2, f"{grown / 2**20:.1f} MiB more after {WRITTEN_BYTES >> 20} MiB"
    assert tally.seen[TierName.REDIS] > 0, "redis was slow, not absent"
    assert tally.seen[DropCause.QUEUE] > blocks // 2, "redis kept up, so nothing was tested"
    assert store.usage()[TierName.HOST].leased <= QUEUE_BYTES
    assert store.drain(20)
