"""What is installed: all of the packages, with types and data, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("hashing", "kvstore", "prefill")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
SHIPPED_SUFFIXES = {".py", ".pyi", ".typed", ".txt", ".json", ".cu", ".css", ".html", ".js", ".svg"}


@pytest.fixture(name="installed", scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> set[Path]:
    """Files of a wheel built from a copy, since a build leaves things beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in PROJECT_FILES:
        shutil.copy(REPOSITORY / name, source)
    for name in (*PACKAGES, "tests", "proto", "docs"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(source / done.stdout.splitlines()[-1]) as wheel:
        return {Path(name) for name in wheel.namelist() if ".dist-info/" not in name}


def test_the_wheel_has_the_packages_and_nothing_else(installed: set[Path]) -> None:
    packaged = {
        path.relative_to(REPOSITORY)
        for name in PACKAGES
        for path in (REPOSITORY / name).rglob("*")
        if path.suffix in SHIPPED_SUFFIXES
    }
    assert installed == packaged


def test_the_wheel_has_what_is_not_python(installed: set[Path]) -> None:
    wanted = (
        "kvstore/py.typed",
        "kvstore/web/page/status.html",
        "kvstore/v1/types_pb2.pyi",
        "prefill/demo/questions.json",
    )
    assert {Path(name) for name in wanted} <= installed
