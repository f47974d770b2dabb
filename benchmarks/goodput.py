"""Goodput of one worker by mode: how many requests a second meet their targets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray
from plot import line_chart
from prefill_rig import Prompts, engine_of
from report import Report

from prefill.assemble import Worker
from prefill.engine import Engine, EngineOptions
from prefill.model import LoadedModel
from prefill.request import Request, Result
from prefill.scheduler import Policy

TTFT_SECONDS, INTER_TOKEN_SECONDS, ATTAINED = 2.0, 0.25, 0.9
CHUNK = 128
SEED = 2026
# Medians of log-normal lengths, and the answers' lengths: small, for a model on two cores.
CODE_TOKENS, CODE_SHARED, CODE_NEW = 384, 0.75, 8
CHAT_TOKENS, CHAT_NEW = 48, 24
SPREAD = 0.4
REPOSITORIES = 3

MODES = {
    "unchunked": EngineOptions(chunked=False, policy=Policy.PREFILL_FIRST),
    "chunked, fair": EngineOptions(step_tokens=CHUNK, policy=Policy.FAIR),
    "chunked, decode first": EngineOptions(step_tokens=CHUNK, policy=Policy.DECODE_FIRST),
}
"""Each is one worker on all cores. Prefill and decode on workers of their own is another benchmark's."""


@dataclass(frozen=True)
class Arrival:
    """A request to come ``at`` seconds after the start."""

    at: float
    tokens: NDArray[np.uint32]
    new: int


def measure_goodput(
    report: Report, worker: Worker, loaded: LoadedModel, rates: Sequence[float], requests: int
) -> None:
    """Climb the rates with each mode until too few requests meet their targets."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for mode, options in MODES.items():
        goodput, lines[mode] = 0.0, []
        for rate in sorted(rates):
            # The same arrivals for every mode, and prefixes that no other run has cached.
            seed = sorted(MODES).index(mode)
            arrivals = make_arrivals(Prompts(loaded, seed, int(rate * 1000)), rate, requests)
            attained = attainment(engine_of(worker, options), arrivals)
            report.result(part="goodput", mode=mode, requests_per_s=rate, attained_percent=100 * attained)
            lines[mode].append((rate, 100 * attained))
            if attained < ATTAINED:
                break
            goodput = rate
        report.result(part="goodput", mode=mode, goodput_requests_per_s=goodput)
    axes = ("requests a second", "% that meet both targets")
    line_chart("prefill_goodput", "Requests that meet their targets, by mode", axes, lines)


def make_arrivals(prompts: Prompts, rate: float, requests: int) -> list[Arrival]:
    """Poisson arrivals; code-like and chat-like prompts in turn."""
    random = np.random.default_rng([SEED, int(rate * 1000)])
    moments = np.cumsum(random.exponential(1 / rate, requests))
    shared = [prompts.tokens(int(CODE_TOKENS * CODE_SHARED)) for _ in range(REPOSITORIES)]
    arrivals = []
    for number, at in enumerate(moments.tolist()):
        stretch = float(random.lognormal(0.0, SPREAD))
        if number % 2:
            own = prompts.tokens(max(8, int(CODE_TOKENS * (1 - CODE_SHARED) * stretch)))
            tokens = np.concatenate((shared[int(random.integers(REPOSITORIES))], own))
            arrivals.append(Arrival(at, tokens, CODE_NEW))
        else:
            arrivals.append(Arrival(at, prompts.tokens(max(8, int(CHAT_TOKENS * stretch))), CHAT_NEW))
    return arrivals


def attainment(engine: Engine, arrivals: list[Arrival]) -> float:
    """Share of requests that meet both targets; at most what is still possible once too many failed."""
    began, coming = time.perf_counter(), list(arrivals)
    met = missed = 0
    may_miss = len(arrivals) - ceil(ATTAINED * len(arrivals))
    while (coming or not engine.idle) and missed <= may_miss:
        while coming and time.perf_counter() - began >= coming[0].at:
            engine.submit(_request(coming.pop(0), len(coming), began))
        if engine.idle:
            time.sleep(0.001)
            continue
        for output in engine.step():
            assert output.error is None, output.error
            if output.result is not None:
                good = meets_targets(output.result)
                met, missed = met + good, missed + (not good)
    engine.close()
    return met / len(arrivals) if missed <= may_miss else 1 - missed / len(arrivals)


def _request(arrival: Arrival, number: int, began: float) -> Request:
    # Whoever comes during a step has waited when the step is over.
    return Request(f"r{number}", arrival.tokens, arrival.new, began + arrival.at, ignore_eos=True)


def meets_targets(result: Result) -> bool:
    gaps = result.inter_token_seconds
    return result.ttft_seconds <= TTFT_SECONDS and sum(gaps) / len(gaps) <= INTER_TOKEN_SECONDS
