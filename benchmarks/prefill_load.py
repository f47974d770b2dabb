"""What does the engine's prefill cost, by cached share, packed, and beside transformers' own; and under load?

*Shares*: a prompt of 4,096 tokens of which a part is cached. Execution is compared with
a·u + b·(n² - c²), fitted on uncached runs of other lengths (u uncached, c cached, n all tokens), and with
the same model steps over a history in place: nothing looked up, leased or copied. *Packed*: eight short
prompts in one step against one after the other. *Utilisation*: operations a second of a prefill, as a share
of a matrix product's, against transformers' own forward of the same tokens. *Goodput*: as DistServe defines
it, the highest rate at which 90 % of the requests meet a target for the first token and one for the mean
time between tokens, of one worker without and with chunks and of a prefill and a decode worker; Poisson
arrivals with a fixed seed, code-like (long prompts, mostly a shared prefix, short answers) or chat-like.
``--only PART ...`` runs some of the parts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from goodput import measure_goodput
from numpy.typing import NDArray
from plot import line_chart
from prefill_rig import BLOCK_SIZE, Prompts, engine_of, load_packaged, open_worker
from report import Report, interleaved_medians, parser

from kvstore.block import WHOLE, Chain
from prefill.assemble import Worker
from prefill.engine import EngineOptions
from prefill.flops import FlopsModel, matmul_peak
from prefill.model import LoadedModel
from prefill.paged import BlockTable
from prefill.plan import blocks_for
from prefill.request import Result
from prefill.runner import Span

SHARES = (0, 25, 50, 75, 95)
FITTED_QUARTERS = (1, 2, 3, 4)
MODEL_ERROR, OVER_FLOOR = 0.2, 1.15
PACKED, PACKED_TOKENS = 8, 64
UTILISATION_RATIO = 0.95
PARTS = ("shares", "packed", "utilisation", "goodput")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    arguments.add_argument("--prompt", type=int, default=4096)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=120.0, help="of arrivals, for goodput")
    options = arguments.parse_args()
    report = Report("prefill_load", ("torch", "transformers"))
    loaded = load_packaged()
    if "goodput" in options.only:
        measure_goodput(report, loaded.spec.vocab_size, options.seconds)
    parts = [part for part in options.only if part != "goodput"]
    if parts:
        measure_engine(report, loaded, parts, options.prompt, options.rounds)
    report.finish(json=options.json)


def measure_engine(
    report: Report, loaded: LoadedModel, parts: Sequence[str], prompt: int, rounds: int
) -> None:
    """The parts that need no other process."""
    # Room for all that the rounds store, so that the shared prefix is never evicted.
    with open_worker(loaded, (2 + 3 * rounds) * prompt) as worker:
        measures: dict[str, Callable[[], None]] = {
            "shares": lambda: measure_shares(report, worker, loaded, prompt, rounds),
            "packed": lambda: measure_packed(report, worker, loaded, 2 * rounds),
            "utilisation": lambda: measure_utilisation(report, worker, loaded, prompt // 4, rounds),
        }
        for part in parts:
            measures[part]()


# -- shares ----------------------------------------------------------------------------------------


def measure_shares(report: Report, worker: Worker, loaded: LoadedModel, length: int, rounds: int) -> None:
    """Execution by cached share, with the fit and the floor; the cases take turns."""
    prompts = Prompts(loaded, length)
    prefix = prompts.tokens(length)
    run(worker, prompts, prefix, reuse=True)  # fills the cache, and warms up
    uncached: dict[int, list[float]] = {length * quarters // 4: [] for quarters in FITTED_QUARTERS}
    results: dict[int, list[Result]] = {share: [] for share in SHARES}
    floors: dict[int, list[float]] = {share: [] for share in SHARES}
    for _ in range(rounds):
        for number, seconds in uncached.items():
            seconds.append(run(worker, prompts, prompts.tokens(number), reuse=False).execution_seconds)
        for share in SHARES:
            cached = length * share // 100 // BLOCK_SIZE * BLOCK_SIZE
            tokens = np.concatenate((prefix[:cached], prompts.tokens(length - cached)))
            result = run(worker, prompts, tokens, reuse=True)
            assert result.cached_tokens == cached, (share, result.cached)
            results[share].append(result)
            floors[share].append(floor_seconds(worker, tokens, cached, result.tokens[0]))
    fit = fit_cost({tokens: statistics.median(seconds) for tokens, seconds in uncached.items()})
    for share in SHARES:
        tell_share(report, share, results[share], fit, statistics.median(floors[share]))
    plotted = {
        "measured": [(share, median_execution(results[share])) for share in SHARES],
        "in place": [(share, statistics.median(floors[share])) for share in SHARES],
    }
    axes = ("cached share, %", "execution, seconds")
    line_chart("prefill_shares", f"Prefill of {length} tokens by cached share", axes, plotted)


def run(worker: Worker, prompts: Prompts, tokens: NDArray[np.uint32], *, reuse: bool) -> Result:
    [result] = worker.engine.run([prompts.request("measured", tokens, 1, reuse=reuse)])
    return result


def median_execution(results: Sequence[Result]) -> float:
    return statistics.median(result.execution_seconds for result in results)


def fit_cost(seconds: dict[int, float]) -> tuple[float, float]:
    """(a, b) of a·n + b·n² by least squares of the relative error."""
    tokens = np.array(list(seconds), dtype=float)
    measured = np.array(list(seconds.values()))
    columns = np.stack((tokens, tokens**2), axis=1) / measured[:, None]
    (linear, square), *_ = np.linalg.lstsq(columns, np.ones(len(tokens)), rcond=None)
    return float(linear), float(square)


def tell_share(
    report: Report, share: int, results: Sequence[Result], fit: tuple[float, float], floor: float
) -> None:
    result, execution = results[0], median_execution(results)
    total, cached = result.prompt_tokens, result.cached_tokens
    expected = fit[0] * (total - cached) + fit[1] * (total**2 - cached**2)
    report.result(
        part="shares",
        cached_percent=share,
        execution_s=execution,
        queue_s=statistics.median(each.queue_seconds for each in results),
        fitted_s=expected,
        in_place_s=floor,
    )
    error = abs(execution / expected - 1)
    report.goal(f"{share} % cached: away from a·u + b·(n² - c²)", error, at_most=MODEL_ERROR)
    report.goal(f"{share} % cached: over a history in place", execution / floor, at_most=OVER_FLOOR)


def floor_seconds(worker: Worker, tokens: NDArray[np.uint32], cached: int, first_token: int) -> float:
    """Seconds of the engine's model steps over the uncached part, the blocks of the rest in place."""
    store, size = worker.store, EngineOptions().step_tokens
    lease = store.acquire("floor", Chain.of(worker.spec.root, tokens[:cached]))
    assert lease.tokens == cached
    own = store.reserve(worker.spec.root.digest, blocks_for(len(tokens) - cached, BLOCK_SIZE))
    held = [segment.slots for segment in lease.segments.get(WHOLE, ())]
    table = BlockTable(store.offsets(np.concatenate([*held, own])).tolist())
    began = time.perf_counter()
    for start in range(cached, len(tokens), size):
        logits = worker.runner.step([Span(table, start, tokens[start : start + size])])
    token = int(logits.argmax())
    took = time.perf_counter() - began
    assert token == first_token, "the cached run and the run over a history in place differ"
    store.unreserve(own)
    store.release(lease)
    return took


