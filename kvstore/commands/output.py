"""What commands print: one JSON object for programs, tables that lose nothing for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000
"""Columns of an output that is no terminal: whoever reads it breaks lines as they like."""

_NUMBER = re.compile(r"([\d,.]+( ?%| [KMGT]?i?B| s)?|-)?")


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows of values under headings."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


Part: TypeAlias = Grid | str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found out, once for programs and once for people."""

    facts: Mapping[str, Any]
    parts: Sequence[Part] = field(default_factory=tuple)


def show(answer: Answer, *, as_json: bool) -> None:
    """Print one answer on stdout."""
    if as_json:
        sys.stdout.write(json.dumps(answer.facts) + "\n")
        sys.stdout.flush()
        return
    console = stdout_console()
    console.print(render(answer.parts, console))


def stdout_console() -> Console:
    """A console that wraps at the terminal's width, or not at all where stdout is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNBOUNDED)


def render(parts: Sequence[Part], console: Console) -> Group:
    """The parts below each other, each in the form that fits ``console``."""
    return Group(*(_as_text(part, console) for part in parts))


def _as_text(part: Part, console: Console) -> RenderableType:
    if isinstance(part, str):
        return Text(part, overflow="fold")
    table = _table(part, console)
    wide = console.options.update(width=_UNBOUNDED)
    if Measurement.get(console, wide, table).maximum <= console.width:
        return table
    return _records(part)


def _table(grid: Grid, console: Console) -> Table:
    table = Table(
        box=SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=console.is_terminal,
    )
    for place, heading in enumerate(grid.headings):
        numeric = all(_NUMBER.fullmatch(row[place]) for row in grid.rows)
        table.add_column(Text(heading), justify="right" if numeric else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*(Text(value) for value in row))
    return table


def _records(grid: Grid) -> Text:
    """One value a line: a terminal too narrow for the table still shows all of it."""
    lines = []
    for row in grid.rows:
        pairs = [(heading, value) for heading, value in zip(grid.headings, row, strict=True) if value]
        lines += ["", *(f"{heading}: {value}" for heading, value in pairs)]
    return Text("\n".join([*lines, ""]), overflow="fold")


def format_count(number: int) -> str:
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def epoch_text(epoch: int) -> str:
    """An epoch for JSON: many programs that read that round integers beyond 2**53."""
    return str(epoch)


def format_bytes(size: int) -> str:
    """Three digits or so; exact below one KiB."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def format_share(part: int, whole: int) -> str:
    """A percentage; a dash where there is nothing to share."""
    return f"{part / whole:.1%}" if whole else "-"


def format_seconds(seconds: float) -> str:
    """The two largest units that matter."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
