"""What does it cost a look-up to be counted?

Stores with the same resident prompts take turns: one without listeners, one with the counters of
``kvstore serve``, one with the what-if as well, one with all that may listen there: events and a recording
too. A look-up is a prompt hashed and probed, or hashed, acquired and released; half of the requests end in
blocks that nobody has stored. Times are CPU times: of the owner's thread, on which look-ups happen, and
beside it of the threads on which what-if and recording work, which let the owner go first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Report, parser

from hashing import KVShape, Namespace
from kvstore.block import Chain
from kvstore.events import Listener
from kvstore.evict.lru import LRU
from kvstore.metrics import CollectorRegistry, Metrics
from kvstore.record import Recorder
from kvstore.service.events import EventLog
from kvstore.spec import NamespaceSpec
from kvstore.store import TieredStore, Tiers
from kvstore.tiers.host import HostTier
from kvstore.whatif import WhatIf

BLOCK_SIZE = 16
PAYLOAD_BYTES = 64
EXTENT_BYTES = 16 << 20
EXTENTS = 8
PROMPTS = 40
PROMPT_BLOCKS = (128, 2048)
ROUNDS = 80
SETTLE_SECONDS = 0.01
"""In which other threads catch up."""
REQUESTS = 10
"""Of one turn."""

Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]


@dataclass(frozen=True)
class Contender:
    """A store, and what listens to it."""

    store: TieredStore
    spec: NamespaceSpec


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("metrics_cost", ("numpy", "prometheus-client"))
    with ExitStack() as opened:
        contenders = {
            name: opened.enter_context(contender(listeners(name, opened)))
            for name in ("nothing", "counters", "what_if", "everything")
        }
        for blocks in PROMPT_BLOCKS:
            measure(report, contenders, blocks)
    report.finish(json=options.json)


def listeners(name: str, opened: ExitStack) -> tuple[Listener, ...]:
    if name == "nothing":
        return ()
    metrics = Metrics(CollectorRegistry(), lambda _: "model")
    if name == "counters":
        return (metrics,)
    pool_bytes, block_bytes = EXTENTS * EXTENT_BYTES, 2 * PAYLOAD_BYTES
    what_if = WhatIf(LRU, pool_bytes, lambda _: block_bytes)
    if name == "what_if":
        opened.callback(what_if.close)
        return metrics, what_if
    folder = opened.enter_context(tempfile.TemporaryDirectory())
    recorder = Recorder(
        Path(folder) / "trace.jsonl",
        1 << 30,
        lambda _: block_bytes,
        clock=time.monotonic,
        wall_clock=time.time,
    )
    opened.callback(what_if.close)
    opened.callback(recorder.close)
    return metrics, EventLog(), what_if, recorder


@contextmanager
def contender(heard_by: tuple[Listener, ...]) -> Iterator[Contender]:
    shape = KVShape(layers=1, planes=2, kv_heads=1, head_size=1)
    spec = NamespaceSpec(Namespace("benchmark", "0", "uint8", "none", BLOCK_SIZE, shape), PAYLOAD_BYTES)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        host = HostTier(
            Path(folder) / "pool",
            pool_bytes=EXTENTS * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            make_evictor=LRU,
            clock=time.monotonic,
        )
        store = TieredStore(Tiers(host), clock=time.monotonic, listeners=heard_by)
        store.register(spec)
        yield Contender(store, spec)
        store.close()


def measure(report: Report, contenders: dict[str, Contender], blocks: int) -> None:
    random = np.random.default_rng(blocks)
    prompts = [random.integers(0, 2**17, blocks * BLOCK_SIZE).astype(np.uint32) for _ in range(PROMPTS)]
    for each in contenders.values():
        for tokens in prompts:
            with each.store.write(Chain.of(each.spec.root, tokens)):
                pass
    forked = [np.concatenate((tokens[: len(tokens) // 2], tokens[: len(tokens) // 2])) for tokens in prompts]
    asked = [tokens for pair in zip(prompts, forked, strict=True) for tokens in pair]
    for kind, look_up in (("probe", probe), ("acquire and release", lease)):
        turns = {name: turn(each, asked, look_up) for name, each in contenders.items()}
        for name in ("counters", "what_if", "everything"):
            bare, heard, beside = microseconds(turns["nothing"], turns[name], settle=name != "counters")
            percent = 100 * (heard / bare - 1)
            report.result(
                look_up=kind,
                blocks=blocks,
                listeners=name,
                bare_us=bare,
                heard_us=heard,
                percent=percent,
                beside_us=beside,
            )
            if name == "counters":
                report.goal(f"cost of counting, {kind} of {blocks} blocks, percent", percent, at_most=3)


def microseconds(
    bare: Callable[[], None], heard: Callable[[], None], *, settle: bool
) -> tuple[float, float, float]:
    """Median CPU time of a look-up without and with listeners, and what other threads take for the latter.

    The two take turns, each as often after the other as before it, so that caches are alike; ``settle``
    gives other threads the time to catch up.
    """
    own: dict[Callable[[], None], list[float]] = {bare: [], heard: []}
    beside: list[float] = []
    order = [bare, heard]
    for number in range(ROUNDS + 1):
        for run in order if number % 2 else reversed(order):
            process, thread = time.process_time(), time.thread_time()
            run()
            ran = time.thread_time() - thread
            if settle:
                time.sleep(SETTLE_SECONDS)
            own[run].append(ran)
            if run is heard:
                beside.append(time.process_time() - process - ran)
    return _median(own[bare]), _median(own[heard]), _median(beside)


def _median(seconds: list[float]) -> float:
    """Of one look-up, in microseconds, without the first round, which warms up."""
    return statistics.median(seconds[1:]) / REQUESTS * 1e6


def turn(
    each: Contender, asked: list[Tokens], look_up: Callable[[Contender, Tokens], None]
) -> Callable[[], None]:
    """``REQUESTS`` look-ups, other prompts every time."""
    at = 0

    def run() -> None:
        nonlocal at
        for _ in range(REQUESTS):
            look_up(each, asked[at % len(asked)])
            at += 1

    return run


def probe(each: Contender, tokens: Tokens) -> None:
    each.store.lookup(Chain.of(each.spec.root, tokens))


def lease(each: Contender, tokens: Tokens) -> None:
    each.store.release(each.store.acquire("r", Chain.of(each.spec.root, tokens)))


if __name__ == "__main__":
    main()
