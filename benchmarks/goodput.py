"""Goodput as DistServe defines it: requests a second of which 90 % meet both of their targets, by mode.

Real workers, asked over gRPC by Poisson arrivals with a fixed seed: the same prompts at the same moments
for every mode. All modes have the same two cores, which the load, and between two workers Redis, share
with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import grpc
import numpy as np
from goodput_workers import Mode, serving
from numpy.typing import NDArray
from plot import line_chart
from report import Report

from prefill.v1 import prefill_pb2, prefill_pb2_grpc

TTFT_SECONDS, INTER_TOKEN_SECONDS, ATTAINED = 2.0, 0.25, 0.9
RATES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Requests a second. The highest that is met is looked for by halves: three runs for each mode and mix."""
PROBES = len(RATES).bit_length()
REQUESTS_MIN = 20
WARM_UP_SECONDS = 60.0
SEED = 2026
SPREAD = 0.4
"""Of the log-normal lengths, around their medians."""
REPOSITORIES = 3
Tokens = NDArray[np.uint32]

MODES = (
    Mode("colocated, unchunked", {"chunked": "false", "policy": "prefill_first"}),
    Mode("colocated, chunks of 128", {"step-tokens": "128"}),
    Mode("disaggregated", {}, is_split=True),
)


@dataclass(frozen=True)
class Mix:
    """Median tokens of a prompt, those of it that are one of a few shared prefixes, and tokens of an answer.

    Small, for a model on two cores.
    """

    name: str
    prompt: int
    shared: int
    new: int


MIXES = (Mix("code", 384, 288, 8), Mix("chat", 48, 0, 24))


@dataclass(frozen=True)
class Arrival:
    """A request to come ``at`` seconds after the start; ``patience`` None: until it misses a target."""

    at: float
    tokens: Tokens
    new: int
    patience: float | None = None


@dataclass(frozen=True)
class Served:
    """Seconds from a request's arrival to its first token, and from one to the next at the mean."""

    ttft: float
    gap: float

    @property
    def meets_targets(self) -> bool:
        return self.ttft <= TTFT_SECONDS and self.gap <= INTER_TOKEN_SECONDS


@dataclass(frozen=True)
class Run:
    """What came of ``requests`` at one rate; ``served`` are fewer where it was ended early."""

    served: list[Served]
    requests: int

    @property
    def attained(self) -> float:
        """Share of the requests that met both targets; at most that, where it was ended early."""
        missed = sum(not each.meets_targets for each in self.served)
        return 1 - missed / self.requests

    def described(self) -> dict[str, float | bool | None]:
        """Percentiles are of those that were answered in time."""
        answered = [each for each in self.served if each.ttft < inf]
        ttft, gap = (
            float(np.percentile(values, 90)) if values else None
            for values in ([each.ttft for each in answered], [each.gap for each in answered])
        )
        early = len(self.served) < self.requests
        return {
            "attained_percent": 100 * self.attained,
            "ended_early": early,
            "ttft_p90_s": ttft,
            "gap_p90_s": gap,
        }


def measure_goodput(report: Report, vocabulary: int, seconds: float) -> None:
    """Look for each mode's goodput with each mix; the arrivals of all runs take ``seconds`` together."""
    run_seconds = seconds / (len(MODES) * len(MIXES) * PROBES)
    lines: dict[str, list[tuple[float, float]]] = {}
    for mode in MODES:
        with serving(mode) as address:
            for mix in MIXES:
                traffic = Traffic(mix, vocabulary)
                play(address, traffic.first(), attained=0.0)
                labels = {"part": "goodput", "mix": mix.name, "mode": mode.name}
                shares: dict[float, float] = {}
                for rate in _halving(shares):
                    arrivals = traffic.arrivals(rate, max(REQUESTS_MIN, ceil(rate * run_seconds)))
                    run = play(address, arrivals)
                    shares[rate] = run.attained
                    report.result(**labels, requests_per_s=rate, requests=len(arrivals), **run.described())
                best = max((rate for rate, share in shares.items() if share >= ATTAINED), default=0.0)
                report.result(**labels, goodput_requests_per_s=best)
                lines[f"{mode.name}, {mix.name}"] = sorted(shares.items())
    axes = ("requests a second", "share that meets both targets")
    line_chart("prefill_goodput", "Requests that meet their targets, by mode", axes, lines)


