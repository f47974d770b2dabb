"""The pages that list settings and metrics say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.config import PREFILL_ONLY, Config
from kvstore.metric_table import METRICS
from kvstore.settings import load_config
from tests.support.scripts import load_script

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
generate = load_script(DOCS / "generate.py")


def rows_of(page: str) -> list[list[str]]:
    """The cells of the tables' bodies, code marks removed."""
    lines = [
        line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_pages_are_what_the_code_says() -> None:
    assert generate.stale_pages(DOCS) == []


@pytest.mark.parametrize("page", ["configuration.md", "metrics.md"])
def test_a_stale_page_is_noticed(tmp_path: Path, page: str) -> None:
    for name in generate.PAGES:
        (tmp_path / name).write_bytes((DOCS / name).read_bytes())
    assert generate.stale_pages(tmp_path) == []
    text = (tmp_path / page).read_text(encoding="utf-8")
    (tmp_path / page).write_text(text.replace("kvstore", "kv", 1), encoding="utf-8")
    assert generate.stale_pages(tmp_path) == [page]
    (tmp_path / page).unlink()
    assert generate.stale_pages(tmp_path) == [page]


def test_every_setting_is_listed_once_and_as_it_is_spelled() -> None:
    """The documented default, given by the documented names, is the default."""
    rows = rows_of("configuration.md")
    assert sorted(row[0] for row in rows) == sorted(Config.model_fields)
    for field, default, _, meaning, variable, flag in rows:
        assert meaning == Config.model_fields[field].description
        value = re.sub(r"(?<=\d) (?=[A-Za-z])", "", default)
        own = flag.partition("`")[0]  # a shorter one may follow
        given = {} if own == "prefill only" else {own.removeprefix("--").replace("-", "_"): value}
        assert load_config(environ={variable: value}, overrides=given).config == Config(), field
    without_flag = {row[0] for row in rows if row[-1] == "prefill only"}
    assert without_flag == set(PREFILL_ONLY)


def test_every_metric_is_listed_once() -> None:
    names = [row[0] for row in rows_of("metrics.md") if len(row) == 4]
    assert sorted(names) == sorted(METRICS)


def test_metrics_and_variables_that_are_named_anywhere_exist() -> None:
    """A renamed metric or setting is found in every page that people wrote."""
    suffixes = ("", "_bucket", "_count", "_sum")
    known = {f"{name}{suffix}" for name in METRICS for suffix in suffixes}
    known |= {f"KVSTORE_{name.upper()}" for name in Config.model_fields}
    named = {
        (path.name, name)
        for path in (*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"))
        for name in re.findall(
            r"(?<!vllm:)\b(?:kvstore_[a-z_]*[a-z]|KVSTORE_[A-Z_]*[A-Z])\b", path.read_text(encoding="utf-8")
        )
    }
    assert ("metrics.md", "kvstore_leases") in named
    assert {(page, name) for page, name in named if name not in known} == set()