# -- packed ----------------------------------------------------------------------------------------


def measure_packed(report: Report, worker: Worker, loaded: LoadedModel, rounds: int) -> None:
    """Eight prompts at once, and the same eight one after the other."""
    prompts = Prompts(loaded, PACKED)
    tokens = [prompts.tokens(PACKED_TOKENS) for _ in range(PACKED)]

    def packed() -> list[list[int]]:
        requests = [prompts.request(f"packed {number}", each, 1) for number, each in enumerate(tokens)]
        return [result.tokens for result in worker.engine.run(requests)]

    def one_by_one() -> list[list[int]]:
        return [run(worker, prompts, each, reuse=False).tokens for each in tokens]

    assert packed() == one_by_one()
    seconds = interleaved_medians({"packed": packed, "one by one": one_by_one}, rounds)
    for way, took in seconds.items():
        rate = PACKED * PACKED_TOKENS / took
        report.result(part="packed", way=way, prompts=PACKED, tokens=PACKED_TOKENS, prompt_tokens_per_s=rate)
    ratio = seconds["one by one"] / seconds["packed"]
    report.goal("throughput packed over one by one", ratio, at_least=1.0)


# -- utilisation -----------------------------------------------------------------------------------


def measure_utilisation(
    report: Report, worker: Worker, loaded: LoadedModel, length: int, rounds: int
) -> None:
    """Operations a second of a whole prefill: the engine in one step and in chunks, and transformers' own."""
    prompts = Prompts(loaded, length)
    tokens = prompts.tokens(length)
    unchunked = engine_of(worker, EngineOptions(chunked=False))

    def ours() -> int:
        [result] = unchunked.run([prompts.request("whole", tokens, 1)])
        return result.tokens[0]

    def in_chunks() -> int:
        return run(worker, prompts, tokens, reuse=False).tokens[0]

    def stock() -> int:
        return stock_prefill(loaded, tokens)

    assert ours() == in_chunks() == stock()
    seconds = interleaved_medians({"engine": ours, "in chunks": in_chunks, "transformers": stock}, rounds)
    peak = matmul_peak("cpu", loaded.spec.dtype, time.perf_counter)
    operations = FlopsModel.of(loaded.model, loaded.spec).step([(0, length)])
    for way, took in seconds.items():
        utilisation = operations / took / peak
        report.result(part="utilisation", way=way, tokens=length, seconds=took, mfu=utilisation)
    report.result(part="utilisation", way="matrix product", gflops=peak / 1e9)
    for way in ("engine", "in chunks"):
        ratio = seconds["transformers"] / seconds[way]
        report.goal(f"MFU of the {way} over transformers'", ratio, at_least=UTILISATION_RATIO)


@torch.inference_mode()
def stock_prefill(loaded: LoadedModel, tokens: NDArray[np.uint32]) -> int:
    """The first token by transformers' own forward and SDPA attention, its cache filled as for decoding."""
    loaded.model.set_attn_implementation("sdpa")
    try:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return int(loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
    finally:
        loaded.model.set_attn_implementation("prefix_kv_paged")


if __name__ == "__main__":
    main()
