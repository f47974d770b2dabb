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
from redis_bare import BareSocket, exists_command
from redis_blocks import KIB, Contest, keys_of, measure_contest, rows_of, soon
from redis_promotion import measure_promotion, shares_of
from redis_servers import cluster
from report import Report, interleaved_medians

from kvstore.block import SEGMENT_BLOCKS, BlockRows
from kvstore.tiers.redis import RedisOptions, RedisTier

NODES = 3
TRANSFERS = {128 * KIB: (256, 0.8), 512 * KIB: (128, 0.9), 2048 * KIB: (64, 0.9)}
"""As in ``redis_tier.py``; in short segments, so that so few blocks are on all nodes."""
SHORT_SEGMENT = 8
SEGMENTS = (16, 32, 64, 128, 256, 512)
LOOK_UPS = (512, 8192)
PROMPTS = 300
LONGEST_BLOCKS = 2048
SPREAD_PROMPTS = 200
SPREAD_BLOCKS = 512


def measure_cluster(report: Report, rounds: int) -> None:
    """All of it, on a cluster started here."""
    with ExitStack() as stack:
        url, clients = stack.enter_context(cluster(NODES))
        tier = stack.enter_context(closing(RedisTier(RedisOptions(url), time.monotonic)))
        ports = [client.connection_pool.connection_kwargs["port"] for client in clients]
        bare = [stack.enter_context(BareSocket(("127.0.0.1", port))) for port in ports]
        client = stack.enter_context(redis.RedisCluster(host="127.0.0.1", port=ports[0], protocol=2))
        for size, (blocks, goal) in TRANSFERS.items():
            rows = with_segments(rows_of(blocks, seed=size), SHORT_SEGMENT)
            shares = [
                (one, held) for one, held in zip(bare, shares_of(rows.tags, NODES), strict=True) if held
            ]
            contest = Contest(tier, shares, client, rows, size)
            measure_contest(report, contest, f"{NODES}-node cluster", rounds, goal)
            _empty(clients)
        measure_promotion(report, url, f"{NODES}-node cluster", bare, rounds)
        _empty(clients)
        for length in LOOK_UPS:
            _measure_existence(report, tier, bare, length, rounds)
        _empty(clients)
        _measure_spread(report, tier, clients)
        for blocks in SEGMENTS:
            _measure_segment(report, tier, clients, blocks, rounds)


def _empty(clients: list[Any]) -> None:
    for client in clients:
        client.flushall()


def with_segments(rows: BlockRows, blocks: int) -> BlockRows:
    """The same blocks in segments of another length."""
    firsts = [start for start in range(0, len(rows), blocks) for _ in range(min(blocks, len(rows) - start))]
    return replace(rows, tags=b"".join(rows.hash_at(first) for first in firsts))


def _measure_existence(
    report: Report, tier: RedisTier, bare: list[BareSocket], blocks: int, rounds: int
) -> None:
    """A prompt that is there, against one EXISTS a segment, sent to all nodes before the first is read."""
    rows, payload = rows_of(blocks, seed=5), np.zeros(64, dtype=np.uint8)
    tier.save(rows, [payload] * blocks, [0] * blocks, soon())
    assert tier.match(rows, soon()).blocks == blocks
    keys, commands, replies = keys_of(rows), [b""] * NODES, [b""] * NODES
    for node, share in enumerate(shares_of(rows.tags, NODES)):
        for start in range(0, len(share), SEGMENT_BLOCKS):
            segment = share[start : start + SEGMENT_BLOCKS]
            commands[node] += exists_command([keys[block] for block in segment])
            replies[node] += b":%d\r\n" % len(segment)

    def ask_all() -> None:
        for one, command in zip(bare, commands, strict=True):
            one.send(command)
        for one, reply in zip(bare, replies, strict=True):
            one.expect(reply)

    contenders: dict[str, Callable[[], object]] = {"tier": partial(tier.match, rows, soon()), "bare": ask_all}
    medians = interleaved_medians(contenders, 4 * rounds)
    report.result(
        case=f"{blocks} keys, all present, again, {NODES}-node cluster",
        us=medians["tier"] * 1e6,
        bare_us=medians["bare"] * 1e6,
        ratio=medians["tier"] / medians["bare"],
    )


def _measure_spread(report: Report, tier: RedisTier, clients: list[Any]) -> None:
    """Prompts of all lengths stored: keys and bytes of each node, and the fullest one over the mean."""
    random, payload = np.random.default_rng(11), np.zeros(KIB, dtype=np.uint8)
    empty = [int(client.info("memory")["used_memory_dataset"]) for client in clients]
    for number in range(SPREAD_PROMPTS):
        rows = rows_of(int(random.integers(1, SPREAD_BLOCKS)), seed=1000 + number)
        tier.save(rows, [payload] * len(rows), [0] * len(rows), soon())
    keys = [int(client.dbsize()) for client in clients]
    used = [int(client.info("memory")["used_memory_dataset"]) for client in clients]
    held = [after - before for after, before in zip(used, empty, strict=True)]
    for number in range(NODES):
        report.result(
            case=f"spread, node {number + 1} of {NODES}", keys=keys[number], mib=held[number] / 2**20
        )
    report.result(
        case=f"spread, {SPREAD_PROMPTS} prompts of 1 to {SPREAD_BLOCKS} blocks, fullest over mean",
        keys=max(keys) * NODES / sum(keys),
        mib=max(held) * NODES / sum(held),
    )
    _empty(clients)


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
    _empty(clients)
    report.result(case=f"spread expected, segments of {blocks}", **_spread(blocks))


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
