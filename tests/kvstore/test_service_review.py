"""What a strict reader of the server found: each would lose a slot, a promise, a limit or a right byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore.v1 import admin_pb2, block_pb2, lookup_pb2
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import Credentials, Peer, Raw, dialled, mapping, refused, spec, tokens_of
from tests.support.tenants import Entry, write_tenants

PROMPT = tokens_of(8)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with sidecar(write_seconds=1) as server:
        yield server


@pytest.fixture
def raw(server: Sidecar) -> Iterator[Raw]:
    with dialled(server.address) as raw:
        yield raw


def damage(server: Sidecar, peer: Peer, block: int) -> None:
    """Flip a byte of a block's payload in the pool file, as memory that fails does."""
    payload = peer.payloads(PROMPT)[block]
    data = bytearray(Path(server.pool_path).read_bytes())
    at = data.find(payload)
    assert at > 0
    with Path(server.pool_path).open("r+b") as file:
        file.seek(at)
        file.write(bytes([payload[0] ^ 0xFF]))


@pytest.mark.parametrize("compared", [0, 8])
def test_who_streams_does_not_vouch_for_payloads(compared: int) -> None:
    """After a restart a damaged payload must be found by its first reader, whoever acquired before."""
    with sidecar() as server:
        with dialled(server.address) as raw:
            peer = raw.register(spec("vouched"))
            peer.write(PROMPT)
            server.kill()
            damage(server, peer, 3)
        server.restart()
        with dialled(server.address) as raw:
            peer = raw.register(spec("vouched"))
            lease_id = peer.hold(PROMPT, "reads nothing")
            raw.blocks.Release(
                block_pb2.ReleaseRequest(
                    **peer.me, lease_id=lease_id, used_blocks=8, compared_blocks=compared
                )
            )
            mapped = raw.register(spec("vouched"), can_map=True)
            with mapping(mapped) as view:
                [places] = mapped.acquire(PROMPT, "reads all").shards
                offsets = np.frombuffer(places.offsets, dtype="<i8")
                assert view.unverified(offsets).tolist() == list(range(8))


class TestNamedWrites:
    def test_a_write_is_aborted_by_the_name_that_its_client_gave_it(self, raw: Raw) -> None:
        peer = raw.register(spec("named"))
        begun = peer.begin(PROMPT, write_id=77)
        assert begun.write_id == 77
        peer.abort(77)
        assert raw.await_quiet().writes == 0

    def test_one_that_was_aborted_first_does_not_begin(self, raw: Raw) -> None:
        """A caller that gave up may be heard before the call that it gave up."""
        peer = raw.register(spec("aborted first"))
        peer.abort(5)
        with refused(PRECONDITION, "5", "aborted already"):
            peer.begin(PROMPT, write_id=5)
        assert raw.await_quiet().writes == 0

    def test_a_name_is_used_once(self, raw: Raw) -> None:
        peer = raw.register(spec("twice"))
        peer.begin(PROMPT, write_id=9)
        with refused(PRECONDITION, "9", "name each write anew"):
            peer.begin(tokens_of(8, seed=3), write_id=9)
        peer.abort(9)


def test_what_was_begun_as_a_stream_must_come(raw: Raw) -> None:
    """Whatever the client calls itself by now: slots that nobody filled stay invisible."""
    streams = raw.register(spec("flipped"), can_map=False)
    begun = streams.begin(PROMPT)
    request = block_pb2.RegisterNamespaceRequest()
    request.CopyFrom(streams.request)
    request.can_map = True
    raw.blocks.RegisterNamespace(request)
    with refused(PRECONDITION, "have not all come"):
        streams.commit(begun.write_id, [1] * 8)
    raw.register(spec("flipped")).assert_unwritten(PROMPT)


def test_a_renewal_of_millions_costs_the_others_nothing(raw: Raw) -> None:
    peer = raw.register(spec("renewed"))
    began = time.monotonic()
    with refused(EXHAUSTED, "2000000", "client"):
        raw.blocks.Renew(block_pb2.RenewRequest(**peer.me, lease_ids=range(2_000_000)))
    assert time.monotonic() - began < 2


