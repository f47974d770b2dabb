"""What do eviction policies cost, and what do they hit?

Cost: a policy is filled with prompts of ``PROMPT_BLOCKS`` blocks and then asked for more of them, each of
which takes room from others, as in a server; reported a block. Replay: the conversation trace at one
capacity, against a bare loop over an OrderedDict with the same block numbers, which has no notion of
prefixes. Reading the trace and naming its blocks is apart from both. Times are of the processor, so that a
busy machine changes them little.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from report import Report, parser

from kvstore.block import HASH_BYTES
from kvstore.evict.base import Evictor, Occupancy, Touch
from kvstore.hints import Hints
from kvstore.simulate import POLICIES, MakeEvictor, Workload, replay
from kvstore.trace import read_trace

CONVERSATION = Path(__file__).resolve().parents[1] / "tests/data/conversation_trace.jsonl.gz"
ONLINE = [name for name in POLICIES if name != "oracle"]
CAPACITIES = (1_000, 3_000, 5_000, 10_000, 30_000, 50_000, 100_000)
GOALS = {1_000: 8.5, 3_000: 14.0, 5_000: 17.5, 10_000: 23.5, 30_000: 33.2, 50_000: 35.6}
TOLD_GOALS = {3_000: 22.0, 5_000: 30.0, 10_000: 35.0}
PROMPT_BLOCKS = 128
PROMPTS = 800
REPLAYED_BLOCKS = 10_000
ROUNDS = 5


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("policies", ("numpy",))
    nanoseconds = {policy: measure_cost(report, policy) for policy in ONLINE}
    report.goal("lru, ns a block touched, added and evicted", nanoseconds["lru"], at_most=1000)
    ratio = nanoseconds["reuse"] / nanoseconds["lru"]
    report.goal("reuse over lru, a block", ratio, at_most=3)
    workload = Workload.of(read_trace([CONVERSATION]))
    measure_replay(report, workload)
    measure_hits(report, workload)
    measure_hints(report, workload)
    report.finish(json=options.json)


def measure_cost(report: Report, policy: str) -> float:
    """Nanoseconds a block of one prompt that is touched and one that is added for one that is evicted."""
    bare = Workload.of([])
    make_evictor = POLICIES[policy](bare)
    for prompt in range(3 * PROMPTS):
        _hashes(prompt)
    seconds = statistics.median(_turnover(make_evictor) for _ in range(ROUNDS))
    tracemalloc.start()
    evictor, _ = _filled(make_evictor)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del evictor
    blocks = PROMPTS * PROMPT_BLOCKS
    nanoseconds = seconds / blocks * 1e9
    # The occupancy is the pool's own; it has three columns of four bytes.
    report.result(policy=policy, ns_a_block=nanoseconds, bytes_a_tracked_block=size / blocks - 12)
    return nanoseconds


def _filled(make_evictor: MakeEvictor) -> tuple[Evictor, Occupancy]:
    blocks = PROMPTS * PROMPT_BLOCKS
    occupancy = Occupancy(*(np.zeros(blocks, dtype=np.int32) for _ in range(3)))
    evictor = make_evictor(occupancy)
    for prompt in range(PROMPTS):
        _bring(evictor, occupancy, np.arange(PROMPT_BLOCKS) + prompt * PROMPT_BLOCKS, prompt)
    return evictor, occupancy


def _turnover(make_evictor: MakeEvictor) -> float:
    """Seconds to touch all prompts, and to replace all by others."""
    evictor, occupancy = _filled(make_evictor)
    started = time.process_time()
    for prompt in range(PROMPTS):
        slots = np.arange(PROMPT_BLOCKS) + prompt * PROMPT_BLOCKS
        evictor.touch(Touch(_hashes(prompt), slots, PROMPT_BLOCKS, float(PROMPTS + prompt)))
    for prompt in range(PROMPTS):
        freed: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        missing = PROMPT_BLOCKS
        while missing:
            victims = evictor.victims(missing)
            parents = occupancy.parent[victims]
            np.subtract.at(occupancy.children, parents[parents >= 0], 1)
            freed.append(victims)
            missing -= len(victims)
        _bring(evictor, occupancy, np.sort(np.concatenate(freed)), 2 * PROMPTS + prompt)
    return time.process_time() - started


def _bring(
    evictor: Evictor, occupancy: Occupancy, slots: np.ndarray[tuple[int], np.dtype[np.int64]], prompt: int
) -> None:
    hashes, now = _hashes(prompt), float(prompt)
    evictor.touch(Touch(hashes, slots[:0], 0, now))
    occupancy.parent[slots[0]] = -1
    occupancy.parent[slots[1:]] = slots[:-1]
    occupancy.children[slots[:-1]] = 1
    occupancy.children[slots[-1]] = 0
    evictor.add(slots, hashes, -1, now)


@cache
def _hashes(prompt: int) -> bytes:
    """Made once: naming blocks is no policy's work."""
    return b"".join(
        (prompt * PROMPT_BLOCKS + block).to_bytes(HASH_BYTES, "little") for block in range(PROMPT_BLOCKS)
    )


