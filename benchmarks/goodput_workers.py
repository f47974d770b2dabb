"""``prefill serve`` as real processes on two cores, in each of the ways to share these between two phases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.tiers.redis_embedded import EmbeddedRedis

_MEMORY = {"pool-bytes": "512MiB", "device-bytes": "1GiB"}
_END_SECONDS = 30.0
_REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mode:
    """Flags of the one process that has both cores, or of two that have one each."""

    name: str
    flags: Mapping[str, str]
    is_split: bool = False


@contextmanager
def serving(mode: Mode) -> Iterator[str]:
    """The gRPC address that clients of the mode ask."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        if not mode.is_split:
            yield stack.enter_context(_worker(folder / "both", {first, second}, mode.flags))
            return
        redis = stack.enter_context(EmbeddedRedis.start(maxmemory_bytes=2**30))
        shared = {"redis-url": redis.url, **mode.flags}
        prefill = stack.enter_context(_worker(folder / "prefill", {first}, {"role": "prefill", **shared}))
        decode = {"role": "decode", "prefill-at": prefill, **shared}
        yield stack.enter_context(_worker(folder / "decode", {second}, decode))


@contextmanager
def _worker(pool: Path, cores: set[int], flags: Mapping[str, str]) -> Iterator[str]:
    places = {"listen": "127.0.0.1:0", "http": "none", "pool-path": str(pool)}
    given = {"redis-url": "none", **_MEMORY, **places, **flags}
    process = _start([part for name, value in given.items() for part in (f"--{name}", value)], cores)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said, "the worker ended before it served; its log is above"
        yield json.loads(said)["grpc"][0]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _start(arguments: Sequence[str], cores: set[int]) -> subprocess.Popen[str]:
    """On these cores from its first thread on, and with a thread for each."""
    settings = {"OMP_NUM_THREADS": str(len(cores)), "KVSTORE_LOG_LEVEL": "warning"}
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "prefill", "serve", "--json", *arguments],
            cwd=_REPOSITORY,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, ours)