def _halving(shares: Mapping[float, float]) -> Iterator[float]:
    """Rates to try, each once ``shares`` has what came of the one before."""
    low, high = 0, len(RATES)
    while low < high:
        middle = (low + high) // 2
        yield RATES[middle]
        if shares[RATES[middle]] >= ATTAINED:
            low = middle + 1
        else:
            high = middle


class Traffic:
    """Requests of one mix, the same for the same rate."""

    def __init__(self, mix: Mix, vocabulary: int) -> None:
        self._mix = mix
        self._vocabulary = vocabulary
        random = np.random.default_rng([SEED, mix.prompt])
        self._prefixes = [self._tokens(random, mix.shared) for _ in range(REPOSITORIES)]

    def first(self) -> list[Arrival]:
        """One request for each prefix: from then on they are cached, and the model is warm."""
        random = np.random.default_rng([SEED, self._mix.prompt, 0])
        arrivals = [self._arrival(random, 0.0, prefix) for prefix in self._prefixes]
        return [replace(each, patience=WARM_UP_SECONDS) for each in arrivals]

    def arrivals(self, rate: float, requests: int) -> list[Arrival]:
        """Poisson arrivals. Behind the prefixes, prompts share nothing with those of another rate."""
        random = np.random.default_rng([SEED, self._mix.prompt, int(rate * 1000)])
        moments = np.cumsum(random.exponential(1 / rate, requests))
        chosen = random.integers(REPOSITORIES, size=requests)
        return [
            self._arrival(random, at, self._prefixes[number])
            for at, number in zip(moments.tolist(), chosen.tolist(), strict=True)
        ]

    def _arrival(self, random: np.random.Generator, at: float, prefix: Tokens) -> Arrival:
        own = (self._mix.prompt - self._mix.shared) * random.lognormal(0.0, SPREAD)
        return Arrival(at, np.concatenate((prefix, self._tokens(random, max(8, int(own))))), self._mix.new)

    def _tokens(self, random: np.random.Generator, length: int) -> Tokens:
        return random.integers(0, self._vocabulary, length).astype(np.uint32)


def play(address: str, arrivals: Sequence[Arrival], attained: float = ATTAINED) -> Run:
    """Send the requests at their moments; over once all are answered, or ``attained`` is out of reach."""
    return asyncio.run(_play(address, arrivals, len(arrivals) - ceil(attained * len(arrivals))))


async def _play(address: str, arrivals: Sequence[Arrival], may_miss: int) -> Run:
    served: list[Served] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        began = time.perf_counter()
        tasks = [asyncio.create_task(_ask(stub, arrival, began)) for arrival in arrivals]
        try:
            for task in asyncio.as_completed(tasks):
                served.append(await task)
                if sum(not each.meets_targets for each in served) > may_miss:
                    break
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return Run(served, len(arrivals))


async def _ask(stub: Any, arrival: Arrival, began: float) -> Served:  # noqa: ANN401  stubs have no types
    patience = arrival.patience or TTFT_SECONDS + INTER_TOKEN_SECONDS * (arrival.new - 1)
    await asyncio.sleep(began + arrival.at - time.perf_counter())
    ask = prefill_pb2.Ask(
        token_ids=arrival.tokens.astype("<u4").tobytes(), max_new_tokens=arrival.new, ignore_eos=True
    )
    due = began + arrival.at
    moments: list[float] = []
    try:
        async for part in stub.Generate(prefill_pb2.GenerateRequest(ask=ask), timeout=patience):
            moments += [time.perf_counter()] * (len(part.progress.token_ids) // 4)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return Served(inf, inf)
    return Served(moments[0] - due, (moments[-1] - moments[0]) / (arrival.new - 1))
