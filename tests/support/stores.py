"""Small stores with defaults, whose every payload can be recomputed from the block's identity."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from hashing import KVShape, Namespace, fingerprint_blocks, hash_blocks
from kvstore.block import WHOLE, BlockRows, Chain, Shard, TierName
from kvstore.events import Event
from kvstore.evict.lru import LRU
from kvstore.lease import Lease
from kvstore.spec import NamespaceSpec
from kvstore.store import BlockStatus, StoreOptions, TieredStore, Tiers, Write
from kvstore.tiers.base import Payload, Tier
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.null import NullTier
from tests.support.faulty_tier import HeldTier

EXTENT_BYTES = 64 << 10
BLOCK_SIZE = 4
PAYLOAD_BYTES = 1024
SPLIT = (Shard(0, 2), Shard(1, 2))
"""Both ranks of a model on two."""

_KV_SHAPE = KVShape(layers=2, planes=2, kv_heads=2, head_size=8)
_TWIN = 1 << 16
_CONTENT_AT = 20
_T = TypeVar("_T")


class FakeClock:
    """Time that passes only when the test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Recorder:
    """Keeps the events that it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[_T]) -> list[_T]:
        return [event for event in self.events if isinstance(event, kind)]


# -- prompts and payloads -----------------------------------------------------------------------


def make_spec(
    model: str = "model",
    *,
    block_size: int = BLOCK_SIZE,
    payload_bytes: int | None = PAYLOAD_BYTES,
    tenant_salt: bytes | None = None,
) -> NamespaceSpec:
    namespace = Namespace(
        model=model,
        weights_id="0" * 40,
        kv_dtype="bfloat16",
        layout="test",
        block_size=block_size,
        kv_shape=_KV_SHAPE,
        tenant_salt=tenant_salt,
    )
    return NamespaceSpec(namespace, payload_bytes)


def tokens_of(letters: str, block_size: int, tail: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """One block a letter, then ``tail`` tokens. A capital is another block than its small letter."""
    ids = [ord(letter.lower()) + _TWIN * letter.isupper() for letter in letters]
    return np.array([each for each in ids for _ in range(block_size)] + [0] * tail, dtype=np.uint32)


def make_chain(spec: NamespaceSpec, letters: str, *, tail: int = 0, colliding: bool = False) -> Chain:
    """The prompt of ``tokens_of``; ``colliding`` makes capitals and small letters hash alike."""
    ids = tokens_of(letters, spec.block_size, tail)
    if not colliding:
        return Chain.of(spec.root, ids)
    whole = ids[: len(letters) * spec.block_size]
    return Chain(
        spec.root,
        hash_blocks(spec.root, whole, digest=_blind_digest),
        len(ids),
        whole.reshape(len(letters), spec.block_size),
        fingerprint_blocks(whole, spec.block_size),
    )


def hash_only(chain: Chain) -> Chain:
    """The chain as somebody knows it who has no tokens."""
    return Chain(chain.root, chain.hashes, chain.prompt_tokens)


def _blind_digest(data: bytes) -> bytes:
    ids = np.frombuffer(data[_CONTENT_AT:], dtype="<u4") & np.uint32(_TWIN - 1)
    return hashlib.sha256(data[:_CONTENT_AT] + ids.tobytes()).digest()[:16]


def payload_of(rows: BlockRows, block: int, size: int = PAYLOAD_BYTES) -> Payload:
    """The bytes that a block's KV would be: a function of all that the block depends on."""
    assert rows.fingerprints is not None
    name = (rows.namespace, str(rows.shard).encode(), rows.hash_at(block), rows.fingerprints[block].tobytes())
    return np.frombuffer(hashlib.shake_128(b"".join(name)).digest(size), dtype=np.uint8)


def payloads_of(rows: BlockRows, size: int = PAYLOAD_BYTES) -> list[Payload]:
    return [payload_of(rows, block, size) for block in range(len(rows))]


def fill(write: Write) -> None:
    """Put the right bytes into every block that a write is to bring."""
    for position, view in zip(write.positions.tolist(), write.payloads, strict=True):
        view[:] = payload_of(write.rows, position, len(view))


# -- tiers and stores ---------------------------------------------------------------------------


