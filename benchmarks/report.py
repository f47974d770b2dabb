"""What every benchmark here shares: arguments, the machine it ran on, goals, and the printing."""

import argparse
import importlib.metadata
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from json import dumps
from math import inf
from pathlib import Path

Value = str | int | float | bool | None


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows ``--json``; the script adds its own options."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=raw)
    made.add_argument("--json", action="store_true", help="print exactly one JSON object")
    return made


def interleaved_medians(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender, after one round of warm-up.

    They take turns, so that a change in the machine's speed falls on all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(samples[1:]) for name, samples in seconds.items()}


def machine(packages: tuple[str, ...]) -> dict[str, Value]:
    """Where the figures come from; a package that is not installed has version None."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    described: dict[str, Value] = {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }
    for package in packages:
        try:
            described[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            described[package] = None
    return described


class Report:
    """Results and goals of one benchmark, in the order in which they were added."""

    def __init__(self, name: str, packages: tuple[str, ...] = ()) -> None:
        self._name = name
        self._machine = machine(packages)
        self._results: list[dict[str, Value]] = []
        self._goals: list[dict[str, Value]] = []

    def result(self, **fields: Value) -> None:
        """One row; a unit belongs in the name of its field, and None is not measured."""
        self._results.append(fields)

    def goal(self, name: str, value: float, *, at_most: float = inf, at_least: float = -inf) -> None:
        """What was to be reached. Give at least one bound; both make a range."""
        bounds = [f">= {at_least:g}"] * (at_least > -inf) + [f"<= {at_most:g}"] * (at_most < inf)
        if not bounds:
            raise ValueError(f"goal {name!r} has no bound; pass at_most= or at_least=")
        met = at_least <= value <= at_most
        self._goals.append({"name": name, "value": value, "goal": " and ".join(bounds), "met": met})

    def finish(self, *, json: bool) -> None:
        """Print everything: one JSON object, or tables to read."""
        if json:
            named = {"benchmark": self._name, "machine": self._machine}
            print(dumps(named | {"results": self._results, "goals": self._goals}))
            return
        print(self._name, *(f"{key}={value}" for key, value in self._machine.items()), sep="  ")
        _print_table(self._results)
        _print_table(self._goals)


def _print_table(rows: list[dict[str, Value]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_shown(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _shown(value: Value) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