def test_a_client_whose_many_leases_ran_out_is_told_of_all(raw: Raw) -> None:
    """As many as it may hold: it cannot know which are left."""
    peer = raw.register(spec("ran out"))
    assert peer.renew(*range(100_000, 104_096)) == list(range(100_000, 104_096))


def test_pins_are_shown_and_bounded(raw: Raw) -> None:
    peer = raw.register(spec("pinned"))
    peer.write(PROMPT)
    raw.admin.Pin(admin_pb2.PinRequest(name="manual", prompt=peer.prompt(PROMPT)))
    [pin] = raw.status().pins
    assert (pin.name, pin.tenant, pin.tokens) == ("manual", "", len(PROMPT))
    assert pin.bytes == 8 * 1024
    raw.admin.Unpin(admin_pb2.UnpinRequest(name="manual"))
    assert not raw.status().pins
    with sidecar(pool_bytes="2MiB") as small, dialled(small.address) as there:
        big = there.register(spec("big", payload_bytes=100_000))
        tokens = tokens_of(12)
        big.write(tokens)
        with refused(PRECONDITION, "half of the pool"):
            there.admin.Pin(admin_pb2.PinRequest(name="all", prompt=big.prompt(tokens)))


class TestTokens:
    def test_a_message_without_one_is_not_even_read(self, tmp_path: Path) -> None:
        """Empty prompts, two bytes each, become a gigabyte of objects: not for those who have no token."""
        tenants = write_tenants(tmp_path / "tenants.toml", Entry("one"))
        with sidecar(tenants_file=str(tenants)) as server, dialled(server.address) as nobody:
            request = lookup_pb2.BatchLookupRequest(requests=[lookup_pb2.LookupRequest()] * 4_000_000)
            before = resident_bytes(server.pid)
            with refused(grpc.StatusCode.UNAUTHENTICATED, "no token"):
                nobody.lookup.BatchLookup(request)
            assert resident_bytes(server.pid) - before < 64 << 20

    def test_a_watch_ends_with_its_token(self, tmp_path: Path) -> None:
        ends = (datetime.now(UTC) + timedelta(seconds=4)).strftime("%Y-%m-%dT%H:%M:%SZ")
        entry = Entry("guard", f"admin = true\nexpires = {ends}\n")
        tenants = write_tenants(tmp_path / "tenants.toml", entry)
        with sidecar(tenants_file=str(tenants)) as server:
            guard = Raw(server.address, Credentials(entry.token))
            events = guard.admin.WatchEvents(admin_pb2.WatchEventsRequest())
            next(events)
            with refused(grpc.StatusCode.UNAUTHENTICATED, "expired"):
                next(events)
            guard.close()


def test_a_server_that_cannot_listen_leaves_the_pool_alone() -> None:
    """It takes its addresses before it touches what another server left."""
    with sidecar() as server:
        with dialled(server.address) as raw:
            raw.register(spec("kept")).write(PROMPT)
        server.kill()
        failed = Sidecar(
            {**server.settings, "pool_bytes": "16MiB", "listen": "unix:/dev/shm/no/such/folder/s"}
        )
        with pytest.raises(AssertionError, match="ended with status"):
            failed.start()
        assert failed.process.stdout is not None
        failed.process.stdout.close()
        server.restart()
        assert server.serving["adopted_blocks"] == 8


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def test_a_pin_may_grow_and_nothing_is_held_under_the_name_of_nothing() -> None:
    with sidecar(pool_bytes="4MiB") as server, dialled(server.address) as raw:
        peer, pool = raw.register(spec("grown", payload_bytes=100_000)), 4 << 20
        tokens = tokens_of(16)
        absent = admin_pb2.PinRequest(name="absent", prompt=peer.prompt(tokens_of(4, seed=9)))
        assert raw.admin.Pin(absent).tokens == 0
        assert not raw.admin.Unpin(admin_pb2.UnpinRequest(name="absent")).found
        for blocks in (12, 16):  # together more than half of the pool
            peer.write(tokens[: blocks * 16])
            raw.admin.Pin(admin_pb2.PinRequest(name="long", prompt=peer.prompt(tokens)))
            [pin] = raw.status().pins
            assert pin.tokens == blocks * 16
            assert pin.bytes <= pool // 2
        assert raw.admin.Unpin(admin_pb2.UnpinRequest(name="long")).found
