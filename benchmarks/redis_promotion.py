"""The part of ``redis_tier.py`` that goes through the store: a prompt brought from redis to leased blocks."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from redis_bare import BareSocket
from redis_blocks import BLOCK_SIZE, Contest
from report import Report

from hashing import KVShape, Namespace
from kvstore.block import HASH_BYTES, WHOLE, Chain
from kvstore.evict.lru import LRU
from kvstore.spec import NamespaceSpec
from kvstore.store import StoreOptions, TieredStore, Tiers
from kvstore.tiers.host import HostTier
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_connection import slot_of

PROMPT_TOKENS = 2048
SMOLLM2 = KVShape(layers=30, planes=2, kv_heads=3, head_size=64)
FLOAT32_BYTES = 4
EXTENT_BYTES = 64 << 20
SLOTS = 16384


def measure_promotion(report: Report, url: str, place: str, bare: Sequence[BareSocket], rounds: int) -> None:
    """A prompt of SmolLM2-135M's shape, and what a bare loop takes for the same bytes from the same nodes.

    ``bare`` has one socket a node; the nodes share the hash slots evenly, in that order.
    """
    fields = Namespace("benchmark", "0", "float32", "none", BLOCK_SIZE, SMOLLM2)
    size = SMOLLM2.layers * SMOLLM2.planes * SMOLLM2.kv_heads * SMOLLM2.head_size * BLOCK_SIZE * FLOAT32_BYTES
    spec = NamespaceSpec(fields, payload_bytes=size)
    tokens = np.random.default_rng(3).integers(0, 2**17, PROMPT_TOKENS).astype(np.uint32)
    chain = Chain.of(spec.root, tokens)
    rows = chain.rows(WHOLE)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        closing(RedisTier(RedisOptions(url), time.monotonic)) as tier,
    ):
        held = zip(bare, shares_of(rows.tags, len(bare)), strict=True)
        contest = Contest(tier, [(one, blocks) for one, blocks in held if blocks], None, rows, size)
        contest.contenders["SET"]["tier"]()
        host = HostTier(
            Path(folder) / "pool",
            pool_bytes=4 * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            make_evictor=LRU,
            clock=time.monotonic,
        )
        patient = StoreOptions(probe_seconds=5.0, flight_seconds=30.0)
        tiers = Tiers(host, remote=tier)
        with closing(TieredStore(tiers, clock=time.monotonic, options=patient)) as store:
            store.register(spec)
            promoted, socket_only = [], []
            for number in range(rounds + 1):
                started = time.perf_counter()
                lease = store.acquire(str(number), chain)
                store.wait(lease, 30.0)
                promoted.append(time.perf_counter() - started)
                assert lease.blocks == len(chain), lease.cause
                store.release(lease)
                assert store.clear(spec.root.digest) == (len(chain), 0)
                started = time.perf_counter()
                contest.contenders["GET"]["bare"]()
                socket_only.append(time.perf_counter() - started)
    whole, floor = statistics.median(promoted[1:]), statistics.median(socket_only[1:])
    report.result(
        case=f"{PROMPT_TOKENS} tokens of SmolLM2-135M, float32, redis to host, {place}",
        mib=len(chain) * size / 2**20,
        ms=whole * 1e3,
        bare_ms=floor * 1e3,
        share_of_socket=floor / whole,
    )


def shares_of(tags: bytes, nodes: int) -> list[list[int]]:
    """The blocks that each of the nodes has, by their segments' tags."""
    shares: list[list[int]] = [[] for _ in range(nodes)]
    for block in range(len(tags) // HASH_BYTES):
        slot = slot_of(tags[block * HASH_BYTES : (block + 1) * HASH_BYTES])
        shares[slot * nodes // SLOTS].append(block)
    return shares
