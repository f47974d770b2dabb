"""What commands print: nothing is lost on a narrow terminal, and there is no decoration in a pipe."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvstore.block import MissCause, TierName
from kvstore.commands import output
from kvstore.commands.lookup import advice, leading_blocks, runs_of
from kvstore.commands.output import Answer, Grid, render, show
from kvstore.service.reports import BlockReport

LONG = "a-value-that-is-much-longer-than-the-terminal-is-wide"
GRID = Grid(("name", "size", "what it is"), [("first", "1,234", LONG), ("second", "56.7 KiB", "")])


def printed(*parts: Grid | str, width: int, terminal: bool) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, highlight=False
    )
    console.print(render(parts, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def block(
    index: int, tiers: tuple[TierName, ...] = (), cause: str = "", age: float | None = None
) -> BlockReport:
    return BlockReport(
        index,
        bytes(16),
        tiers,
        cause,
        being_written=False,
        payload_bytes=100,
        age_seconds=age,
        idle_seconds=age,
    )


@pytest.mark.parametrize("width", [8, 20, 40, 79])
def test_a_narrow_terminal_shows_every_value(width: int) -> None:
    text = printed(GRID, width=width, terminal=True)
    assert all(len(line) <= width for line in text.splitlines())
    joined = text.replace("\n", "")
    for value in ("first", "1,234", LONG, "second", "56.7 KiB"):
        assert value.replace(" ", "") in joined.replace(" ", "")
    assert "…" not in text


def test_a_wide_terminal_shows_a_table() -> None:
    lines = printed(GRID, width=120, terminal=True).splitlines()
    row = next(line for line in lines if "first" in line)
    assert "1,234" in row
    assert LONG in row


def test_a_pipe_gets_plain_lines() -> None:
    lines = printed("a line", GRID, width=10_000, terminal=False).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "line"],
        ["name", "size", "what", "it", "is"],
        ["first", "1,234", LONG],
        ["second", "56.7", "KiB"],
    ]
    assert all(line.isascii() for line in lines)


def test_what_looks_like_markup_is_printed_as_it_is() -> None:
    text = printed("[red]x[/red]", Grid(("[b]h",), [("[/b] [link]",)]), width=80, terminal=True)
    assert "[red]x[/red]" in text
    assert "[/b] [link]" in text
    assert "[b]h" in text


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(Answer({"text": "a\nb"}, ["for people"]), as_json=True)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "a\nb"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (48 * 3600 - 1, "47 h 59 min"),
        (48 * 3600, "2 d 0 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert output.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (5 * 2**50, "5120.0 TiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert output.format_bytes(size) == text


def test_shares_of_nothing_are_no_number() -> None:
    assert output.format_share(0, 0) == "-"
    assert output.format_share(1, 8) == "12.5%"


def test_blocks_are_told_in_as_few_runs_as_say_the_same() -> None:
    host = (TierName.HOST,)
    blocks = [
        block(0, host, age=5.0),
        block(1, host, age=9.0),
        block(2, (TierName.HOST, TierName.REDIS)),
        block(3, cause="cold"),
        block(4, cause="evicted"),
        block(5, host),
    ]
    runs = list(runs_of(blocks))
    assert [(run.first, run.last, run.where) for run in runs] == [
        (0, 1, "host"),
        (2, 2, "host, redis"),
        (3, 3, "missing"),
        (4, 4, "missing"),
        (5, 5, "host"),
    ]
    assert (runs[0].oldest_seconds, runs[0].payload_bytes) == (9.0, 200)
    assert leading_blocks(runs) == 3, "what is behind a gap is of no use"


def test_every_cause_has_its_reason_in_words_and_an_unknown_one_is_passed_on() -> None:
    for cause in MissCause:
        (run,) = runs_of([block(0, cause=cause)])
        assert run.why.startswith(f"{cause}: ")
        assert list(advice([run])) == [cause]
    (run,) = runs_of([block(0, cause="cosmic")])
    assert run.why == "cosmic"
