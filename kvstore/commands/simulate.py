"""``simulate``: the hit rates of a trace by policy and capacity."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvstore.commands.capacity import UNLIMITED, capacities, token_bytes
from kvstore.commands.output import Answer, Grid, format_count
from kvstore.commands.simulate_options import SimulateOptions
from kvstore.errors import ConfigError
from kvstore.evict.lru import LRU
from kvstore.quantity import parse_bytes, parse_seconds
from kvstore.simulate import (
    ORACLE,
    POLICIES,
    FleetHits,
    FleetPlan,
    HitCounts,
    MakeEvictor,
    PrefillRates,
    Routing,
    TimesToFirstToken,
    Watch,
    Workload,
    count_hits,
    least_capacity,
    replay,
    replay_fleet,
    times_to_first_token,
)
from kvstore.trace import read_trace

_ALL = "all"
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_STEP = 256
_TELL_SECONDS = 5.0
_BISECTION_REPLAYS = 16
"""Replays that a recommendation takes, about."""


class Row(NamedTuple):
    """What one policy hit at one capacity of each instance, in blocks (None: unlimited)."""

    policy: str
    capacity: int | None
    hits: HitCounts
    own_share: float
    """Of the blocks asked for, those that the request's own instance had."""
    ttft: TimesToFirstToken | None


class _Bench(NamedTuple):
    """What every replay of a call has in common. ``most`` is what an unlimited cache hits."""

    workload: Workload
    plan: FleetPlan
    rates: PrefillRates | None
    watch: Watch
    most: HitCounts

    def run(self, make_evictor: MakeEvictor, blocks: int | None) -> FleetHits:
        return replay_fleet(self.workload, make_evictor, blocks, self.plan, self.watch)

    def row(self, policy: str, capacity: int | None) -> Row:
        found = self.run(POLICIES[policy](self.workload), capacity)
        hits = count_hits(self.workload, found.hit)
        ttft = None if self.rates is None else times_to_first_token(self.workload, found.hit, self.rates)
        return Row(policy, capacity, hits, sum(found.own) / hits.asked.blocks, ttft)

    def recommended(self, policy: str, share: float) -> Row:
        """At the least capacity that hits that share of the blocks which an unlimited cache hits."""
        make_evictor, target = POLICIES[policy](self.workload), share * self.most.hit.blocks

        def reaches(blocks: int | None) -> bool:
            return sum(self.run(make_evictor, blocks).hit) >= target

        if not reaches(None):
            raise ConfigError(
                f"--recommend is {_percent(share)} of what one unlimited cache hits, which "
                f"{self.plan.instances} instances with routing {self.plan.routing} do not reach at any "
                "capacity; lower it, choose another routing, or raise --idle-ttl where it is given"
            )
        return self.row(policy, least_capacity(reaches, self.workload.distinct_blocks))


def simulate(
    traces: Sequence[Path], options: SimulateOptions, environ: Mapping[str, str], messages: Console
) -> Answer:
    """Replay ``traces`` as one for each of the policies and capacities."""
    policies = _policies(options.policy, options.instances)
    share = None if options.recommend is None else _share(options.recommend)
    a_token = token_bytes(options, environ)
    rates = _rates(options, a_token)
    workload = Workload.of(read_trace(traces, options.block_size))
    sizes = capacities("--capacity", options.capacity, workload, a_token)
    plan = _plan(options, workload, a_token)
    replays = len(policies) * (len(sizes) if share is None else _BISECTION_REPLAYS)
    with _progress(messages, len(workload.requests) * (replays + 1)) as watch:
        bench = _Bench(workload, plan, rates, watch, replay(workload, LRU, None, watch))
        if share is None:
            rows = [bench.row(policy, size) for policy in policies for size in sizes]
        else:
            rows = [bench.recommended(policy, share) for policy in policies]
    facts: dict[str, Any] = {
        "trace": ", ".join(map(str, traces)),
        "requests": len(workload.requests),
        "asked_blocks": bench.most.asked.blocks,
        "distinct_blocks": workload.distinct_blocks,
        "unlimited": _shares(bench.most),
        **plan._asdict(),
        "results": [_facts(row, plan) for row in rows],
    }
    return Answer(facts, _parts(facts["trace"], bench, rows, share))


def _policies(text: str, instances: int) -> list[str]:
    if text.strip() == _ALL:
        return [name for name in POLICIES if name != ORACLE or instances == 1]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(
                f"--policy names {name!r}, expected {_ALL} or some of {', '.join(POLICIES)}; correct the name"
            )
    if ORACLE in names and instances > 1:
        raise ConfigError(
            f"--policy names {ORACLE}, which knows the future of one cache, not what a router will send to "
            f"each of {instances}; leave it out, or leave --instances out"
        )
    return names


def _share(text: str) -> float:
    found = _PERCENT.fullmatch(text.strip())
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"--recommend is {text!r}, expected a share of what an unlimited cache hits, above 0% and up to "
            "100%, such as 80%; correct it"
        )
    return share


def _percent(share: float) -> str:
    return f"{100 * share:.6g}%"


