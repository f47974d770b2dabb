"""Each tier as its contract suite wants it: empty, in no haste, and with a way to damage it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.block import WHOLE, BlockRows
from kvstore.service.client import Client, ClientOptions
from kvstore.service.client.tier import SidecarTier
from kvstore.service.operator import Operator
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_value import block_key
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import FaultyTier, HeldTier
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import make_chain, make_device, make_host, make_spec, payloads_of

SPEC = make_spec()


@dataclass
class Case:
    """A tier, empty, and how to flip a byte of what it stores."""

    tier: Tier
    flip: Callable[[BlockRows, int], None]
    local: bool = True
    """Whether ``match`` compares what it finds, and whether blocks have one size."""
    shared: bool = False
    """Whether it is another process's store: it forgets nothing on demand, and knows whole prompts only."""

    def save(self, rows: BlockRows, payloads: list[Payload] | None = None) -> list[SaveOutcome]:
        given = payloads_of(rows) if payloads is None else payloads
        return self.tier.save(rows, given, [checksum(payload) for payload in given], soon())

    def match(self, rows: BlockRows) -> int:
        """Blocks of the leading run; that its cause goes with it is compared wherever a test asks."""
        found = self.tier.match(rows, soon())
        assert (found.cause is None) == (found.blocks == len(rows))
        return found.blocks

    def load(self, rows: BlockRows, size: int | None = None) -> tuple[LoadResult, list[Payload]]:
        size = SPEC.payload_bytes_on() if size is None else size
        destinations = [np.zeros(size, dtype=np.uint8) for _ in range(len(rows))]
        return self.tier.load(rows, destinations, soon()), destinations

    def assert_holds(self, rows: BlockRows) -> None:
        result, loaded = self.load(rows)
        expected = payloads_of(rows)
        assert result.causes == [None] * len(rows)
        assert result.checksums == [checksum(payload) for payload in expected]
        assert [each.tobytes() for each in loaded] == [each.tobytes() for each in expected]


def soon() -> float:
    return time.monotonic() + 5


def checksum(payload: Payload) -> int:
    return xxhash.xxh3_64_intdigest(payload.tobytes())


def flip_in_memory(tier: MemoryTier) -> Callable[[BlockRows, int], None]:
    def flip(rows: BlockRows, block: int) -> None:
        slot = int(tier.pool.match(rows.slice(block, block + 1)).slots[0])
        payload = np.empty(SPEC.payload_bytes_on(), dtype=np.uint8)
        tier.read_slot(slot, payload)
        payload[100] ^= 1
        tier.write_slot(slot, payload)

    return flip


def device_case(request: pytest.FixtureRequest, folder: Path) -> Case:
    tier = make_device(time.monotonic, extents=8)
    return Case(tier, flip_in_memory(tier))


def host_case(request: pytest.FixtureRequest, folder: Path) -> Case:
    tier = make_host(folder, time.monotonic, extents=8)
    return Case(tier, flip_in_memory(tier))


def redis_case(fixture: str) -> Callable[[pytest.FixtureRequest, Path], Case]:
    """The redis tier on the server, or the servers, of a fixture with ``url``, ``client`` and ``clear``."""

    def make(request: pytest.FixtureRequest, folder: Path) -> Case:
        servers = request.getfixturevalue(fixture)
        servers.clear()

        def flip(rows: BlockRows, block: int) -> None:
            key = block_key("kv", rows, block)
            last = servers.client.getrange(key, -1, -1)[0]
            servers.client.setrange(key, servers.client.strlen(key) - 1, bytes([last ^ 1]))

        return Case(RedisTier(RedisOptions(servers.url), time.monotonic), flip, local=False)

    return make


@contextmanager
def running_sidecar() -> Iterator[Sidecar]:
    with sidecar(pool_bytes="2MiB", extent_bytes="64KiB", log_level="error") as made:
        yield made


def sidecar_case(*, mapped: bool) -> Callable[[pytest.FixtureRequest, Path], Case]:
    """The tier over the sidecar of the fixture ``shared_sidecar``."""

    def make(request: pytest.FixtureRequest, folder: Path) -> Case:
        server: Sidecar = request.getfixturevalue("shared_sidecar")
        with Operator(server.address) as operator:
            operator.clear()

        def flip(rows: BlockRows, block: int) -> None:
            with server.pool_path.open("r+b") as pool:
                at = pool.read().index(payloads_of(rows)[block].tobytes()) + 100
                pool.seek(at)
                byte = pool.read(1)[0]
                pool.seek(at)
                pool.write(bytes([byte ^ 1]))

        client = Client(server.address, options=ClientOptions(map_pool=mapped))
        tier = SidecarTier(client, [SPEC, make_spec("other")], time.monotonic)
        return Case(tier, flip, local=False, shared=True)

    return make


def dictionary_case(request: pytest.FixtureRequest, folder: Path) -> Case:
    """The double that other tests use has to keep the contract too, also through its wrappers."""
    inner = DictTier()

    def flip(rows: BlockRows, block: int) -> None:
        key = rows.namespace, str(rows.shard), rows.hash_at(block)
        value = inner.values[key]
        inner.values[key] = value._replace(payload=b"\xff" + value.payload[1:])

    held = HeldTier(FaultyTier(inner, 0, {}))
    held.open()
    return Case(held, flip, local=False)


CASES = [
    pytest.param(device_case, id="device"),
    pytest.param(host_case, id="host"),
    pytest.param(redis_case("shared_valkey"), id="valkey", marks=pytest.mark.redis),
    pytest.param(redis_case("shared_redis"), id="redis", marks=pytest.mark.redis),
    pytest.param(redis_case("shared_unix"), id="unix", marks=pytest.mark.redis),
    pytest.param(redis_case("shared_tls"), id="tls", marks=pytest.mark.redis),
    pytest.param(redis_case("shared_acl"), id="acl", marks=pytest.mark.redis),
    pytest.param(redis_case("shared_sentinel"), id="sentinel", marks=pytest.mark.redis),
    pytest.param(redis_case("shared_cluster"), id="cluster", marks=pytest.mark.redis),
    pytest.param(dictionary_case, id="dictionary"),
    pytest.param(sidecar_case(mapped=True), id="sidecar"),
    pytest.param(sidecar_case(mapped=False), id="streamed"),
]


def rows_of(letters: str) -> BlockRows:
    return make_chain(SPEC, letters, colliding=True).rows(WHOLE)
