"""The command line of the store: reads arguments, wires everything, prints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.errors import ConfigError, KVStoreError
from kvstore.simulate import POLICIES, HitCounts, Watch, distinct_blocks, replay
from kvstore.trace import Request, read_mooncake

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_messages = Console(stderr=True)
_UNLIMITED = "unlimited"
_CAPACITY = re.compile(r"(\d+)([km]?)")
_SCALES = {"": 1, "k": 1_000, "m": 1_000_000}


class Row(NamedTuple):
    """What one policy hit at one capacity, in blocks (None: unlimited)."""

    policy: str
    capacity: int | None
    hits: HitCounts


def main() -> None:
    """Run the command line; an error is one message and status 2."""
    try:
        app()
    except KVStoreError as error:
        _messages.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


@app.callback()
def _kvstore() -> None:
    """A store of the KV cache of prompt prefixes."""


@app.command()
def simulate(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE", help="Mooncake JSON lines, plain or gzipped; one trace"),
    ],
    *,
    policy: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(POLICIES)}")] = "lru",
    capacity: Annotated[
        str, typer.Option(help="Comma-separated numbers of blocks, such as 500, 30k or unlimited")
    ] = "1k,3k,10k,30k,100k,unlimited",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, nothing else, on stdout")
    ] = False,
) -> None:
    """Replay a trace and say what share of it would have been hit, for each policy and capacity."""
    policies, capacities = _policies(policy), _capacities(capacity)
    requests = read_mooncake(traces)
    name = ", ".join(map(str, traces))
    with _progress(len(requests) * len(policies) * len(capacities)) as watch:
        rows = [
            Row(policy, blocks, replay(requests, POLICIES[policy], blocks, watch))
            for policy in policies
            for blocks in capacities
        ]
    if as_json:
        print(json.dumps({"trace": name, "results": [_as_json(row) for row in rows]}))
    else:
        Console().print(_as_table(name, requests, rows))


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


def _as_json(row: Row) -> dict[str, str | int | float | None]:
    """Rates are fractions; the capacity is null where it is unlimited."""
    return {
        "policy": row.policy,
        "capacity_blocks": row.capacity,
        "hit_blocks": row.hits.block_rate,
        "hit_tokens": row.hits.token_rate,
        "hit_tokens_warm": row.hits.token_rate_warm,
    }


def _as_table(name: str, requests: Sequence[Request], rows: Sequence[Row]) -> Table:
    counts = rows[0].hits
    table = Table(
        title=f"{escape(name)}: {counts.requests:,} requests, {counts.asked_blocks:,} blocks, "
        f"{distinct_blocks(requests):,} of them distinct",
        caption="Share of what was asked for, from a cold start; warm: the second half of the requests",
    )
    table.add_column("policy")
    table.add_column("capacity, blocks", justify="right")
    for title in ("hit blocks", "hit tokens", "hit tokens, warm"):
        table.add_column(title, justify="right")
    for row in rows:
        capacity = _UNLIMITED if row.capacity is None else f"{row.capacity:,}"
        rates = (row.hits.block_rate, row.hits.token_rate, row.hits.token_rate_warm)
        table.add_row(row.policy, capacity, *(f"{rate:.2%}" for rate in rates))
    return table


@contextmanager
def _progress(total: int) -> Iterator[Watch]:
    """A bar over all replays, on stderr where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    silent = not _messages.is_terminal
    with Progress(*columns, console=_messages, transient=True, disable=silent) as progress:
        task = progress.add_task("replaying", total=total)

        def watch(requests: Sequence[Request]) -> Iterator[Request]:
            for place, request in enumerate(requests, start=1):
                yield request
                if place % 256 == 0:
                    progress.advance(task, 256)
            progress.advance(task, len(requests) % 256)

        yield watch
