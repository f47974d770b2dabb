"""``simulate``: the hit rates of a trace by policy and capacity."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvstore.commands.output import Answer, Grid, format_count
from kvstore.errors import ConfigError
from kvstore.simulate import POLICIES, HitCounts, Watch, Workload, least_capacity, replay
from kvstore.trace import read_trace

_UNLIMITED = "unlimited"
_ALL = "all"
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_STEP = 256
_BISECTION_REPLAYS = 8
"""Replays that a recommendation takes, about."""
_CAPACITY = re.compile(r"(\d+)([km]?)")
_SCALES = {"": 1, "k": 1_000, "m": 1_000_000}


class Question(NamedTuple):
    """What to replay: comma-separated policies and capacities, and how prompts are cut into blocks.

    ``recommend``, where given, is a share of the ceiling, and is asked for instead of capacities.
    """

    policy: str
    capacity: str
    block_tokens: int
    recommend: str | None


class Row(NamedTuple):
    """What one policy hit at one capacity, in blocks (None: unlimited)."""

    policy: str
    capacity: int | None
    hits: HitCounts


def simulate(traces: Sequence[Path], question: Question, messages: Console) -> Answer:
    """Replay ``traces`` as one for each of the policies and capacities."""
    policies, capacities = _policies(question.policy), _capacities(question.capacity)
    share = None if question.recommend is None else _share(question.recommend)
    workload = Workload.of(read_trace(traces, question.block_tokens))
    replays = len(policies) * (len(capacities) if share is None else _BISECTION_REPLAYS)
    rows = []
    with _progress(messages, len(workload.requests) * replays) as watch:
        for policy in policies:
            make_evictor = POLICIES[policy](workload)
            if share is None:
                rows += [
                    Row(policy, size, replay(workload, make_evictor, size, watch)) for size in capacities
                ]
            else:
                rows.append(Row(policy, *least_capacity(workload, make_evictor, share, watch)))
    name = ", ".join(map(str, traces))
    facts = {"trace": name, "results": list(map(_facts, rows))}
    return Answer(facts, _parts(name, workload, rows, share))


def _policies(text: str) -> list[str]:
    if text.strip() == _ALL:
        return list(POLICIES)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(
                f"--policy names {name!r}, expected {_ALL} or some of {', '.join(POLICIES)}; correct the name"
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


def _capacities(text: str) -> list[int | None]:
    return [_capacity(part.strip().lower()) for part in text.split(",")]


def _capacity(text: str) -> int | None:
    if text == _UNLIMITED:
        return None
    found = _CAPACITY.fullmatch(text)
    blocks = int(found[1]) * _SCALES[found[2]] if found else 0
    if blocks < 1:
        raise ConfigError(
            f"--capacity names {text!r}, expected a number of blocks above zero, such as 500, 30k or 1m, "
            f"or {_UNLIMITED}; correct it"
        )
    return blocks


def _facts(row: Row) -> dict[str, str | int | float | None]:
    """Rates are fractions; the capacity is null where it is unlimited."""
    return {
        "policy": row.policy,
        "capacity_blocks": row.capacity,
        "hit_blocks": row.hits.block_rate,
        "hit_tokens": row.hits.token_rate,
        "hit_tokens_warm": row.hits.token_rate_warm,
    }


def _parts(name: str, workload: Workload, rows: Sequence[Row], share: float | None) -> list[Grid | str]:
    counts = rows[0].hits
    title = (
        f"{name}: {format_count(counts.requests)} requests, {format_count(counts.asked_blocks)} blocks, "
        f"{format_count(workload.distinct_blocks)} of them distinct"
    )
    headings = ("policy", "capacity, blocks", "hit blocks", "hit tokens", "hit tokens, warm")
    cells = []
    for row in rows:
        capacity = _UNLIMITED if row.capacity is None else format_count(row.capacity)
        rates = (row.hits.block_rate, row.hits.token_rate, row.hits.token_rate_warm)
        cells.append((row.policy, capacity, *(f"{rate:.2%}" for rate in rates)))
    legend = "Share of what was asked for, from a cold start; warm: the second half of the requests"
    if share is None:
        return [title, Grid(headings, cells), legend]
    sought = f"Least capacity that hits {share:.4g} of the blocks that an unlimited cache hits"
    return [title, Grid(headings, cells), legend, sought]


@contextmanager
def _progress(messages: Console, total: int) -> Iterator[Watch]:
    """A bar over all replays, on ``messages`` where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    silent = not messages.is_terminal
    with Progress(*columns, console=messages, transient=True, disable=silent) as progress:
        task = progress.add_task("replaying", total=total)

        def watch(workload: Workload) -> Iterator[int]:
            requests = len(workload.requests)
            for start in range(0, requests, _STEP):
                stop = min(requests, start + _STEP)
                yield from range(start, stop)
                progress.advance(task, stop - start)

        yield watch
