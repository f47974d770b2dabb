"""A prefill and a decode process, each on a core of its own; the parent stops and continues the first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from prefill_rig import Prompts, load_packaged, open_worker

from prefill.model import LoadedModel

SLICE_SECONDS = 4.0
_STREAM_TOKENS, _STREAM_NEW = 64, 2000


@dataclass(frozen=True)
class Split:
    """Seconds between tokens of the decode process, and the share of time that the host took away."""

    alone: list[float]
    beside: list[float]
    steal_percent: float


def measure_split(streams: int, prompt: int, rounds: int) -> Split:
    """Alternate slices with the prefill process stopped and running. Needs two cores."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    processes = _start(first, "prefill", prompt), _start(second, "decode", streams)
    try:
        for process in processes:
            assert _pipe(process.stdout).readline() == "ready\n", "a process ended before it began"
        return _take_slices(*processes, rounds)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _take_slices(prefill: subprocess.Popen[str], decode: subprocess.Popen[str], rounds: int) -> Split:
    stolen, all_ticks = _ticks()
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        for gaps, number in ((alone, signal.SIGSTOP), (beside, signal.SIGCONT)):
            prefill.send_signal(number)
            print("go", file=_pipe(decode.stdin), flush=True)
            gaps += json.loads(_pipe(decode.stdout).readline())
    stolen_then, all_then = _ticks()
    return Split(alone, beside, 100 * (stolen_then - stolen) / max(1, all_then - all_ticks))


def _start(core: int, role: str, argument: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__, role, str(argument)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.sched_setaffinity(process.pid, {core})
    return process


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _ticks() -> tuple[int, int]:
    """(Stolen, all) clock ticks of all cores since the machine started."""
    total = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0]
    ticks = [int(each) for each in total.split()[1:]]
    return ticks[7], sum(ticks[:8])


def serve(role: str, argument: int) -> None:
    """What a process does: prompts without end, or decoding for a slice whenever it is told to."""
    torch.set_num_threads(1)
    loaded = load_packaged()
    if role == "prefill":
        compute_prompts(loaded, argument)
    else:
        decode_slices(loaded, argument)


def compute_prompts(loaded: LoadedModel, length: int) -> None:
    prompts = Prompts(loaded, length)
    with open_worker(loaded, length + 64) as worker:
        print("ready", flush=True)
        while True:
            worker.engine.run([prompts.request("long", prompts.tokens(length), 1)])


def decode_slices(loaded: LoadedModel, streams: int) -> None:
    prompts = Prompts(loaded, streams)
    with open_worker(loaded, streams * (_STREAM_TOKENS + _STREAM_NEW + 64)) as worker:
        engine = worker.engine
        for number in range(streams):
            tokens = prompts.tokens(_STREAM_TOKENS)
            engine.submit(prompts.request(f"stream {number}", tokens, _STREAM_NEW))
        engine.step()
        print("ready", flush=True)
        for _ in sys.stdin:
            ends = time.perf_counter() + SLICE_SECONDS
            latest: dict[str, float] = {}
            gaps: list[float] = []
            while time.perf_counter() < ends:
                for output in engine.step():
                    said_at = time.perf_counter()
                    if output.request_id in latest:
                        gaps.append(said_at - latest[output.request_id])
                    latest[output.request_id] = said_at
            assert engine.running == streams, "the streams ended too early"
            print(json.dumps(gaps), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
