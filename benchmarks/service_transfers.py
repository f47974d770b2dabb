"""What do leases, two-phase writes and verification add to copying the bytes?

The bare loops copy the same blocks between the same memory: the caller's own, and the slots of the
mapped pool file. Both are touched beforehand, since the first touch of a page costs more than copying it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash
from report import Report
from service_calls import Tokens, clear_blocks, draw_prompts, open_client
from service_processes import BLOCK_SIZE, Processes, spec_of

from kvstore.service.client import ClientNamespace
from kvstore.tiers.base import Payload

MIB = 1 << 20
SIZES = (1 * MIB, 64 * MIB, 512 * MIB)
BLOCKS = (MIB // 8, MIB // 2, 2 * MIB)
GOAL_FROM = 64 * MIB
READ_GOAL = 0.8
WRITE_GOAL = 0.7
ROUNDS = {1 * MIB: 40, 64 * MIB: 12, 512 * MIB: 5}
POOL = "1GiB"
SETTLE_SECONDS = 20.0


class Timed(NamedTuple):
    """Seconds of one round."""

    ours: float
    bare: float


@dataclass(frozen=True)
class Case:
    """One prompt's payloads in the caller's memory, and the namespace that they belong to."""

    namespace: ClientNamespace
    sources: list[Payload]
    targets: list[Payload]

    @property
    def tokens(self) -> int:
        return len(self.sources) * BLOCK_SIZE


def measure_transfers(report: Report, processes: Processes) -> None:
    """Reads and writes of every size in blocks of every size."""
    server = processes.sidecar(pool_bytes=POOL)
    source = np.random.default_rng(5).integers(0, 2**63, SIZES[-1] // 8).view(np.uint8)
    target = np.zeros_like(source)

    def clear() -> None:
        # What waits for Redis is held until that has it.
        deadline = time.perf_counter() + SETTLE_SECONDS
        while held := clear_blocks(server):
            assert time.perf_counter() < deadline, f"{held} blocks are still held"
            time.sleep(0.02)

    with open_client(server) as client:
        for block in BLOCKS:
            namespace = client.namespace(spec_of(f"transfers of {block}", block))
            for size in (size for size in SIZES if size >= block):
                cut = [array[:size].reshape(-1, block) for array in (source, target)]
                case = Case(namespace, list(cut[0]), list(cut[1]))
                _add(report, "read", size, block, _reads(case, ROUNDS[size]))
                clear()
                _add(report, "write", size, block, _writes(case, ROUNDS[size], clear))


def _add(report: Report, part: str, size: int, block: int, timed: list[Timed]) -> None:
    ours, bare = (statistics.median(column) for column in zip(*timed, strict=True))
    # Of each pair, since they followed each other: on a busy machine that tells more than two medians.
    share = statistics.median(pair.bare / pair.ours for pair in timed)
    name = f"{size // MIB} MiB in blocks of {block // 1024} KiB"
    gib = size / (1 << 30)
    report.result(
        part=part, case=name, ms=ours * 1e3, floor_ms=bare * 1e3, share=share, gib_per_second=gib / ours
    )
    if size >= GOAL_FROM:
        goal = READ_GOAL if part == "read" else WRITE_GOAL
        report.goal(f"{part} of {name}, share of a bare loop's speed", share, at_least=goal)


def _reads(case: Case, rounds: int) -> list[Timed]:
    """Acquire, copy out and release; and the copies alone."""
    [tokens] = draw_prompts(1, case.tokens, seed=1)
    _write(case, tokens)
    timed = []
    for _ in range(rounds + 1):
        _blank(case.targets)
        started = time.perf_counter()
        with case.namespace.acquire(tokens) as lease:
            copied = lease.copy_out(case.targets)
        ours = time.perf_counter() - started
        assert copied == len(case.sources), (copied, lease.outcome, lease.cause)
        _compare(case)
        with case.namespace.acquire(tokens) as lease:
            views = lease.views()
            timed.append(Timed(ours, _seconds(partial(_copy, case.targets, views))))
    return timed[1:]


def _writes(case: Case, rounds: int, clear: Callable[[], None]) -> list[Timed]:
    """Begin, copies and commit; and the copies and checksums alone."""
    timed = []
    # Both, and every round, get the same slots, since nothing else is in the pool: one round touches them.
    for number in range(rounds + 1):
        [tokens] = draw_prompts(1, case.tokens, seed=100 + number)
        with case.namespace.write(tokens) as staged:
            bare = _seconds(partial(_copy_and_sum, staged.payloads, case.sources))
            staged.abort()
        started = time.perf_counter()
        _write(case, tokens)
        timed.append(Timed(time.perf_counter() - started, bare))
        with case.namespace.acquire(tokens) as lease:
            lease.copy_out(case.targets)
        _compare(case)
        clear()
    return timed[1:]


def _write(case: Case, tokens: Tokens) -> None:
    with case.namespace.write(tokens) as staged:
        staged.copy_in(case.sources)
    assert staged.committed_blocks == len(case.sources), (staged.outcome, staged.committed_blocks)


def _copy(targets: list[Payload], sources: list[Payload]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _copy_and_sum(targets: list[Payload], sources: list[Payload]) -> list[int]:
    sums = []
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
        sums.append(xxhash.xxh3_64_intdigest(target.data))
    return sums


def _compare(case: Case) -> None:
    assert all(map(np.array_equal, case.targets, case.sources)), "a wrong byte was read"


def _blank(targets: list[Payload]) -> None:
    for target in targets:
        target[:64] = 0


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
