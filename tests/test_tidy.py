"""Rules of style that no linter has: sizes, names, dead modules, and what a public file must not say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvstore.config import Config

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("hashing", "kvstore", "prefill")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
ENTRY_POINTS = {"__init__", "__main__", "cli"}
BUILT = re.compile(r"\.git|\.venv|\.hypothesis|\..*_cache|__pycache__|build|dist|.*\.egg-info")
BANNED_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.])/(home|root|work|tmp)/"),
    "a leftover marker": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
}


def is_generated(path: Path) -> bool:
    return path.parts[:2] in {("kvstore", "v1"), ("prefill", "v1")}


def walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if BUILT.fullmatch(entry.name):
            continue
        if entry.is_file():
            yield entry.relative_to(REPOSITORY)
        elif not (entry / "pyvenv.cfg").exists():
            yield from walk(entry)


@cache
def repository_files() -> tuple[Path, ...]:
    """All files that people write, relative to the repository; without asking git, which may be absent."""
    return tuple(walk(REPOSITORY))


@cache
def python_files() -> dict[Path, ast.Module]:
    return {
        path: ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        for path in repository_files()
        if path.suffix == ".py" and not is_generated(path)
    }


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"line {node.lineno}: a relative import; name the package"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_scan_sees_the_code() -> None:
    modules = {module_name(path) for path in python_files()}
    assert {"hashing", "kvstore.config", "tests.test_tidy"} <= modules


def test_files_and_functions_are_short() -> None:
    long_ones = []
    for path, tree in python_files().items():
        lines = (REPOSITORY / path).read_text(encoding="utf-8").count("\n")
        if lines > MAX_FILE_LINES:
            long_ones.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES}: split it by noun")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long_ones.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert long_ones == []


def test_names_say_what_is_in_a_file() -> None:
    assert [path for path in python_files() if path.stem in VAGUE_NAMES] == []


def test_every_module_is_imported_by_another() -> None:
    imported = {
        name
        for path, tree in python_files().items()
        for name in imported_names(tree)
        if name != module_name(path)
    }
    unused = [
        str(path)
        for path in python_files()
        if path.parts[0] in PACKAGES
        if path.stem not in ENTRY_POINTS and module_name(path) not in imported
    ]
    assert unused == []


def test_proto_is_no_package() -> None:
    """``proto/__init__.py`` would shadow the ``proto`` that PyPI's proto-plus installs."""
    assert list((REPOSITORY / "proto").rglob("__init__.py")) == []


def test_every_module_is_shipped_and_typed() -> None:
    """A folder without ``__init__.py`` works in a checkout and is missing from the wheel."""
    folders = {path.parent for path in python_files() if path.parts[0] in PACKAGES}
    assert sorted(folder for folder in folders if folder / "__init__.py" not in python_files()) == []
    assert [name for name in PACKAGES if not (REPOSITORY / name / "py.typed").exists()] == []


def test_hashing_never_uses_the_hash_of_the_process() -> None:
    """Python's own ``hash`` differs from process to process, so no stored name may rest on it."""
    calls = [
        f"{path}:{node.lineno}"
        for path, tree in python_files().items()
        if path.parts[0] == "hashing"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"
    ]
    assert calls == []


def test_every_setting_is_documented() -> None:
    assert [name for name, info in Config.model_fields.items() if not info.description] == []
    assert len(Config.model_fields) <= 40


@pytest.mark.parametrize("what", BANNED_TEXT)
def test_text_fits_any_machine_and_is_finished(what: str) -> None:
    found = []
    for path in repository_files():
        content = (REPOSITORY / path).read_bytes()
        if b"\0" in content or path == Path("tests/test_tidy.py"):
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
            if BANNED_TEXT[what].search(line):
                found.append(f"{path}:{number}: {line.strip()}")
    assert found == [], what
