"""The GPU benchmark on this machine's CPU, at tiny sizes: all of it runs, and its bytes are compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.scripts import load_script
from tests.support.workers import one_thread

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield load_script(BENCHMARKS / "gpu.py")
    sys.modules.pop("report", None)


def test_every_part_reports(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--json"])
    with one_thread():
        benchmark.main()
    report = json.loads(capsys.readouterr().out)
    rows = {row["path"]: row for row in report["results"] if "path" in row}
    compute = rows["load in 8 groups of layers, and compute"]
    seconds = {compute[f"{name}_seconds"] for name in ("copy", "compute", "together")}
    assert min(seconds) > 0
    assert compute["hidden_share"] == pytest.approx(
        (compute["copy_seconds"] + compute["compute_seconds"] - compute["together_seconds"])
        / compute["copy_seconds"]
    )
    assert rows["TTFT of 96 tokens, 95% in the host pool"]["cached_tokens"] == 80
    assert {goal["name"].split()[0] for goal in report["goals"]} == {"gather", "scatter", "save", "load"}


def test_bytes_that_differ_are_no_figure(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured until then is told all the same."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--json"])
    monkeypatch.setattr(benchmark.Transfers, "load", lambda *_, **__: [(4, None)])
    with pytest.raises(AssertionError, match="the bytes differ"):
        benchmark.main()
    assert {"gather", "scatter"} <= {
        row.get("path") for row in json.loads(capsys.readouterr().out)["results"]
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_so(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        benchmark.main()
