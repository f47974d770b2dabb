"""Compiles the protos into the Python packages whose path they mirror; ``make generate`` runs it.

``proto/kvstore/v1/block.proto`` becomes ``kvstore/v1/block_pb2.py`` and its stubs: with the path
mirrored, no import needs rewriting. With ``--check`` nothing is written: it fails and lists what the
committed files lack, differ in, or have too much.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
REPOSITORY = SOURCES.parent
COMPILER = "grpcio-tools"
INIT = '"""Generated from proto/{package} by proto/generate.py: messages and stubs. Do not edit."""\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the protos into their Python packages.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    require_pinned_compiler()
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_protos(SOURCES, Path(folder))
    committed = read_packages(REPOSITORY, {path.parent for path in compiled})
    stale = differences(compiled, committed)
    if check and stale:
        sys.exit("\n".join([*stale, "run `make generate` and commit what it writes"]))
    if not check:
        write_packages(REPOSITORY, compiled, committed)
        print("\n".join(stale) or "all files were up to date")


def require_pinned_compiler() -> None:
    """Exit unless the compiler is the pinned one: another one's output loads under another protobuf."""
    pinned = re.search(rf"^{COMPILER}==(\S+)$", (SOURCES / "requirements.txt").read_text(), re.MULTILINE)
    assert pinned, f"proto/requirements.txt pins no {COMPILER}"
    try:
        found = metadata.version(COMPILER)
    except metadata.PackageNotFoundError:
        found = "missing"
    if found != pinned[1]:
        sys.exit(f"{COMPILER} is {found} in this environment, expected {pinned[1]}; run `make generate`")


def compile_protos(sources: Path, folder: Path) -> dict[Path, bytes]:
    """What the packages have to consist of, by path relative to the repository."""
    protos = sorted(sources.rglob("*.proto"))
    services = [path for path in protos if re.search(r"^service ", path.read_text(), re.MULTILINE)]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{sources}"]
    subprocess.run([*protoc, f"--python_out={folder}", f"--pyi_out={folder}", *protos], check=True)
    subprocess.run([*protoc, f"--grpc_python_out={folder}", *services], check=True)
    compiled = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.py*")}
    for package in {path.parent for path in compiled}:
        compiled[package / "__init__.py"] = INIT.format(package=package.as_posix()).encode()
    return compiled


def read_packages(root: Path, packages: set[Path]) -> dict[Path, bytes]:
    """The files of the generated packages as they are, by path relative to ``root``."""
    files = [path for package in packages for path in (root / package).glob("*.*")]
    return {path.relative_to(root): path.read_bytes() for path in files}


def differences(compiled: dict[Path, bytes], committed: dict[Path, bytes]) -> list[str]:
    """One line a file that is not what it has to be, by path."""
    lines = []
    for path in sorted(compiled.keys() | committed.keys()):
        if path not in committed:
            lines.append(f"{path}: missing")
        elif path not in compiled:
            lines.append(f"{path}: no proto makes this file")
        elif compiled[path] != committed[path]:
            lines.append(f"{path}: stale")
    return lines


def write_packages(root: Path, compiled: dict[Path, bytes], committed: dict[Path, bytes]) -> None:
    """Make the packages consist of exactly the compiled files."""
    for path in committed.keys() - compiled.keys():
        (root / path).unlink()
    for path, content in compiled.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


if __name__ == "__main__":
    main()