def _plan(options: SimulateOptions, workload: Workload, a_token: int | None) -> FleetPlan:
    try:
        routing = Routing(options.routing)
    except ValueError as error:
        raise ConfigError(
            f"--routing is {options.routing!r}, expected one of {', '.join(Routing)}; correct it"
        ) from error
    plan = FleetPlan(options.instances, routing, idle_ttl_seconds=_idle_ttl(options.idle_ttl))
    if options.shared is None:
        return plan
    shared, *more = capacities("--shared", options.shared, workload, a_token)
    if more:
        raise ConfigError(f"--shared is {options.shared!r}, expected one capacity; keep one of them")
    return plan._replace(shared_blocks=workload.distinct_blocks if shared is None else shared)


def _idle_ttl(text: str | None) -> float | None:
    try:
        return None if text is None else parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"--idle-ttl is {text!r}: {error}; correct it") from error


def _rates(options: SimulateOptions, a_token: int | None) -> PrefillRates | None:
    rate, load = options.prefill_tokens_per_second, options.load_bytes_per_second
    if rate is None:
        if load is not None or options.prefill_seconds_per_pair:
            raise ConfigError(
                "times to first token need --prefill-tokens-per-second; add it, or leave the other rates out"
            )
        return None
    if rate <= 0:
        raise ConfigError(f"--prefill-tokens-per-second is {rate}, expected more than 0; raise it")
    if load is None:
        return PrefillRates(rate, options.prefill_seconds_per_pair)
    if a_token is None:
        raise ConfigError(
            "--load-bytes-per-second needs to know what a token takes; give --model or --bytes-per-token"
        )
    try:
        speed = parse_bytes(load)
    except ValueError as error:
        raise ConfigError(f"--load-bytes-per-second is {load!r}: {error}; correct it") from error
    return PrefillRates(rate, options.prefill_seconds_per_pair, speed, a_token)


def _shares(hits: HitCounts) -> dict[str, float]:
    """Every hit rate, as a fraction, by its full name."""
    whole, warm = hits.shares._asdict(), hits.shares_warm._asdict()
    return {f"hit_{name}{part}": of[name] for part, of in (("", whole), ("_warm", warm)) for name in whole}


def _facts(row: Row, plan: FleetPlan) -> dict[str, Any]:
    """The capacity is null where it is unlimited."""
    facts: dict[str, Any] = {"policy": row.policy, "capacity_blocks": row.capacity, **_shares(row.hits)}
    if plan.shared_blocks:
        facts["hit_blocks_own"] = row.own_share
    if row.ttft is not None:
        facts["ttft_seconds"] = row.ttft._asdict()
    return facts


def _parts(name: str, bench: _Bench, rows: Sequence[Row], share: float | None) -> list[Grid | str]:
    most, plan = bench.most, bench.plan
    title = (
        f"{name}: {format_count(most.requests)} requests, {format_count(most.asked.blocks)} blocks, "
        f"{format_count(bench.workload.distinct_blocks)} of them distinct; an unlimited cache hits "
        f"{most.shares.blocks:.2%} of blocks"
    )
    headings = ["policy", "capacity, blocks", "hit blocks", "hit tokens", "hit tokens, warm"]
    headings += ["own blocks"] * bool(plan.shared_blocks)
    headings += [f"TTFT {point}" for point in TimesToFirstToken._fields] if bench.rates else []
    notes = [
        "Share of what was asked for, from a cold start; a partly filled last block counts. Warm: the second "
        "half of the requests"
    ]
    if plan.instances > 1:
        notes.append(f"{plan.instances} instances of that capacity each, routing {plan.routing}")
    if plan.shared_blocks:
        notes.append(
            f"Below them a shared tier of {format_count(plan.shared_blocks)} blocks. Own: hit without it"
        )
    if plan.idle_ttl_seconds is not None:
        notes.append(f"A block leaves when nobody has used it for {plan.idle_ttl_seconds:g} seconds")
    if bench.rates is not None:
        notes.append("TTFT: seconds of prefill and loading, without waiting for other requests")
    if share is not None:
        notes.append(f"Least capacity that hits {_percent(share)} of the blocks that an unlimited cache hits")
    return [title, Grid(headings, [_cells(row, plan) for row in rows]), *notes]


def _cells(row: Row, plan: FleetPlan) -> list[str]:
    capacity = UNLIMITED if row.capacity is None else format_count(row.capacity)
    rates = [row.hits.shares.blocks, row.hits.shares.tokens, row.hits.shares_warm.tokens]
    rates += [row.own_share] * bool(plan.shared_blocks)
    return [row.policy, capacity, *(f"{rate:.2%}" for rate in rates), *(f"{t:.3f}" for t in row.ttft or ())]


@contextmanager
def _progress(messages: Console, total: int) -> Iterator[Watch]:
    """A bar over all replays on ``messages``, or a line now and then where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    told_at = messages.get_time()
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
        task = progress.add_task("replaying", total=total)

        def watch(workload: Workload) -> Iterator[int]:
            nonlocal told_at
            requests = len(workload.requests)
            for start in range(0, requests, _STEP):
                stop = min(requests, start + _STEP)
                yield from range(start, stop)
                progress.advance(task, stop - start)
                if not messages.is_terminal and messages.get_time() - told_at >= _TELL_SECONDS:
                    told_at = messages.get_time()
                    messages.print(f"replaying: {progress.tasks[task].percentage:.0f}%")

        yield watch
