"""A client verifies what it was promised against the tables that it maps, whatever the server does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvstore.block import WHOLE, BlockRows, Chain, Shard, Uint64Array
from kvstore.errors import PoolError
from kvstore.spec import NamespaceSpec
from kvstore.tiers import pool_view
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory import payload_checksum
from kvstore.tiers.pool_format import NAMES_BYTES, SEAL_AT, Geometry
from kvstore.tiers.pool_view import ClientNumberTaken, Offsets, PoolView
from tests.support.pool_processes import mapping, run
from tests.support.stores import (
    SPLIT,
    FakeClock,
    Rig,
    RigOptions,
    make_chain,
    make_host,
    make_rig,
    make_spec,
    payload_of,
    pool_folder,
)

SPEC = make_spec()
OTHER = make_spec("other", payload_bytes=4096, block_size=8)
CLIENT = 4711


class Promise(NamedTuple):
    """What a lease tells a client."""

    rows: BlockRows
    offsets: Offsets
    generations: Uint64Array


def promise(host: HostTier, rows: BlockRows) -> Promise:
    """Places of the leading run of ``rows``."""
    slots = host.pool.match(rows).slots
    generations = np.zeros(len(slots), dtype=np.uint64)
    for extent, positions, table_rows in host.pool.extents.groups(slots):
        generations[positions] = extent.table.generation[table_rows]
    return Promise(
        rows.slice(0, len(slots)), host.pool.extents.offsets(slots) + host.file.data_at, generations
    )


@pytest.fixture
def rig() -> Iterator[Rig]:
    with make_rig(FakeClock(), [(SPEC, (WHOLE, *SPLIT)), (OTHER, (WHOLE,))], RigOptions(2)) as made:
        yield made


@pytest.fixture
def view(rig: Rig) -> Iterator[PoolView]:
    made = PoolView(rig.host.file.path, rig.host.file.epoch, CLIENT)
    yield made
    made.close()


class TestVerify:
    def test_a_promise_that_holds(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "abcdefgh"))
        rig.write(make_chain(OTHER, "abc"))
        for spec, letters in ((SPEC, "abcdefgh"), (OTHER, "abc")):
            promised = promise(rig.host, make_chain(spec, letters).rows(WHOLE))
            assert view.verify(*promised) == len(letters)
            assert view.unchanged(promised.offsets, promised.generations) == len(letters)
            size = spec.payload_bytes_on()
            for block, payload in enumerate(view.views(promised.offsets, size)):
                assert payload.tobytes() == payload_of(promised.rows, block, size).tobytes()

    def test_scattered_slots_are_found_one_by_one(self, rig: Rig, view: PoolView) -> None:
        for letters in ("a", "xy", "ab", "z", "abc"):
            rig.write(make_chain(SPEC, letters))
        promised = promise(rig.host, make_chain(SPEC, "abc").rows(WHOLE))
        assert (np.diff(promised.offsets) != 1024).any()
        assert view.verify(*promised) == 3

    @pytest.mark.parametrize(
        "lie",
        [
            lambda rows: replace(rows, namespace=OTHER.root.digest),
            lambda rows: replace(rows, namespace=bytes(16)),
            lambda rows: replace(rows, shard=Shard(1, 2)),
            lambda rows: replace(rows, hashes=bytes(16) + rows.hashes[16:]),
            lambda rows: replace(rows, parents=bytes(16) + rows.parents[16:]),
            lambda rows: replace(rows, indexes=rows.indexes + 1),
            lambda rows: replace(rows, tokens=rows.tokens + 1),
            lambda rows: replace(rows, tokens=rows.tokens[:, :2]),
            lambda rows: replace(rows, fingerprints=rows.fingerprints + 1),
        ],
    )
    def test_everything_that_is_known_is_compared(self, rig: Rig, view: PoolView, lie: object) -> None:
        rig.write(make_chain(SPEC, "abc"))
        promised = promise(rig.host, make_chain(SPEC, "abc").rows(WHOLE))
        assert callable(lie)
        assert view.verify(lie(promised.rows), promised.offsets, promised.generations) == 0

    def test_what_is_not_known_is_not(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "abc"))
        promised = promise(rig.host, make_chain(SPEC, "abc").rows(WHOLE))
        hashes = replace(promised.rows, tokens=None, fingerprints=None)
        assert view.verify(hashes, promised.offsets, promised.generations) == 3

    def test_the_run_ends_before_the_first_block_that_differs(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "abcdefgh"))
        promised = promise(rig.host, make_chain(SPEC, "abcdefgh").rows(WHOLE))
        tokens = promised.rows.tokens
        assert tokens is not None
        wrong = tokens.copy()
        wrong[5, 2] += 1
        assert view.verify(replace(promised.rows, tokens=wrong), promised.offsets, promised.generations) == 5

    def test_a_namespace_that_is_registered_later_is_found(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "a"))
        assert view.verify(*promise(rig.host, make_chain(SPEC, "a").rows(WHOLE))) == 1
        late = make_spec("late")
        rig.store.register(late)
        rig.write(make_chain(late, "a"))
        assert view.verify(*promise(rig.host, make_chain(late, "a").rows(WHOLE))) == 1

    def test_shards_have_places_of_their_own(self, rig: Rig, view: PoolView) -> None:
        for shard in SPLIT:
            rig.write(make_chain(SPEC, "abc"), shard)
        first, second = (promise(rig.host, make_chain(SPEC, "abc").rows(shard)) for shard in SPLIT)
        assert view.verify(*first) == view.verify(*second) == 3
        assert view.verify(first.rows, second.offsets, second.generations) == 0

    def test_offsets_that_are_no_slots(self, rig: Rig, view: PoolView) -> None:
        """A broken or lying server costs hits, never a fault."""
        rig.write(make_chain(SPEC, "ab"))
        promised = promise(rig.host, make_chain(SPEC, "ab").rows(WHOLE))
        for offset in (-(1 << 40), -1, 0, 1, promised.offsets[0] + 64, 1 << 30, 1 << 62):
            strange = promised._replace(offsets=np.array([promised.offsets[0], offset]))
            assert view.verify(*strange) == 1
            assert view.unchanged(strange.offsets, strange.generations) == 1
        last_of_data = rig.host.file.data_at + rig.host.file.extent_bytes - 1024
        assert view.unverified(np.array([last_of_data, 1 << 50])).tolist() == [0, 1]
        assert view.checksums(np.array([last_of_data, 1 << 50])).tolist() == [0, 0]

    def test_a_block_that_was_not_readable_is_no_promise(self, rig: Rig, view: PoolView) -> None:
        write = rig.store.write(make_chain(SPEC, "ab"))
        offsets = rig.host.pool.extents.offsets(write.slots) + rig.host.file.data_at
        odd = rig.host.pool.extents.extents()[0].table.generation[:2].copy()
        assert (odd % 2 == 1).all()
        assert view.unchanged(offsets, odd) == 0
        write.abort()

    def test_thousands_of_blocks_in_less_than_a_millisecond(self) -> None:
        spec = make_spec(block_size=16, payload_bytes=64)
        options = RigOptions(1, extent_bytes=4 << 20)
        with make_rig(FakeClock(), [(spec, (WHOLE,))], options) as rig:
            chain = Chain.of(spec.root, np.arange(8192 * 16))
            with rig.store.write(chain):
                pass
            promised = promise(rig.host, chain.rows(WHOLE))
            view = PoolView(rig.host.file.path, rig.host.file.epoch, CLIENT)
            took = []
            for _ in range(20):
                began = time.perf_counter()
                assert view.verify(*promised) == 8192
                took.append(time.perf_counter() - began)
            view.close()
        assert min(took) < 1e-3


class TestChange:
    def test_an_eviction_ends_a_promise(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "abcd"))
        promised = promise(rig.host, make_chain(SPEC, "abcd").rows(WHOLE))
        rig.host.pool.evict(rig.host.pool.spaces()[0].slot_class, 1)
        assert view.unchanged(promised.offsets, promised.generations) == 3
        rig.write(make_chain(SPEC, "abcd"))
        assert view.unchanged(promised.offsets, promised.generations) == 3, (
            "it came back as another generation"
        )
        assert view.verify(*promised) == 3

    def test_a_slot_that_changed_hands_and_came_back_is_not_taken_for_the_old_one(self) -> None:
        """local-inference-lab/vllm #480. The only extent serves another size, then the same again."""
        with make_rig(FakeClock(), [(SPEC, (WHOLE,)), (OTHER, (WHOLE,))], RigOptions(1)) as rig:
            view = PoolView(rig.host.file.path, rig.host.file.epoch, CLIENT)
            old: list[Promise] = []
            for _ in range(3):
                rig.write(make_chain(SPEC, "abcd"))
                promised = promise(rig.host, make_chain(SPEC, "abcd").rows(WHOLE))
                assert view.verify(*promised) == 4
                assert [view.unchanged(each.offsets, each.generations) for each in old] == [0] * len(old)
                old.append(promised)
                rig.write(make_chain(OTHER, "abcd"))
                assert view.verify(*promise(rig.host, make_chain(OTHER, "abcd").rows(WHOLE))) == 4
            assert len({each.offsets.tobytes() for each in old}) == 1, "the slots were the same each time"
            view.close()

    def test_an_extent_that_is_being_laid_out_is_not_verified(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "abcd"))
        promised = promise(rig.host, make_chain(SPEC, "abcd").rows(WHOLE))
        number = int((promised.offsets[0] - rig.host.file.data_at) // rig.host.file.extent_bytes)
        seal = Geometry.record_at(number) + SEAL_AT
        before = rig.host.file.bytes[seal : seal + 8].copy()
        for torn in (b"\0" * 8, b"\1" * 8):
            rig.host.file.bytes[seal : seal + 8] = np.frombuffer(torn, dtype=np.uint8)
            assert view.verify(*promised) == 0
            assert view.unchanged(promised.offsets, promised.generations) == 0
            assert view.unverified(promised.offsets).tolist() == [0, 1, 2, 3]
        rig.host.file.bytes[seal : seal + 8] = before
        assert view.verify(*promised) == 4

    def test_while_the_server_evicts_and_writes_a_reader_never_keeps_another_block(self) -> None:
        """Two block sizes fight for two extents; whatever a reader verifies must be what it asked for."""
        with make_rig(FakeClock(), [(SPEC, (WHOLE,)), (OTHER, (WHOLE,))], RigOptions(2)) as rig:
            view = PoolView(rig.host.file.path, rig.host.file.epoch, CLIENT)
            promises: list[Promise] = []
            verified, over = 0, threading.Event()
            wrong: list[str] = []

            def read() -> None:
                nonlocal verified
                while not over.is_set():
                    for promised in promises[-8:]:
                        rows, offsets, generations = promised
                        found = view.verify(rows, offsets, generations)
                        size = SPEC.payload_bytes_on() if rows.namespace == SPEC.root.digest else 4096
                        copies = [each.tobytes() for each in view.views(offsets[:found], size)]
                        kept = view.unchanged(offsets[:found], generations[:found])
                        verified += kept
                        right = [payload_of(rows, block, size).tobytes() for block in range(kept)]
                        if copies[:kept] != right:
                            wrong.append(f"blocks at {offsets.tolist()}")

            reader = threading.Thread(target=read)
            reader.start()
            deadline = time.monotonic() + 1.5
            number = 0
            while time.monotonic() < deadline and not wrong:
                spec: NamespaceSpec = (SPEC, OTHER)[number // 7 % 2]
                chain = make_chain(spec, chr(0x4E00 + number % 500) + "abcdefghijkl")
                rig.write(chain)
                promises.append(promise(rig.host, chain.rows(WHOLE)))
                number += 1
            over.set()
            reader.join()
            view.close()
        assert wrong == []
        assert verified > 100


class TestPayloads:
    def test_blocks_that_a_server_took_over_are_to_be_compared(self) -> None:
        with pool_folder() as folder:
            run(FILL, folder / "pool")
            host = make_host(folder, FakeClock(), extents=8)
            spec = make_spec()
            rows = make_chain(spec, "abc").rows(WHOLE)
            promised = promise(host, rows)
            view = PoolView(host.file.path, host.file.epoch, CLIENT)
            assert view.verify(*promised) == 3
            assert view.unverified(promised.offsets).tolist() == [0, 1, 2]
            payloads = view.views(promised.offsets, 1024)
            assert view.checksums(promised.offsets).tolist() == [payload_checksum(each) for each in payloads]
            view.close()
            host.close()

    def test_blocks_that_this_server_wrote_are_not(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "abc"))
        assert view.unverified(promise(rig.host, make_chain(SPEC, "abc").rows(WHOLE)).offsets).tolist() == []


FILL = """
spec = NamespaceSpec(
    Namespace("model", "0" * 40, "bfloat16", "test", 4, KVShape(2, 2, 2, 8)), 1024
)
store = TieredStore(Tiers(host), clock=lambda: 1.0)
store.register(spec)
tokens = np.repeat(np.frombuffer(b"abc", dtype=np.uint8), 4)
with store.write(Chain.of(spec.root, tokens)) as write:
    for number, payload in enumerate(write.payloads):
        payload[:] = number
os.kill(os.getpid(), signal.SIGKILL)
""".replace("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)")


class TestOpening:
    def test_two_clients_with_one_number(self, rig: Rig, view: PoolView) -> None:
        path, epoch = rig.host.file.path, rig.host.file.epoch
        with pytest.raises(
            ClientNumberTaken, match=rf"number {CLIENT} is in use .*choose another and register"
        ):
            PoolView(path, epoch, CLIENT)
        with mapping(path, epoch, CLIENT + 1):
            with pytest.raises(ClientNumberTaken):
                PoolView(path, epoch, CLIENT + 1)
            PoolView(path, epoch, CLIENT + 2).close()
        assert view.memory.size == path.stat().st_size

    def test_a_number_is_free_again_after_the_close(self, rig: Rig, view: PoolView) -> None:
        view.close()
        PoolView(rig.host.file.path, rig.host.file.epoch, CLIENT).close()

    def test_what_is_closed_verifies_nothing(self, rig: Rig, view: PoolView) -> None:
        rig.write(make_chain(SPEC, "ab"))
        promised = promise(rig.host, make_chain(SPEC, "ab").rows(WHOLE))
        assert view.verify(*promised) == 2
        view.close()
        assert view.verify(*promised) == 0
        assert view.unchanged(promised.offsets, promised.generations) == 0
        assert view.unverified(promised.offsets).tolist() == [0, 1]
        assert view.epoch == 0

    @pytest.mark.parametrize("client", [-1, 0, 1 << 31])
    def test_numbers_that_are_none(self, rig: Rig, client: int) -> None:
        with pytest.raises(PoolError, match=rf"client number is {client}, expected 1 … 2147483647"):
            PoolView(rig.host.file.path, rig.host.file.epoch, client)

    def test_a_server_that_restarted_meanwhile(self, rig: Rig) -> None:
        epoch = rig.host.file.epoch
        with pytest.raises(
            PoolError, match=rf"has epoch {epoch}, expected {epoch - 1}: its server restarted"
        ):
            PoolView(rig.host.file.path, epoch - 1, CLIENT)
        PoolView(rig.host.file.path, epoch, CLIENT).close()

    def test_a_file_that_another_server_replaced(self) -> None:
        """The old mapping stays readable, and its epoch what it was; the new file has quite another one."""
        with pool_folder() as folder:
            first = make_host(folder, FakeClock(), extents=2)
            old = PoolView(first.file.path, first.file.epoch, CLIENT)
            epoch = first.file.epoch
            first.close()
            second = make_host(folder, FakeClock(), extents=3)
            assert old.epoch == epoch != second.file.epoch
            old.memory[-1] = 1
            with pytest.raises(PoolError, match="its server restarted; register again"):
                PoolView(second.file.path, epoch, CLIENT)
            PoolView(second.file.path, second.file.epoch, CLIENT).close()
            old.close()
            second.close()

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (lambda path: path.unlink(), "cannot open pool file .*No such file"),
            (lambda path: os.truncate(path, 0), "cannot be used: it starts with b''"),
            (lambda path: os.truncate(path, 30), "cannot be used: it starts with"),
            (lambda path: os.truncate(path, 4096), r"has 4096 bytes, expected \d+; restart its server"),
            (lambda path: os.truncate(path, NAMES_BYTES * 64), r"has \d+ bytes, expected \d+"),
            (lambda path: path.write_bytes(os.urandom(1 << 16)), "cannot be used: it starts with"),
            (lambda path: flip(path, 8), "its format version is 3, expected 2; use the server's version"),
            (lambda path: flip(path, 12), "the checksum of its header does not agree"),
            (lambda path: flip(path, 24), "the checksum of its header does not agree"),
            (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "cannot open pool file"),
        ],
    )
    def test_what_is_no_whole_pool_file_is_an_error_and_nothing_worse(
        self, tmp_path: Path, change: object, problem: str
    ) -> None:
        with pool_folder() as folder:
            host = make_host(folder, FakeClock())
            copy = tmp_path / "pool"
            epoch = host.file.epoch
            copy.write_bytes(host.file.path.read_bytes())
            host.close()
        assert callable(change)
        change(copy)
        with pytest.raises(PoolError, match=problem):
            PoolView(copy, epoch, CLIENT)


def test_another_kind_of_machine_does_not_map(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read while the server writes is judged by the order of loads and stores."""
    monkeypatch.setattr(pool_view, "_MACHINE", "aarch64")
    with pytest.raises(PoolError, match=r"this machine is aarch64, expected x86_64 or AMD64: .*; stream"):
        PoolView(rig.host.file.path, rig.host.file.epoch, CLIENT)


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
