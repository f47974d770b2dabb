"""How long does a look-up take, over that of a handler that only receives the same bytes?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from report import Report, interleaved_medians
from service_calls import (
    Stub,
    by_hashes,
    by_tokens,
    draw_prompts,
    looks_up,
    open_client,
    write_prompts,
)
from service_processes import BLOCK_SIZE, Processes, spec_of

GOALS = {32_768: 2.5, 131_072: 4.0}
PROMPTS = 8
ROUNDS = 40
PAYLOAD_BYTES = 64

LMCACHE_ROUNDS = 20
LMCACHE_SECONDS = 300.0
_LMCACHE = Path(__file__).with_name("service_lmcache.py")

RESIDENT = (1_000_000, 100_000)
RESIDENT_TOKENS = 32_768
RESIDENT_ROUNDS = 48
BYTES_A_BLOCK = 300
SPARE = 128 << 20


def measure_lookups(report: Report, processes: Processes) -> None:
    """By token ids, by hashes and through the client, beside the empty handler; then LMCache's server."""
    ours_by_length: dict[int, float] = {}
    server, empty = processes.sidecar(pool_bytes="256MiB"), processes.empty()
    ours, bare = Stub(server), Stub(empty)
    with open_client(server) as client:
        namespace = client.namespace(spec_of("lookups", PAYLOAD_BYTES))
        for length, limit in GOALS.items():
            prompts = draw_prompts(PROMPTS, length, seed=length)
            write_prompts(namespace, prompts)
            processes.settle()
            ids = [by_tokens(namespace, tokens) for tokens in prompts]
            hashes = [by_hashes(namespace, tokens) for tokens in prompts]
            contenders = {
                "token ids": ours.asks(ids),
                "empty": bare.sends(ids),
                "hashes": ours.asks(hashes),
                "empty, hashes": bare.sends(hashes),
                "client": looks_up(namespace, prompts),
            }
            medians = interleaved_medians(contenders, ROUNDS)
            for case, floor in (("token ids", "empty"), ("hashes", "empty, hashes"), ("client", "empty")):
                report.result(
                    part="look-up",
                    case=f"{length:,} tokens, {case}",
                    ms=medians[case] * 1e3,
                    floor_ms=medians[floor] * 1e3,
                    ratio=medians[case] / medians[floor],
                )
            ours_by_length[length] = medians["token ids"]
            over = medians["token ids"] / medians["empty"]
            report.goal(f"look-up of {length:,} token ids over an empty handler", over, at_most=limit)
            less = medians["hashes"] / medians["token ids"]
            report.goal(f"look-up of {length:,} tokens by hashes over by token ids", less, at_most=1.0)
    ours.close()
    bare.close()
    _add_lmcache(report, ours_by_length, processes.lmcache_python)


def _add_lmcache(report: Report, ours: dict[int, float], python: str | None) -> None:
    """LMCache's figures, as a multiple of ours."""
    if python is None:
        report.result(part="look-up", case="LMCache: not installed")
        return
    command = [python, str(_LMCACHE), str(LMCACHE_ROUNDS), *map(str, ours)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LMCACHE_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    for length, seconds in json.loads(done.stdout.splitlines()[-1]).items():
        case, mine = f"{int(length):,} tokens, LMCache (floor: ours)", ours[int(length)]
        report.result(part="look-up", case=case, ms=seconds * 1e3, floor_ms=mine * 1e3, ratio=seconds / mine)


def measure_residents(report: Report, processes: Processes) -> None:
    """Whole calls to a server that is full of prompts and to one that has a tenth of them, in turn."""
    with ExitStack() as opened:
        asks: dict[int, Callable[[], None]] = {}
        for resident in RESIDENT:
            # Most of so many blocks are dropped on their way to Redis: that is not what is measured.
            server = processes.sidecar(
                pool_bytes=str(resident * BYTES_A_BLOCK + SPARE), redis_queue_bytes="1MiB"
            )
            prompts = draw_prompts(
                resident * BLOCK_SIZE // RESIDENT_TOKENS + 1, RESIDENT_TOKENS, seed=resident
            )
            client, stub = opened.enter_context(open_client(server)), Stub(server)
            opened.callback(stub.close)
            namespace = client.namespace(spec_of("residents", PAYLOAD_BYTES))
            write_prompts(namespace, prompts)
            order = np.random.default_rng(7).permutation(len(prompts))[: RESIDENT_ROUNDS + 1]
            asks[resident] = stub.asks([by_tokens(namespace, prompts[at]) for at in order])
        processes.settle()
        medians = interleaved_medians({str(resident): ask for resident, ask in asks.items()}, RESIDENT_ROUNDS)
    many, few = (medians[str(resident)] for resident in RESIDENT)
    for resident, seconds in zip(RESIDENT, (many, few), strict=True):
        case = f"{RESIDENT_TOKENS:,} tokens never asked before, {resident:,} resident blocks"
        report.result(part="residents", case=case, ms=seconds * 1e3, floor_ms=few * 1e3, ratio=seconds / few)
    name = f"look-up of {RESIDENT_TOKENS // BLOCK_SIZE:,} blocks among {RESIDENT[0]:,} over {RESIDENT[1]:,}"
    report.goal(name, many / few, at_most=1.5)
