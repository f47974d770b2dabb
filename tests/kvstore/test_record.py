"""Recordings of a real server: what is in them, and that a replay of one hits what the server hit."""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.block import HASH_BYTES
from kvstore.commands.capacity import capacities
from kvstore.errors import ConfigError
from kvstore.events import RequestSettled
from kvstore.hints import Hints
from kvstore.record import Recorder
from kvstore.simulate import POLICIES, Instance, Workload, replay
from kvstore.trace import read_trace
from tests.support.serve_command import fails_to_serve
from tests.support.sidecars import sidecar
from tests.support.stores import FakeClock
from tests.support.stubs import PAYLOAD_BYTES, Peer, dialled, spec, tokens_of
from tests.support.valkey import eventually

MIB = 1 << 20
NAMES = {
    "time",
    "namespace",
    "prompt_tokens",
    "block_size",
    "block_bytes",
    "hashes",
    "hit_blocks",
    "ended",
    "priority",
    "idle_seconds",
}


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(First line, requests)."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head, *requests = map(json.loads, data.splitlines())
    return head, requests


def block_bytes(namespace: bytes) -> int:
    return 8192 if namespace == b"m" * 16 else 4096


def recorder(path: Path, max_bytes: int = MIB) -> Recorder:
    return Recorder(
        path,
        max_bytes,
        block_bytes,
        clock=FakeClock(),
        wall_clock=lambda: 0.0,
    )


def asked(blocks: int = 2, name: bytes = b"n" * 16, **fields: Any) -> RequestSettled:
    """A request for the first ``blocks`` of one prompt."""
    hashes = np.random.default_rng(0).bytes(HASH_BYTES * 4096)[: blocks * HASH_BYTES]
    return RequestSettled(1001.5, name, blocks * 16, hashes=hashes, **fields)


class TestServer:
    @pytest.mark.parametrize("policy", ["lru", "reuse"])
    def test_a_replay_of_the_recording_hits_what_the_server_hit(self, tmp_path: Path, policy: str) -> None:
        path = tmp_path / "trace.jsonl"
        settings = {"pool_bytes": "64KiB", "extent_bytes": "64KiB", "eviction_policy": policy}
        with sidecar(record_path=str(path), **settings) as server, dialled(server.address) as raw:
            peer = raw.register(spec("recorded"))
            served = list(conversations(peer))
            capacity = raw.pool().ready_bytes // PAYLOAD_BYTES
        head, requests = read(path)
        assert (head["recording"], head["block_size"], set(head)) == (
            1,
            16,
            {"recording", "block_size", "created"},
        )
        assert [each["hit_blocks"] for each in requests] == served
        workload = Workload.of(read_trace([path]))
        assert capacities("--capacity", "64KiB", workload, None) == [capacity], "as large as the pool"
        assert 0 < sum(served) < replay(workload, POLICIES[policy](workload), None).hit_blocks
        instance = Instance(POLICIES[policy](workload), workload, capacity)
        assert [instance.serve(number) for number in range(len(requests))] == served

    def test_a_folder_is_no_file_to_record_in(self, tmp_path: Path) -> None:
        said = fails_to_serve(record_path=tmp_path)
        assert f"record_path = {tmp_path} is a folder, expected a file: name one in it" in said
        assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))

    def test_a_path_that_cannot_be_written_is_an_error_at_the_start(self, tmp_path: Path) -> None:
        said = fails_to_serve(record_path=tmp_path / "nowhere" / "trace.jsonl")
        assert "record_path = " in said
        assert "No such file or directory" in said


def conversations(peer: Peer) -> Iterator[int]:
    """Some that grow by turns, more than there is room for; hit blocks of each request."""
    random = np.random.default_rng(4)
    turns = [0] * 8
    for number in range(60):
        chosen = int(random.integers(len(turns)))
        turns[chosen] = turns[chosen] % 6 + 1
        prompt = tokens_of(12, seed=chosen)[: turns[chosen] * 2 * 16]
        found = peer.acquire(prompt, f"r{number}")
        peer.write(prompt)
        if found.lease_id:
            peer.release(found.lease_id)
        yield found.blocks


def test_a_line_has_what_a_replay_needs_and_nothing_else(tmp_path: Path) -> None:
    made = recorder(tmp_path / "a.jsonl")
    made(asked(4, hit_blocks=1, hints=Hints(ended=True, priority=2, idle_seconds=3.5)))
    made(asked(3, first_block=1, hit_blocks=2))
    made.close()
    head, (first, second) = read(made.path)
    assert head == {"recording": 1, "block_size": 16, "created": "1970-01-01T00:00:00+00:00"}
    assert set(first) == NAMES
    assert first["block_bytes"] == 4096
    assert (first["time"], first["prompt_tokens"], first["hit_blocks"]) == (1.5, 64, 1)
    assert (first["ended"], first["priority"], first["idle_seconds"]) == (True, 2, 3.5)
    assert second["hashes"] == first["hashes"][:3], "equal prefixes have equal numbers"
    assert (second["prompt_tokens"], second["hit_blocks"]) == (3 * 24, 3)
    assert len(set(first["hashes"])) == 4
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600


