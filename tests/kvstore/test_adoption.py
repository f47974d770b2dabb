"""A server takes over the blocks of one that is gone, and nothing of what that one had not finished."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.block import WHOLE
from kvstore.events import RemovalCause
from kvstore.integrity import check_pool
from kvstore.table import SlotState, Table
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import payload_checksum
from kvstore.tiers.pool_view import PoolView
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
    found,
    found_of_all,
    make_scene,
    rows_of,
)
from tests.support.pool_processes import kill, run, start
from tests.support.stores import FakeClock, make_host, make_spec, pool_folder


@pytest.fixture
def scene() -> Iterator[Scene]:
    with make_scene() as made:
        yield made


class TestBlocks:
    def test_what_was_visible_is_there_and_nothing_else(self, scene: Scene) -> None:
        inode = scene.path.stat().st_ino
        before = scene.epoch()
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 4, 2]
        assert host.adopted.blocks == 10 + 2
        assert host.adopted.damaged == 0
        assert "12 blocks" in host.adopted.reason
        assert host.file.epoch == before + 1
        assert scene.path.stat().st_ino == inode, "clients go on with the mapping that they have"
        assert host.pool.usage().ready == 10 * 1024 + 2 * 4096
        assert host.pool.usage().reserved == 2 * GEOMETRY.extent_bytes

    def test_payloads_are_to_be_compared_by_their_first_readers(self, scene: Scene) -> None:
        host = scene.adopt()
        slots = host.pool.match(rows_of("abcd")).slots
        extent = host.pool.extents.containing(int(slots[0]))
        assert (extent.table.checked[slots - extent.base] == 0).all()
        (late,) = host.pool.stage(host.pool.spaces()[0], 1, rows_of("v"))
        host.pool.commit(np.array([late]), rows_of("v"), [1], time=NOW)
        assert extent.table.checked[late - extent.base] == 1

    def test_payloads_are_not_even_mapped(self, scene: Scene) -> None:
        """So the time that it takes does not depend on their size."""
        scene.adopt()
        inode = str(scene.path.stat().st_ino)
        maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
        mapped = next(part for part in maps if f" {inode} " in part)
        resident = int(mapped.split("Rss:")[1].split()[0]) << 10
        assert resident < GEOMETRY.data_at + 2 * (24 << 10)

    def test_new_blocks_go_on_where_the_old_ones_end(self, scene: Scene) -> None:
        host = scene.adopt()
        space = host.pool.space(SPEC.root.digest, WHOLE)
        assert space is not None
        rows = rows_of("abcdgh").slice(4, 6)
        slots = host.pool.stage(space, 2, rows)
        host.pool.commit(slots, rows, [1, 1], time=NOW)
        assert len(host.pool.match(rows_of("abcdgh")).slots) == 6
        check_pool(host.pool)

    def test_again_and_again(self, scene: Scene) -> None:
        """Each process takes over what the one before took over, and adds to it."""
        for number in range(3):
            letters = "klm"[number]
            script = f"put('{letters}no', {1100.0 + number})\nos.kill(os.getpid(), signal.SIGKILL)"
            run(SERVE + script, scene.path, ends_by=signal.SIGKILL)
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 4, 2]
        assert [found(host, letters + "no") for letters in "klm"] == [3, 3, 3]

    def test_namespaces_keep_their_numbers(self, scene: Scene) -> None:
        host = scene.adopt()
        late = make_spec("late")
        assert host.file.describe(OTHER) == 2
        assert host.file.describe(late) == host.file.namespace_id(late.root.digest) == 4


class TestOrder:
    def test_least_recently_used_goes_first(self, scene: Scene) -> None:
        """b was used with f and e at 1010, so of the oldest prompt only c and d are older."""
        host = scene.adopt()
        cls = host.pool.spaces()[0].slot_class
        order = []
        for _ in range(10):
            host.pool.evict(cls, 1)
            order.append(
                tuple(len(host.pool.match(rows_of(each)).slots) for each in ("abcd", "abef", "wxyz"))
            )
            check_pool(host.pool)
        assert order == [
            (3, 4, 4),
            (2, 4, 4),
            (2, 3, 4),
            (2, 2, 4),
            (1, 1, 4),
            (0, 0, 4),
            (0, 0, 3),
            (0, 0, 2),
            (0, 0, 1),
            (0, 0, 0),
        ]

    def test_orphans_go_before_anything_else(self, scene: Scene) -> None:
        def lose(table: Table) -> None:
            table.identity[W] += np.uint64(2)  # from it xyz hang

        scene.edit_rows(lose)
        host = scene.adopt()
        assert found_of_all(host) == [4, 4, 0, 2]
        host.pool.evict(host.pool.spaces()[0].slot_class, 3)
        assert found_of_all(host) == [4, 4, 0, 2]
        assert host.pool.usage().ready == 6 * 1024 + 2 * 4096

    def test_a_parent_that_comes_back_finds_its_children(self, scene: Scene) -> None:
        scene.edit_rows(lambda table: table.identity.__setitem__(W, 1))
        host = scene.adopt()
        space = host.pool.spaces()[0]
        rows = rows_of("w")
        slots = host.pool.stage(space, 1, rows)
        host.views(slots, 1024)[0][:] = np.tile(np.frombuffer(rows.hashes, np.uint8), 64)
        host.pool.commit(slots, rows, [payload_checksum(host.views(slots, 1024)[0])], time=NOW)
        assert found(host, "wxyz") == 4
        check_pool(host.pool)

    @pytest.mark.parametrize("strange", [5000.0, np.inf, np.nan])
    def test_a_clock_that_went_backwards(self, scene: Scene, strange: float) -> None:
        def stamp(table: Table) -> None:
            table.used_at[:] = table.stored_at[:] = strange

        scene.edit_rows(stamp)
        host = scene.adopt()
        table = host.pool.extents.extents()[0].table
        ready = table.state == SlotState.READY
        assert (table.used_at[ready] == NOW).all()
        assert (table.stored_at[ready] == NOW).all()
        assert host.pool.evict(host.pool.spaces()[0].slot_class, 100) == 10


class TestPromises:
    def test_leases_of_the_old_server_are_reported_with_their_ends(self, scene: Scene) -> None:
        scene.clock.now = 1040.0
        host = scene.adopt()
        [(slots, until)] = host.adopted.leased
        assert until == 1060.0
        assert sorted(slots.tolist()) == sorted(host.pool.match(rows_of("wxyz")).slots.tolist())

    def test_those_that_are_over_are_not(self, scene: Scene) -> None:
        assert scene.adopt().adopted.leased == []

    def test_slots_of_writers_that_may_yet_write_are_kept_from_everybody(self, scene: Scene) -> None:
        host = scene.adopt()
        assert {writer: len(slots) for writer, slots in host.adopted.quarantined.items()} == {
            CLIENT: 3,
            SILENT: 1,
        }
        kept = np.concatenate(list(host.adopted.quarantined.values()))
        space = host.pool.spaces()[0]
        everything = host.pool.stage(space, 10_000)
        assert not np.isin(kept, everything).any()
        assert host.pool.usage().quarantined == 4 * 1024
        host.pool.unquarantine(host.adopted.quarantined[CLIENT])
        assert len(host.pool.stage(space, 10_000)) == 3
        check_pool(host.pool)

    def test_the_client_of_a_killed_server_goes_on_with_its_mapping(self) -> None:
        """What it verified stays verified, what it writes late reaches nobody, and it sees the new epoch."""
        with pool_folder() as folder:
            path = folder / "pool"
            server = start(SERVE + "put('abcd', 1000.0)\n" + STAGE_FOR_CLIENT, path)
            assert server.stdout is not None
            epoch, staged = map(int, server.stdout.readline().split())
            client = PoolView(path, epoch, CLIENT)
            kill(server)
            server.communicate()
            host = make_host(folder, FakeClock(NOW), extents=EXTENTS)
            assert client.epoch == epoch + 1 == host.file.epoch
            rows = rows_of("abcd")
            slots = host.pool.match(rows).slots
            offsets = host.pool.extents.offsets(slots) + host.file.data_at
            generations = np.full(4, 1 << 32 | 2, dtype=np.uint64)
            assert client.verify(rows, offsets, generations) == 4, "the promise of the old server"
            assert host.client_alive(CLIENT)
            assert list(host.adopted.quarantined) == [CLIENT]
            fill_pool(host)
            client.memory[staged : staged + 1024] = 0xFF  # its writer has noticed nothing yet
            assert all((payload == 0xEE).all() for payload in everything_in(host))
            client.close()
            del slots
            assert not host.client_alive(CLIENT)
            host.close()


STAGE_FOR_CLIENT = f"""
slot = host.pool.stage(space, 1, writer={CLIENT})
print(host.file.epoch, int(host.pool.extents.offsets(slot)[0]) + host.file.data_at, flush=True)
sys.stdin.read()
"""


def fill_pool(host: HostTier) -> None:
    """Put as many blocks into the pool as there is room for, all of 0xEE."""
    space = host.pool.spaces()[0]
    host.pool.discard(np.array(list(space.ready.values())), RemovalCause.CLEARED)
    letters = "".join(chr(0x4E00 + number) for number in range(EXTENTS * 64))
    slots = host.pool.stage(space, len(letters), rows_of(letters))
    for payload in host.views(slots, 1024):
        payload[:] = 0xEE
    host.pool.commit(slots, rows_of(letters).slice(0, len(slots)), [1] * len(slots), time=NOW)


def everything_in(host: HostTier) -> list[NDArray[np.uint8]]:
    return host.views(np.array(list(host.pool.spaces()[0].ready.values())), 1024)
