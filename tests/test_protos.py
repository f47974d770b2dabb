"""The wire contract: the committed stubs load where we say, and a change that breaks clients is noticed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvstore.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    lookup_pb2,
    lookup_pb2_grpc,
    types_pb2,
)
from tests.support.scripts import load_script

REPOSITORY = Path(__file__).resolve().parents[1]
PROTOS = REPOSITORY / "proto"
generate = load_script(PROTOS / "generate.py")

PACKED = {
    "token_ids",
    "block_hashes",
    "fingerprints",
    "offsets",
    "generations",
    "checksums",
    "statuses",
}
"""Columns: many values, one field of bytes."""


def messages() -> Iterator[Descriptor]:
    for module in (admin_pb2, block_pb2, lookup_pb2, types_pb2):
        yield from module.DESCRIPTOR.message_types_by_name.values()


def run_buf(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run buf, which is a development dependency; its place is beside the interpreter, or on PATH."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert buf, "buf is not installed; pip install buf-bin"
    return subprocess.run([buf, *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY)


def test_columns_are_packed_bytes() -> None:
    """A prompt of a hundred thousand tokens is a few memory copies, not a list of integers."""
    found = set()
    for message in messages():
        for field in message.fields:
            if field.name in PACKED:
                found.add(field.name)
                assert field.type == FieldDescriptor.TYPE_BYTES, field.full_name
                assert not field.is_repeated, field.full_name
    assert found == PACKED


def test_every_service_has_a_servicer() -> None:
    stubs = {"Admin": (admin_pb2, admin_pb2_grpc), "Block": (block_pb2, block_pb2_grpc)}
    for name, (messages_of, stubs_of) in {**stubs, "Lookup": (lookup_pb2, lookup_pb2_grpc)}.items():
        service = messages_of.DESCRIPTOR.services_by_name[f"{name}Service"]
        servicer = getattr(stubs_of, f"{name}ServiceServicer")
        assert {method.name for method in service.methods} <= set(dir(servicer))


def test_stubs_load_under_the_oldest_versions_that_are_asked_for() -> None:
    """Generated code refuses an older runtime than its own compiler's."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = dict(re.findall(r"(grpcio|protobuf)>=([\d.]+)", " ".join(project["dependencies"])))
    needs = {
        "protobuf": r"^# Protobuf Python Version: (\S+)$",
        "grpcio": r"^GRPC_GENERATED_VERSION = '(\S+)'$",
    }
    for package, pattern in needs.items():
        stubs = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "kvstore/v1").glob("*_pb2*.py")]
        found = {match for text in stubs for match in re.findall(pattern, text, re.MULTILINE)}
        assert len(found) == 1, package
        assert version_of(found.pop()) <= version_of(oldest[package]), package


def version_of(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(".")))
    return numbers + (0,) * (3 - len(numbers))


def test_stale_stubs_are_noticed() -> None:
    made = {Path("v1/a.py"): b"1", Path("v1/b.py"): b"2"}
    assert generate.differences(made, dict(made)) == []
    assert generate.differences(made, {Path("v1/b.py"): b"3", Path("v1/c.py"): b""}) == [
        "v1/a.py: missing",
        "v1/b.py: stale",
        "v1/c.py: no proto makes this file",
    ]


def test_the_protos_break_nobody() -> None:
    done = run_buf("breaking", PROTOS, "--against", PROTOS / "released.binpb")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (
            "  // Blocks of the promised run.\n  uint32 blocks = 2;\n",
            "",
            'field "2" with name "blocks" on message "AcquireResponse"',
        ),
        ("  // Names the lease.\n  uint64 lease_id", "string lease_id", 'Field "1" with name "lease_id"'),
        ("rpc Renew(", "rpc Extend(", '"Renew"'),
        ("BLOCK_STATUS_YOURS = 3;", "BLOCK_STATUS_YOURS = 9;", 'enum value "3" on enum "BlockStatus"'),
    ],
)
def test_a_change_that_breaks_clients_is_refused(
    tmp_path: Path, before: str, after: str, complaint: str
) -> None:
    shutil.copytree(PROTOS, tmp_path, dirs_exist_ok=True)
    block = tmp_path / "kvstore/v1/block.proto"
    text = block.read_text(encoding="utf-8")
    assert text.count(before) == 1
    block.write_text(text.replace(before, after), encoding="utf-8")
    done = run_buf("breaking", tmp_path, "--against", PROTOS / "released.binpb")
    assert done.returncode != 0
    assert complaint in done.stdout
