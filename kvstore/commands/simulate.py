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
from kvstore.simulate import POLICIES, HitCounts, Watch, distinct_blocks, replay
from kvstore.trace import Request, read_mooncake

_UNLIMITED = "unlimited"
_CAPACITY = re.compile(r"(\d+)([km]?)")
_SCALES = {"": 1, "k": 1_000, "m": 1_000_000}


class Row(NamedTuple):
    """What one policy hit at one capacity, in blocks (None: unlimited)."""

    policy: str
    capacity: int | None
    hits: HitCounts


def simulate(traces: Sequence[Path], policy: str, capacity: str, messages: Console) -> Answer:
    """Replay ``traces`` as one for each of the comma-separated policies and capacities."""
    policies, capacities = _policies(policy), _capacities(capacity)
    requests = read_mooncake(traces)
    with _progress(messages, len(requests) * len(policies) * len(capacities)) as watch:
        rows = [
            Row(policy, blocks, replay(requests, POLICIES[policy], blocks, watch))
            for policy in policies
            for blocks in capacities
        ]
    name = ", ".join(map(str, traces))
    return Answer({"trace": name, "results": list(map(_facts, rows))}, _parts(name, requests, rows))


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy names {name!r}, expected {', '.join(POLICIES)}; correct the name")
    return names


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


def _parts(name: str, requests: Sequence[Request], rows: Sequence[Row]) -> list[Grid | str]:
    counts = rows[0].hits
    title = (
        f"{name}: {format_count(counts.requests)} requests, {format_count(counts.asked_blocks)} blocks, "
        f"{format_count(distinct_blocks(requests))} of them distinct"
    )
    headings = ("policy", "capacity, blocks", "hit blocks", "hit tokens", "hit tokens, warm")
    cells = []
    for row in rows:
        capacity = _UNLIMITED if row.capacity is None else format_count(row.capacity)
        rates = (row.hits.block_rate, row.hits.token_rate, row.hits.token_rate_warm)
        cells.append((row.policy, capacity, *(f"{rate:.2%}" for rate in rates)))
    return [
        title,
        Grid(headings, cells),
        "Share of what was asked for, from a cold start; warm: the second half of the requests",
    ]


@contextmanager
def _progress(messages: Console, total: int) -> Iterator[Watch]:
    """A bar over all replays, on ``messages`` where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    silent = not messages.is_terminal
    with Progress(*columns, console=messages, transient=True, disable=silent) as progress:
        task = progress.add_task("replaying", total=total)

        def watch(requests: Sequence[Request]) -> Iterator[Request]:
            for place, request in enumerate(requests, start=1):
                yield request
                if place % 256 == 0:
                    progress.advance(task, 256)
            progress.advance(task, len(requests) % 256)

        yield watch
