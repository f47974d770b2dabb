"""What does not check out in a pool file is not taken over: rows, crashes half-way, whole files."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.block import WHOLE
from kvstore.errors import PoolError
from kvstore.failpoints import Step
from kvstore.integrity import check_pool
from kvstore.table import SlotState, Table
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import payload_checksum
from kvstore.tiers.pool_format import SEAL_AT, store_word
from tests.support.left_behind import (
    CLIENT,
    EXTENTS,
    GEOMETRY,
    NOW,
    OTHER,
    SERVE,
    SILENT,
    SPEC,
    Scene,
    W,
    X,
    found,
    found_of_all,
    make_scene,
    rows_of,
)
from tests.support.pool_processes import kill, run, start
from tests.support.stores import FakeClock, make_host, pool_folder


@pytest.fixture
def scene() -> Iterator[Scene]:
    with make_scene() as made:
        yield made


class TestRowsThatDoNotCheckOut:
    @pytest.mark.parametrize(
        "column",
        ["hash", "parent", "tag", "fingerprint", "shard", "namespace", "index", "tokens", "identity"],
    )
    def test_a_changed_identity_is_freed(self, scene: Scene, column: str) -> None:
        def change(table: Table) -> None:
            getattr(table, column)[X : X + 1] += 1

        scene.edit_rows(change)
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 1, 2]
        assert host.adopted.damaged == 1
        assert host.pool.extents.extents()[0].table.generation[X] % 2 == 1

    def test_a_block_that_was_being_published_or_removed_is_freed(self, scene: Scene) -> None:
        """A crash between the row's columns and its generation, or between the generation and its state."""
        scene.edit_rows(lambda table: table.generation.__setitem__(X, table.generation[X] + np.uint64(1)))
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 1, 2]
        assert host.adopted.damaged == 0

    @pytest.mark.parametrize("state", [SlotState.FREE, SlotState.STAGED, SlotState.QUARANTINED, 9])
    def test_a_row_in_another_state_with_an_even_generation_is_freed(self, scene: Scene, state: int) -> None:
        scene.edit_rows(lambda table: table.state.__setitem__(X, state))
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 1, 2]

    def test_blocks_of_a_namespace_that_nobody_described_are_freed(self, scene: Scene) -> None:
        def rename(table: Table) -> None:
            for number, row in ((3, W), (0, X), (1000, X + 1)):
                table.namespace[row] = number
            table.identity[W : X + 2] = table.identity_of(slice(W, X + 2))

        scene.edit_rows(rename)
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 0, 2]
        assert host.adopted.blocks == 9

    @pytest.mark.parametrize("shard", [0, 0x0000_0001_0000_0001, 5 << 16 | 1 << 48])
    def test_blocks_on_a_shard_that_cannot_be_are_freed(self, scene: Scene, shard: int) -> None:
        def move(table: Table) -> None:
            table.shard[X] = shard
            table.identity[X : X + 1] = table.identity_of(slice(X, X + 1))

        scene.edit_rows(move)
        host = scene.adopt()
        assert found_of_all(host)[2] == 1

    def test_of_two_blocks_with_one_hash_one_stays(self, scene: Scene) -> None:
        def copy(table: Table) -> None:
            for name in ("hash", "parent", "tag", "fingerprint", "shard", "namespace", "index", "tokens"):
                getattr(table, name)[40] = getattr(table, name)[X]
            table.identity[40:41] = table.identity_of(slice(40, 41))
            table.state[40] = SlotState.READY
            table.generation[40] += np.uint64(1)

        scene.edit_rows(copy)
        host = scene.adopt()
        assert host.adopted.blocks == 12
        assert host.adopted.damaged == 1
        assert len(host.pool.match(rows_of("wxyz")).slots) == 4

    def test_an_extent_that_was_being_laid_out_is_empty_and_its_generations_go_on(self, scene: Scene) -> None:
        scene.edit(lambda content: store_word(content, GEOMETRY.record_at(0) + SEAL_AT, 0))
        host = scene.adopt()
        assert found_of_all(host) == [0, 0, 0, 2]
        space = host.pool.open_space(SPEC.root.digest, WHOLE, 1024, 4)
        host.pool.stage(space, 10_000)
        generations = {extent.number: extent.generation for extent in host.pool.extents.extents()}
        assert generations[0] == 2
        assert generations[2] == 1
        check_pool(host.pool)

    @settings(max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.one_of(
                    st.integers(0, 64),
                    st.integers(4096, 4096 + EXTENTS * 64),
                    st.integers(GEOMETRY.names_at, GEOMETRY.names_at + 700),
                    st.integers(GEOMETRY.data_at, GEOMETRY.data_at + (9 << 10)),
                    st.integers(GEOMETRY.data_at + (64 << 10), GEOMETRY.data_at + (68 << 10)),
                ),
                st.integers(1, 255),
            ),
            min_size=1,
            max_size=12,
        )
    )
    def test_whatever_is_flipped_no_wrong_block_goes_unnoticed(self, flips: list[tuple[int, int]]) -> None:
        def flip(content: NDArray[np.uint8]) -> None:
            for at, mask in flips:
                if at >= 8:  # what is no pool file at all is left alone
                    content[at] ^= mask

        with make_scene() as scene:
            scene.edit(flip)
            host = scene.adopt()
            for letters, spec in (("abcd", SPEC), ("abef", SPEC), ("wxyz", SPEC), ("ab", OTHER)):
                rows = rows_of(letters, spec)
                slots = host.pool.match(rows).slots
                payloads = host.views(slots, spec.payload_bytes_on())
                for block, (payload, stored) in enumerate(zip(payloads, host.checksums(slots), strict=True)):
                    right = payload.tobytes() == rows.hash_at(block) * (len(payload) // 16)
                    assert right or payload_checksum(payload) != stored, "its first reader finds out"


class TestCrash:
    @pytest.mark.parametrize("step", [Step.ADOPTION_LOCKED, Step.ADOPTION_SCANNED, Step.ADOPTION_DONE])
    def test_in_the_middle_of_taking_over(self, scene: Scene, step: Step) -> None:
        """The one after that finds the same as the one that was killed would have had."""
        script = f"""
import os, signal, sys
from pathlib import Path
from kvstore.evict.lru import LRU
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import payload_checksum

def stop(step):
    if step == "{step}":
        os.kill(os.getpid(), signal.SIGKILL)

HostTier(Path(sys.argv[1]), pool_bytes=8 << 16, extent_bytes=1 << 16, make_evictor=LRU,
         clock=lambda: 1050.0, failpoint=stop)
"""
        before = scene.epoch()
        run(script, scene.path, ends_by=signal.SIGKILL, bare=True)
        scene.clock.now = 1050.0
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 4, 2]
        assert host.file.epoch == before + (1 if step is Step.ADOPTION_LOCKED else 2)
        assert {writer: len(slots) for writer, slots in host.adopted.quarantined.items()} == {
            CLIENT: 3,
            SILENT: 1,
        }
        assert [until for _, until in host.adopted.leased] == [1060.0]

    def test_at_any_moment_of_any_write(self) -> None:
        """LMCache #4991: servers that write and evict are killed, and each goes on from the one before."""
        with pool_folder() as folder:
            for round_number in range(6):
                server = start(SERVE + WRITE_FOR_EVER, folder / "pool")
                assert server.stdout is not None
                assert server.stdout.readline() == "writing\n"
                time.sleep(0.01 + 0.013 * round_number)
                kill(server)
                server.communicate()
                host = make_host(folder, FakeClock(NOW), extents=EXTENTS)
                check_pool(host.pool)
                assert host.adopted.damaged == 0
                kept = 0
                for number in range(400):
                    for letters, spec in (
                        (chr(0x4E00 + number) + "abcdefg", SPEC),
                        (chr(0x4E00 + number), OTHER),
                    ):
                        kept += found(host, letters, spec)
                assert kept > 20
                host.close()
                del host