@contextmanager
def pool_folder() -> Iterator[Path]:
    """A folder on tmpfs, where pool files are in production."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def make_host(
    folder: Path,
    clock: Callable[[], float],
    *,
    extents: int = 4,
    extent_bytes: int = EXTENT_BYTES,
    name: str = "pool",
) -> HostTier:
    return HostTier(
        folder / name,
        pool_bytes=extents * extent_bytes,
        extent_bytes=extent_bytes,
        make_evictor=LRU,
        clock=clock,
    )


def make_device(
    clock: Callable[[], float], *, extents: int = 2, extent_bytes: int = EXTENT_BYTES
) -> DeviceTier:
    return DeviceTier(
        torch.device("cpu"),
        pool_bytes=extents * extent_bytes,
        extent_bytes=extent_bytes,
        make_evictor=LRU,
        clock=clock,
    )


@dataclass
class Rig:
    """A store with its parts at hand."""

    store: TieredStore
    host: HostTier
    device: DeviceTier | None
    events: Recorder
    woken: threading.Semaphore
    """Released whenever a thread is done with something that ``pump`` will collect."""

    @property
    def top(self) -> MemoryTier:
        return self.device or self.host

    def tier(self, name: TierName) -> MemoryTier:
        tier: MemoryTier | None = {TierName.HOST: self.host, TierName.DEVICE: self.device}[name]
        assert tier is not None
        return tier

    def write(self, chain: Chain, shard: Shard = WHOLE, *, first_block: int = 0) -> list[BlockStatus]:
        """Write a prompt with the right bytes."""
        with self.store.write(chain, shard, first_block=first_block) as write:
            fill(write)
        return write.status

    def publish(self, lease: Lease, first_block: int, stop: int) -> list[int]:
        """Compute blocks [first_block, stop) of a lease's prompt; the slots that stay the caller's."""
        rows = lease.chain.rows(WHOLE, first_block, stop)
        slots = self.store.reserve(rows.namespace, len(rows))
        assert len(slots) == len(rows), "no room to compute in"
        space = self.top.pool.space(rows.namespace, WHOLE)
        assert space is not None
        for block, slot in enumerate(slots.tolist()):
            self.top.write_slot(slot, payload_of(rows, block, space.payload_bytes))
        kept: list[int] = self.store.publish(lease, rows, slots).tolist()
        return kept

    def settle(self, seconds: float = 10.0) -> None:
        """Work until nothing is on its way between tiers."""
        self.store.pump()
        while not self.store.idle:
            assert self.woken.acquire(timeout=seconds), "nothing came back in time"
            self.store.pump()

    def resident(self, tier: MemoryTier, chain: Chain, shard: Shard = WHOLE) -> int:
        """Blocks of the leading run in one tier."""
        return len(tier.pool.match(chain.rows(shard)).slots)

    def assert_promised(self, lease: Lease) -> None:
        """Every promised block is where the lease says, with the right bytes, in order, without a gap."""
        for shard in lease.shards:
            rows = lease.chain.rows(shard)
            position = lease.first_block
            for segment in lease.segments.get(shard, []):
                assert segment.start == position
                tier = self.tier(segment.tier)
                space = tier.pool.space(rows.namespace, shard)
                assert space is not None
                target = np.empty(space.payload_bytes, dtype=np.uint8)
                for slot in segment.slots.tolist():
                    tier.read_slot(slot, target)
                    expected = payload_of(rows, position, space.payload_bytes)
                    assert target.tobytes() == expected.tobytes(), f"block {position} of {shard} is wrong"
                    position += 1
            assert position == lease.end, "the lease promises what it does not name"

    def fill_up(self, spec: NamespaceSpec, tag: str = "p") -> int:
        """Write one-block prompts until the host tier has evicted all that it may; blocks written."""
        written = 0
        while True:
            status = self.write(make_chain(spec, _distinct(tag, written)))
            if status[-1] is not BlockStatus.YOURS:
                return written
            written += 1


def _distinct(tag: str, number: int) -> str:
    return tag + chr(0x4E00 + number)


@dataclass
class RigOptions:
    """How to make a rig; a device tier exists where it has extents, of the same size if not given."""

    host_extents: int = 4
    device_extents: int = 0
    extent_bytes: int = EXTENT_BYTES
    device_extent_bytes: int | None = None
    redis: Tier = field(default_factory=lambda: NullTier(TierName.REDIS))
    store: StoreOptions = field(default_factory=StoreOptions)


@contextmanager
def make_rig(
    clock: Callable[[], float],
    specs: Sequence[tuple[NamespaceSpec, tuple[Shard, ...]]],
    options: RigOptions | None = None,
) -> Iterator[Rig]:
    """A store with these namespaces, closed at the end."""
    made = options or RigOptions()
    with pool_folder() as folder:
        host = make_host(folder, clock, extents=made.host_extents, extent_bytes=made.extent_bytes)
        device = None
        if made.device_extents:
            extent_bytes = made.device_extent_bytes or made.extent_bytes
            device = make_device(clock, extents=made.device_extents, extent_bytes=extent_bytes)
        woken, recorder = threading.Semaphore(0), Recorder()
        store = TieredStore(
            Tiers(host, device, made.redis),
            clock=clock,
            options=made.store,
            listeners=(recorder,),
            wake=woken.release,
        )
        for spec, shards in specs:
            store.register(spec, shards)
        try:
            yield Rig(store, host, device, recorder, woken)
        finally:
            if isinstance(made.redis, HeldTier):
                made.redis.open()
            store.close()
