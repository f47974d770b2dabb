"""A picture of what ``simulate`` found: hit share against capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from kvstore.errors import ConfigError
from kvstore.simulate import ORACLE

_FORMATS = (".png", ".svg")
_INCHES = (8, 5)


def plotter(path: Path) -> Callable[[Mapping[str, Any]], None]:
    """Draws facts of ``simulate`` into a file. ConfigError for another ending, or if it cannot be written."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot is {path}, expected a name that ends in .png or .svg; change the ending")
    return partial(_draw, path)


def _draw(path: Path, facts: Mapping[str, Any]) -> None:
    # A figure of its own, without pyplot: there is no display and no state to leave behind.
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(row["policy"] for row in facts["results"]):
        points = sorted(
            (row["capacity_blocks"], row["hit_blocks"])
            for row in facts["results"]
            if row["policy"] == policy and row["capacity_blocks"] is not None
        )
        line = axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=policy)
        if policy == ORACLE:
            line[0].set(linestyle="--", color="black")
    ceiling = facts["unlimited"]["hit_blocks"]
    axes.axhline(ceiling, color="grey", linestyle=":", label=f"unlimited: {ceiling:.1%}")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, blocks" if facts["instances"] == 1 else "capacity of each instance, blocks")
    axes.set_ylabel("hit share of blocks, whole trace from a cold start")
    axes.set_title(Path(facts["trace"]).name)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    try:
        # Without a date, and with ids that are not random, the same facts give the same file.
        with rc_context({"svg.hashsalt": ORACLE}):
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigError(
            f"--plot {path} cannot be written ({error.strerror}); choose another place"
        ) from error