def measure_replay(report: Report, workload: Workload) -> None:
    """LRU and reuse over the conversation trace at one capacity, in turns with the bare loop."""
    plain = [ids.tolist() for ids in workload.blocks]
    seconds: dict[str, list[float]] = {"bare": [], "lru": [], "reuse": []}
    for _ in range(ROUNDS):
        started = time.process_time()
        bare_loop(plain, REPLAYED_BLOCKS)
        seconds["bare"].append(time.process_time() - started)
        for policy in ("lru", "reuse"):
            started = time.process_time()
            replay(workload, POLICIES[policy](workload), REPLAYED_BLOCKS)
            seconds[policy].append(time.process_time() - started)
    bare = min(seconds["bare"])
    for policy in ("lru", "reuse"):
        least = min(seconds[policy])
        report.result(policy=policy, replay_s=least, bare_loop_s=bare, ratio=least / bare)
    report.goal("replay with lru over a bare OrderedDict loop", min(seconds["lru"]) / bare, at_most=4)


def bare_loop(prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """What anybody would write: one dictionary, one look-up and one move a block, tail first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        for block in reversed(prompt):
            if block in kept:
                kept.move_to_end(block)
                hits += 1
            else:
                kept[block] = None
                if len(kept) > capacity:
                    kept.popitem(last=False)
    return hits


def measure_hits(report: Report, workload: Workload) -> None:
    """Percent of all blocks, at each capacity, for each policy and the oracle."""
    rates = {
        (policy, blocks): replay(workload, POLICIES[policy](workload), blocks).block_rate * 100
        for policy in POLICIES
        for blocks in CAPACITIES
    }
    for policy in POLICIES:
        report.result(policy=policy, **{f"percent_{blocks}": rates[policy, blocks] for blocks in CAPACITIES})
    for blocks, least in GOALS.items():
        report.goal(f"reuse, percent of blocks at {blocks:,}", rates["reuse", blocks], at_least=least)
    behind = max(
        rates[policy, blocks] - rates["reuse", blocks]
        for policy in ONLINE
        if policy != "reuse"
        for blocks in CAPACITIES
    )
    report.goal("points of the best other policy above reuse, anywhere", behind, at_most=0.3)


def measure_hints(report: Report, workload: Workload) -> None:
    """``reuse`` where requests say ``ended`` when nobody will use more than half of their prompt again."""
    used_last = np.zeros(workload.distinct_blocks, dtype=np.int64)
    for number, ids in enumerate(workload.blocks):
        used_last[ids] = number
    told = [
        replace(request, hints=Hints(ended=bool(used_last[ids[len(ids) // 2]] == number)))
        for number, (request, ids) in enumerate(zip(workload.requests, workload.blocks, strict=True))
    ]
    with_ends = replace(workload, requests=told)
    for blocks, least in TOLD_GOALS.items():
        rate = replay(with_ends, POLICIES["reuse"](with_ends), blocks).block_rate * 100
        report.goal(f"reuse told of ends, percent of blocks at {blocks:,}", rate, at_least=least)


if __name__ == "__main__":
    main()
