"""What does a long prompt that arrives do to answers that are being written?

A few streams decode; then a prompt of 6,000 tokens comes. Reported are the times between tokens that were
due from its arrival to its first token: of all streams together, the median of the repeats. *Unchunked*
computes the prompt in one step; the others cut it into chunks that decodes ride along with. The modes take
turns. *Disaggregated*: one process computes prompts and another decodes, each pinned to a core of its own;
the prefill process is stopped and continued in turn, so that the same decode process is measured alone
and beside it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import numpy as np
from pinned import Split, measure_split
from plot import line_chart
from prefill_rig import Prompts, engine_of, load_packaged, open_worker
from report import Report, parser

from prefill.assemble import Worker
from prefill.engine import Engine, EngineOptions
from prefill.model import LoadedModel

STREAM_TOKENS = 64
STREAM_WARM_UP = 3
STREAM_NEW_MAX = 400
MAX_RATIO, TTFT_RATIO = 0.2, 1.3
P50_RATIO, P99_RATIO = 1.2, 2.0


@dataclass
class Samples:
    """One mode: of every repeat the TTFT of the prompt, and the times between tokens beside it."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)

    def median_of(self, percent: float) -> float:
        """Median over the repeats of a percentile of the gaps; 100 is the maximum."""
        return statistics.median(float(np.percentile(gaps, percent)) for gaps in self.gaps)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--prompt", type=int, default=6000)
    arguments.add_argument("--chunks", type=int, nargs="*", default=(256, 512))
    arguments.add_argument("--streams", type=int, default=4)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--split-rounds", type=int, default=5, help="0 leaves the disaggregated part out")
    options = arguments.parse_args()
    report = Report("interference", ("torch", "transformers"))
    loaded = load_packaged()
    with open_worker(loaded, options.prompt + options.streams * 2 * STREAM_NEW_MAX) as worker:
        modes = make_modes(worker, options.chunks)
        samples = {mode: Samples() for mode in modes}
        for repeat in range(options.repeats):
            for mode, engine in modes.items():
                ttft, gaps = long_prompt_beside(engine, loaded, options.prompt, options.streams, repeat)
                samples[mode].ttft.append(ttft)
                samples[mode].gaps.append(gaps)
    tell(report, samples)
    if options.split_rounds:
        tell_split(report, measure_split(options.streams, options.prompt, options.split_rounds))
    report.finish(json=options.json)


def make_modes(worker: Worker, chunks: list[int]) -> dict[str, Engine]:
    """Engines over one store and model, by what they do with a long prompt."""
    modes = {"unchunked": engine_of(worker, EngineOptions(chunked=False))}
    for size in chunks:
        modes[f"chunks of {size}"] = engine_of(worker, EngineOptions(step_tokens=size))
    return modes


def long_prompt_beside(
    engine: Engine, loaded: LoadedModel, length: int, streams: int, seed: int
) -> tuple[float, list[float]]:
    """TTFT of a prompt that nobody has seen, and the gaps of the streams that it met, in seconds."""
    prompts = Prompts(loaded, seed, length)
    names = [f"stream {number}" for number in range(streams)]
    engine.submit(*(prompts.request(name, prompts.tokens(STREAM_TOKENS), STREAM_NEW_MAX) for name in names))
    latest: dict[str, float] = {}
    for _ in range(STREAM_WARM_UP):
        latest.update((output.request_id, time.perf_counter()) for output in engine.step())
    assert len(latest) == streams, "the streams must run before the prompt comes"
    long = prompts.tokens(length)
    engine.submit(prompts.request("long", long, 1))
    gaps: list[float] = []
    while True:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.result is not None:
                assert output.request_id == "long", "a stream ended too early"
                engine.cancel(*names)
                return output.result.ttft_seconds, gaps
            gaps.append(now - latest[output.request_id])
            latest[output.request_id] = now


def tell(report: Report, samples: dict[str, Samples]) -> None:
    for mode, each in samples.items():
        report.result(
            mode=mode,
            ttft_s=statistics.median(each.ttft),
            p50_s=each.median_of(50),
            p99_s=each.median_of(99),
            max_s=each.median_of(100),
            gaps=statistics.median(map(len, each.gaps)),
        )
    base, *chunked = samples.items()
    for mode, each in chunked:
        ratio = each.median_of(100) / base[1].median_of(100)
        report.goal(f"{mode}: longest gap over unchunked", ratio, at_most=MAX_RATIO)
        ratio = statistics.median(each.ttft) / statistics.median(base[1].ttft)
        report.goal(f"{mode}: TTFT over unchunked", ratio, at_most=TTFT_RATIO)
    quantiles = [*range(0, 100, 5), 99, 100]
    lines = {
        mode: [(float(percent), each.median_of(percent)) for percent in quantiles]
        for mode, each in samples.items()
    }
    line_chart("interference", "Time between tokens beside a long prompt", ("percentile", "seconds"), lines)


def tell_split(report: Report, split: Split) -> None:
    for place, gaps in (("decode process alone", split.alone), ("beside a prefill process", split.beside)):
        report.result(
            mode=f"disaggregated: {place}",
            p50_s=float(np.percentile(gaps, 50)),
            p99_s=float(np.percentile(gaps, 99)),
            max_s=max(gaps),
            gaps=len(gaps),
            steal_percent=split.steal_percent,
        )
    for percent, most in ((50, P50_RATIO), (99, P99_RATIO)):
        ratio = float(np.percentile(split.beside, percent) / np.percentile(split.alone, percent))
        report.goal(f"disaggregated: p{percent} over the decode process alone", ratio, at_most=most)


if __name__ == "__main__":
    main()