def test_sizes_are_blocks_where_all_blocks_have_one_size_and_it_is_known(tmp_path: Path) -> None:
    """A recording of an earlier version does not say it, and is replayed all the same."""
    made = recorder(tmp_path / "a.jsonl")
    made(asked())
    made(asked(name=b"m" * 16))
    made.close()
    head, one, other = made.path.read_bytes().splitlines()
    old = json.dumps({name: value for name, value in json.loads(one).items() if name != "block_bytes"})

    def blocks(*lines: bytes) -> list[int | None]:
        (tmp_path / "b.jsonl").write_bytes(b"\n".join((head, *lines)))
        return capacities("--capacity", "10KiB", Workload.of(read_trace([tmp_path / "b.jsonl"])), None)

    assert (blocks(one), blocks(other)) == ([2], [1])
    with pytest.raises(
        ConfigError, match="the trace has blocks of 4096, 8192 bytes; give a number of blocks"
    ):
        blocks(one, other)
    for lines in ((old.encode(),), (one, old.encode())):
        with pytest.raises(ConfigError, match="expected to know what a block takes"):
            blocks(*lines)
    assert read_trace([tmp_path / "b.jsonl"])[1].tokens == 32


def test_names_are_salted_anew_in_each_recording(tmp_path: Path) -> None:
    """Neither names of blocks nor of namespaces can be found in it, nor two recordings be joined."""
    lines = []
    for name in ("a.jsonl", "b.jsonl"):
        made = recorder(tmp_path / name)
        made(asked())
        made.close()
        content = made.path.read_bytes()
        assert asked().hashes[:HASH_BYTES].hex().encode() not in content
        assert str(int.from_bytes(asked().hashes[:8], "little")).encode() not in content
        assert (b"n" * 16).hex().encode()[:8] not in content
        lines += read(made.path)[1]
    assert not set(lines[0]["hashes"]) & set(lines[1]["hashes"])
    assert lines[0]["namespace"] != lines[1]["namespace"]


def test_a_recording_ends_at_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = recorder(tmp_path / "a.jsonl", max_bytes=4096)
    for _ in range(500):
        made(asked(8))
    made.close()
    assert 4096 <= made.path.stat().st_size < 4096 + 400
    assert len([each for each in caplog.messages if "is over" in each]) == 1
    assert read(made.path)[1], "what is there is whole"


def test_gzip_by_the_name(tmp_path: Path) -> None:
    made = recorder(tmp_path / "a.jsonl.gz")
    made(asked())
    made.close()
    made.close()
    assert len(read(made.path)[1]) == 1


@pytest.mark.parametrize("name", ["recording.jsonl", "recording.jsonl.gz"])
def test_a_recording_without_an_end_is_read_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = tmp_path / name
    record = recorder(path)
    for number in range(50):
        record(asked(name=number.to_bytes(16, "little")))
    record.close()
    path.write_bytes(path.read_bytes()[:-100])
    assert 10 < len(read_trace([path])) < 50
    (said,) = caplog.messages
    assert f"{path} is a recording without an end" in said


def test_a_recording_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """A server that starts again does not fail and does not overwrite."""
    (tmp_path / "a.jsonl.gz").write_bytes(b"old")
    made = [recorder(tmp_path / "a.jsonl.gz") for _ in range(2)]
    assert [each.path.name for each in made] == ["a.1.jsonl.gz", "a.2.jsonl.gz"]
    for each in made:
        each.close()
    assert (tmp_path / "a.jsonl.gz").read_bytes() == b"old"
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        recorder(tmp_path / "a.jsonl.gz" / "b")


def test_what_is_recorded_is_on_disk_soon(tmp_path: Path) -> None:
    """A server that is killed loses no more than the last second, also where no request follows."""
    looks: list[float] = []
    clock = FakeClock()

    def watched_clock() -> float:
        looks.append(clock())
        return looks[-1]

    made = Recorder(tmp_path / "a.jsonl", MIB, lambda _: 1, clock=watched_clock, wall_clock=lambda: 0.0)
    made(asked())
    assert eventually(lambda: len(looks) > 1), "it is written, and too early to be on disk"
    clock.advance(2.0)
    assert eventually(lambda: made.path.read_bytes().count(b"\n") == 2)
    made.close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Told once; what was written before stays readable, and the server's end is an orderly one."""
    made = recorder(tmp_path / name)
    fill_the_disk_of(made.path)
    for number in range(2000):
        made(asked(8, name=number.to_bytes(16)))
    made.close()
    made.close()
    (said,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "is over, its last line may be cut (No space left on device): make room" in said.getMessage()
    assert said.exc_info is None


def fill_the_disk_of(path: Path) -> None:
    """Whatever is written to this open file from now on finds no room."""
    (number,) = [each.name for each in Path("/proc/self/fd").iterdir() if same_file(each, path)]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, int(number))
    os.close(full)


def same_file(descriptor: Path, path: Path) -> bool:
    try:
        return descriptor.readlink() == path
    except FileNotFoundError:
        return False


def test_one_without_a_request_leaves_nothing_behind(tmp_path: Path) -> None:
    """A server that starts again and again must not run out of names for its recordings."""
    for _ in range(3):
        made = recorder(tmp_path / "a.jsonl")
        made.close()
        assert made.path.name == "a.jsonl"
    assert not list(tmp_path.iterdir())