WRITE_FOR_EVER = """
number = 0
while True:
    if number == 35:
        print("writing", flush=True)
    put(chr(0x4E00 + number % 400) + "abcdefg", 1000.0 + number, spec)
    put(chr(0x4E00 + number % 400), 1000.0 + number, other)
    number += 7
"""


class TestRefusal:
    @pytest.mark.parametrize(
        ("change", "reason", "level"),
        [
            (lambda path: flip(path, 8, 3), "its format version is 1, expected 2", logging.INFO),
            (lambda path: flip(path, 12), "the checksum of its header does not agree", logging.WARNING),
            (lambda path: os.truncate(path, 20), "it starts with b'PKVPOOL", logging.WARNING),
            (lambda path: os.truncate(path, 1 << 21), "it has 2097152 bytes, expected", logging.WARNING),
            (lambda path: os.truncate(path, 0), "it is empty", logging.INFO),
            (
                lambda path: flip(path, 4096 + 20),
                "record of its extent 0 does not check out",
                logging.WARNING,
            ),
            (
                lambda path: flip(path, GEOMETRY.data_at + 5),
                "table of its extent 0 does not",
                logging.WARNING,
            ),
            (lambda path: path.chmod(0o644), "its mode is 0o644, expected 0o600", logging.WARNING),
            (lambda path: punch(path), "it is a sparse copy", logging.WARNING),
        ],
    )
    def test_a_file_that_cannot_be_taken_over_is_replaced_and_the_log_says_why(
        self,
        scene: Scene,
        caplog: pytest.LogCaptureFixture,
        change: Callable[[Path], object],
        reason: str,
        level: int,
    ) -> None:
        inode = scene.path.stat().st_ino
        change(scene.path)
        with caplog.at_level(logging.INFO, logger="kvstore"):
            host = scene.adopt()
        assert scene.path.stat().st_ino != inode
        assert found_of_all(host) == [0, 0, 0, 0]
        assert reason in host.adopted.reason
        [record] = [each for each in caplog.records if each.name.startswith("kvstore.tiers")]
        assert reason in record.getMessage()
        assert record.levelno == level

    def test_a_pool_of_another_size_starts_empty(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="kvstore"):
            host = scene.adopt(extents=4)
        assert "it has 8 extents of 65536 bytes, and the settings ask for 4 of 65536" in host.adopted.reason
        assert [record.levelno for record in caplog.records] == [logging.INFO]

    def test_damaged_rows_are_a_warning(self, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
        scene.edit_rows(lambda table: table.identity.__setitem__(X, 1))
        with caplog.at_level(logging.INFO, logger="kvstore"):
            scene.adopt()
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "1 did not check out" in record.getMessage()

    def test_while_a_child_of_the_server_lives_it_runs(self) -> None:
        """It maps the memory, and nobody could tell it from a thread of the server that still writes."""
        with pool_folder() as folder:
            fork = "child = os.fork()\nif child:\n    print(child, flush=True)\nsys.stdin.read()"
            server = start(SERVE + "put('abcd', 1000.0)\n" + fork, folder / "pool")
            assert server.stdout is not None
            child = int(server.stdout.readline())
            kill(server)
            with pytest.raises(PoolError, match="in use by another server"):
                make_host(folder, FakeClock(NOW), extents=EXTENTS)
            os.kill(child, signal.SIGKILL)
            server.communicate()
            host = make_host_when_free(folder)
            assert found(host, "abcd") == 4
            host.close()

    def test_memory_that_a_closed_server_still_maps_is_left_to_it(self) -> None:
        """Somebody in this process may hold a view of it, and may be writing."""
        with pool_folder() as folder:
            first = make_host(folder, FakeClock(NOW), extents=EXTENTS)
            view = first.file.data[:10]
            first.close()
            second = make_host(folder, FakeClock(NOW), extents=EXTENTS)
            assert "still maps its memory" in second.adopted.reason
            second.close()
            del first, second, view
            third = make_host(folder, FakeClock(NOW), extents=EXTENTS)
            assert "took over 0 blocks" in third.adopted.reason
            third.close()


def make_host_when_free(folder: Path) -> HostTier:
    """The kernel takes a killed process's locks away when it gets to it."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return make_host(folder, FakeClock(NOW), extents=EXTENTS)
        except PoolError:
            assert time.monotonic() < deadline, "the lock outlives all processes"
            time.sleep(0.001)


def flip(path: Path, at: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def punch(path: Path) -> None:
    """What copying with holes leaves of a pool file."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(GEOMETRY.data_at + (72 << 10))
        file.truncate(len(content))
