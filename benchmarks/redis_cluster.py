"""The part of ``redis_tier.py`` on a cluster of three nodes: speed, spread, and the length of a segment."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import redis
from redis_bare import BareSocket
from redis_blocks import Contest, rows_of, soon
from redis_servers import cluster
from report import Report, interleaved_medians

from kvstore.block import HASH_BYTES, SEGMENT_BLOCKS, BlockRows
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_connection import slot_of

NODES = 3
SLOTS = 16384
KIB = 1024
SIZES = {128 * KIB: 256, 512 * KIB: 256}
SEGMENTS = (16, 32, 64, 128, 256, 512)
LOOK_UPS = (512, 8192)
PROMPTS = 300
LONGEST_BLOCKS = 2048


def measure_cluster(report: Report, rounds: int) -> None:
    """All of it, on a cluster started here."""
    with cluster(NODES) as (url, clients), closing(RedisTier(RedisOptions(url), time.monotonic)) as tier:
        _measure_transfers(report, url, tier, clients, rounds)
        for client in clients:
            client.flushall()
        for blocks in SEGMENTS:
            _measure_segment(report, tier, clients, blocks, rounds)


def with_segments(rows: BlockRows, blocks: int) -> BlockRows:
    """The same blocks in segments of another length."""
    firsts = [start for start in range(0, len(rows), blocks) for _ in range(min(blocks, len(rows) - start))]
    return replace(rows, tags=b"".join(rows.hash_at(first) for first in firsts))


def _measure_transfers(report: Report, url: str, tier: RedisTier, clients: list[Any], rounds: int) -> None:
    port = clients[0].connection_pool.connection_kwargs["port"]
    with ExitStack() as stack:
        ports = [client.connection_pool.connection_kwargs["port"] for client in clients]
        bare = [stack.enter_context(BareSocket(("127.0.0.1", each))) for each in ports]
        client = stack.enter_context(redis.RedisCluster(host="127.0.0.1", port=port, protocol=2))
        for size, blocks in SIZES.items():
            rows = with_segments(rows_of(blocks, seed=size), SEGMENT_BLOCKS // 4)
            shares = [[b for b in range(blocks) if _node_of(rows, b) == number] for number in range(NODES)]
            contest = Contest(tier, list(zip(bare, shares, strict=True)), client, rows, size)
            for command, contenders in contest.contenders.items():
                medians = interleaved_medians(contenders, rounds)
                report.result(
                    case=f"{command} {size // KIB} KiB, {NODES}-node cluster",
                    gb_per_second=blocks * size / medians["tier"] / 1e9,
                    bare_gb_per_second=blocks * size / medians["bare"] / 1e9,
                    share_of_bare=medians["bare"] / medians["tier"],
                    times_redis_py=medians["redis-py"] / medians["tier"],
                )
            contest.check()


def _measure_segment(report: Report, tier: RedisTier, clients: list[Any], blocks: int, rounds: int) -> None:
    """What look-ups cost, and how prompts spread, with segments of so many blocks."""
    payload = np.zeros(64, dtype=np.uint8)
    contenders: dict[str, Callable[[], object]] = {}
    for length in LOOK_UPS:
        cold, warm = (with_segments(rows_of(length, seed=seed), blocks) for seed in (1, 2))
        tier.save(warm, [payload] * length, [0] * length, soon())
        assert (tier.match(cold, soon()).blocks, tier.match(warm, soon()).blocks) == (0, length)
        contenders[f"none of {length}"] = partial(tier.match, cold, soon())
        contenders[f"all of {length}"] = partial(tier.match, warm, soon())
    medians = interleaved_medians(contenders, 4 * rounds)
    for name, run in contenders.items():
        ours, theirs = _processor_seconds(clients, run, 4 * rounds)
        report.result(
            case=f"look-up, {name} present, segments of {blocks}",
            us=medians[name] * 1e6,
            cpu_us=ours * 1e6,
            servers_cpu_us=theirs * 1e6,
        )
    for client in clients:
        client.flushall()
    report.result(case=f"spread over {NODES} nodes, segments of {blocks}", **_spread(blocks))


def _processor_seconds(clients: list[Any], run: Callable[[], object], calls: int) -> tuple[float, float]:
    """(Ours, all servers') a call: unlike the time that passes, the same on a busy machine."""

    def servers() -> float:
        states = [client.info("cpu") for client in clients]
        return float(sum(state["used_cpu_user"] + state["used_cpu_sys"] for state in states))

    theirs, ours = servers(), time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - ours) / calls, (servers() - theirs) / calls


def _spread(blocks: int) -> dict[str, float]:
    """For prompts of all lengths: the fullest node over the mean, and the nodes that a prompt is on."""
    random = np.random.default_rng(11)
    held = np.zeros(NODES)
    asked = []
    for _ in range(PROMPTS):
        length = int(random.integers(1, LONGEST_BLOCKS))
        nodes = [int(node) for node in random.integers(0, NODES, -(-length // blocks))]
        for number, node in enumerate(nodes):
            held[node] += min(blocks, length - number * blocks)
        asked.append(len(set(nodes)))
    return {"fullest_over_mean": float(held.max() / held.mean()), "nodes_a_prompt": float(np.mean(asked))}


def _node_of(rows: BlockRows, block: int) -> int:
    return slot_of(rows.tags[block * HASH_BYTES : (block + 1) * HASH_BYTES]) * NODES // SLOTS
