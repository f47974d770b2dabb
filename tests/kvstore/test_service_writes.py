"""Writes of a sidecar: who may fill what, and that nothing but whole and right blocks become visible."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.block import WHOLE, Shard
from kvstore.v1 import block_pb2
from tests.support.sidecars import sidecar
from tests.support.stubs import (
    BEING_WRITTEN,
    PIECE_BYTES,
    PRESENT,
    REFUSED,
    YOURS,
    Peer,
    Raw,
    checksums,
    cut,
    dialled,
    fork,
    refused,
    spec,
    tokens_of,
)
from tests.support.valkey import eventually

PROMPT = tokens_of(8, tail=3)
SLOT_BYTES = 1024
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def raw() -> Iterator[Raw]:
    with sidecar() as server, dialled(server.address) as raw:
        yield raw


@pytest.fixture
def peer(raw: Raw, request: pytest.FixtureRequest) -> Peer:
    return raw.register(spec(request.node.name))


class TestStatuses:
    def test_new_present_and_both(self, raw: Raw, peer: Peer) -> None:
        assert peer.write(PROMPT) == [YOURS] * 8
        assert peer.write(PROMPT) == [PRESENT] * 8
        assert peer.write(fork(PROMPT, 5)) == [PRESENT] * 5 + [YOURS] * 3
        assert raw.await_quiet().writes == 0

    def test_nothing_is_visible_before_the_commit(self, raw: Raw, peer: Peer) -> None:
        before = raw.await_quiet().tiers[0].pool.ready_bytes
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        assert begun.seconds == peer.answer.write_seconds == 30
        assert not begun.offsets, "a client that streams has no use for offsets"
        assert peer.send(begun.write_id, cut(b"".join(payloads))) == 8 * 1024
        assert peer.matched(PROMPT) == 0
        status, pool = raw.status(), raw.pool()
        assert (status.writes, status.clients, pool.staged_bytes) == (1, 1, 8 * SLOT_BYTES)
        assert peer.commit(begun.write_id, checksums(payloads)) == 8
        assert peer.matched(PROMPT) == 128
        pool = raw.pool()
        assert (raw.status().writes, pool.staged_bytes) == (0, 0)
        assert pool.ready_bytes == before + 8 * SLOT_BYTES

    def test_one_of_two_writers_gets_a_block(self, raw: Raw, peer: Peer) -> None:
        other = raw.register(peer.request.spec)
        first = peer.begin(PROMPT[: 4 * 16])
        second = other.begin(PROMPT)
        assert list(second.statuses) == [BEING_WRITTEN] * 4 + [YOURS] * 4
        theirs = other.payloads(PROMPT, first_block=4)
        other.send(second.write_id, [b"".join(theirs)])
        assert other.commit(second.write_id, checksums(theirs)) == 4
        assert other.matched(PROMPT) == 0, "the first half is not there yet"
        ours = peer.payloads(PROMPT[: 4 * 16])
        peer.send(first.write_id, [b"".join(ours)])
        peer.commit(first.write_id, checksums(ours))
        peer.assert_holds(PROMPT)

    def test_racing_writers_leave_one_copy_of_each_block(self, raw: Raw, peer: Peer) -> None:
        clients = [raw.register(peer.request.spec) for _ in range(8)]
        before = raw.await_quiet().tiers[0].pool.ready_bytes
        with ThreadPoolExecutor(8) as threads:
            statuses = list(threads.map(lambda each: each.write(PROMPT), clients))
        assert sum(status.count(YOURS) for status in statuses) == 8
        assert raw.await_quiet().tiers[0].pool.ready_bytes == before + 8 * SLOT_BYTES
        peer.assert_holds(PROMPT)

    def test_from_a_first_block_on(self, peer: Peer) -> None:
        assert peer.write(PROMPT, first_block=5) == [YOURS] * 3
        assert peer.write(PROMPT, first_block=8) == []
        assert peer.write(PROMPT) == [YOURS] * 5 + [PRESENT] * 3
        with refused(PRECONDITION, "first_block is 9", "8 blocks"):
            peer.begin(PROMPT, first_block=9)

    def test_another_prompts_hash_is_refused(self, peer: Peer) -> None:
        """A collision can neither replace a block nor hang others below it (cases 8)."""
        peer.write(PROMPT)
        other = peer.prompt(fork(PROMPT, 2), block_hashes=peer.chain(PROMPT).hashes)
        begun = peer.begin(PROMPT, prompt=other)
        assert list(begun.statuses) == [PRESENT] * 2 + [REFUSED] * 6
        assert peer.commit(begun.write_id, []) == 0
        assert peer.matched(PROMPT) == 128

    def test_no_room_is_said_and_not_waited_for(self) -> None:
        """When all is leased, a put is refused with a cause (cases 20)."""
        with sidecar(pool_bytes="2MiB") as server, dialled(server.address) as raw:
            peer = raw.register(spec("full", payload_bytes=100_000))
            held = tokens_of(24, seed=1)
            statuses = peer.write(held)
            fitted = statuses.count(YOURS)
            assert statuses == [YOURS] * fitted + [REFUSED] * (24 - fitted), "tails are refused first"
            assert 18 <= fitted <= 20, "2 MiB hold 20 blocks less the tables"
            lease = peer.hold(held[: fitted * 16], "r")
            began = time.monotonic()
            begun = peer.begin(tokens_of(3, seed=2))
            assert time.monotonic() - began < 1
            assert list(begun.statuses) == [REFUSED] * 3
            assert peer.commit(begun.write_id, []) == 0
            peer.release(lease)
            assert peer.write(tokens_of(3, seed=2)) == [YOURS] * 3

    def test_a_write_needs_tokens(self, peer: Peer) -> None:
        with refused(PRECONDITION, "token ids"):
            peer.begin(PROMPT, prompt=peer.hashes(PROMPT))

    def test_a_rank_that_nobody_registered(self, peer: Peer) -> None:
        with refused(INVALID, "0.2.0.1", "register that parallelism"):
            peer.begin(PROMPT, Shard(0, 2))


class TestEnds:
    def test_aborting_gives_everything_back(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        peer.send(begun.write_id, [b"".join(peer.payloads(PROMPT))])
        for _ in range(2):
            peer.abort(begun.write_id)
        peer.abort(987_654_321)
        with refused(PRECONDITION, str(begun.write_id), "begin another"):
            peer.commit(begun.write_id, checksums(peer.payloads(PROMPT)))
        peer.assert_unwritten(PROMPT)

    def test_committing_twice(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        peer.send(begun.write_id, [b"".join(payloads)])
        assert peer.commit(begun.write_id, checksums(payloads)) == 8
        with refused(PRECONDITION, str(begun.write_id), "begin another"):
            peer.commit(begun.write_id, checksums(payloads))
        peer.abort(begun.write_id)
        assert peer.matched(PROMPT) == 128

    @pytest.mark.parametrize("count", [0, 7, 9])
    def test_a_wrong_number_of_checkchecksums(self, peer: Peer, count: int) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        peer.send(begun.write_id, [b"".join(payloads)])
        with refused(PRECONDITION, f"{count} checksums for 8 blocks"):
            peer.commit(begun.write_id, (checksums(payloads) * 2)[:count])
        peer.assert_unwritten(PROMPT)

    def test_half_a_checksum(self, raw: Raw, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        with refused(INVALID, "checksums has 63 bytes", "8"):
            raw.blocks.CommitWrite(
                block_pb2.CommitWriteRequest(**peer.me, write_id=begun.write_id, checksums=b"\0" * 63)
            )
        peer.abort(begun.write_id)
        peer.assert_unwritten(PROMPT)

    def test_a_checksum_that_is_not_of_the_bytes(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        peer.send(begun.write_id, [b"".join(payloads)])
        wrong = checksums(payloads)
        wrong[3] ^= 1
        with refused(INVALID, "payload 3", f"{wrong[3]:#018x}", f"{wrong[3] ^ 1:#018x}", "write again"):
            peer.commit(begun.write_id, wrong)
        peer.assert_unwritten(PROMPT)

    def test_other_clients_cannot_end_a_write(self, raw: Raw, peer: Peer) -> None:
        other = raw.register(peer.request.spec)
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        other.abort(begun.write_id)
        with refused(PRECONDITION, str(begun.write_id)):
            other.send(begun.write_id, [b"".join(payloads)])
        with refused(PRECONDITION, str(begun.write_id)):
            other.commit(begun.write_id, checksums(payloads))
        peer.send(begun.write_id, [b"".join(payloads)])
        assert peer.commit(begun.write_id, checksums(payloads)) == 8


class TestStreamed:
    @pytest.mark.parametrize("size", [1, 100, 1024, 1500, 8 * 1024])
    def test_pieces_of_any_size(self, peer: Peer, size: int) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        assert peer.send(begun.write_id, [b"", *cut(b"".join(payloads), size), b""]) == 8 * 1024
        peer.commit(begun.write_id, checksums(payloads))
        lease = peer.hold(PROMPT, "r")
        assert peer.read(lease) == (b"".join(payloads), checksums(payloads))
        peer.release(lease)

    @pytest.mark.parametrize("missing", [1, 1024, 8 * 1024])
    def test_too_little(self, peer: Peer, missing: int) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        came = 8 * 1024 - missing
        with refused(INVALID, f"{came} bytes came", "8192", "1024"):
            peer.send(begun.write_id, [b"".join(payloads)[:came]])
        with refused(PRECONDITION, "WriteBlocks"):
            peer.commit(begun.write_id, checksums(payloads))
        peer.assert_unwritten(PROMPT)

    def test_too_much(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        with refused(INVALID, "a piece of 1 bytes came at 8192 of 8192"):
            peer.send(begun.write_id, [b"".join(payloads), b"x"])
        peer.abort(begun.write_id)
        peer.assert_unwritten(PROMPT)

    def test_too_little_may_be_sent_again_in_full(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        with refused(INVALID, "send all of them"):
            peer.send(begun.write_id, [b"\xff" * 5000])
        peer.send(begun.write_id, [b"".join(payloads)])
        assert peer.commit(begun.write_id, checksums(payloads)) == 8
        peer.assert_holds(PROMPT)

    def test_a_piece_beyond_the_limit(self, raw: Raw) -> None:
        peer = raw.register(spec("pieces", payload_bytes=900_000))
        prompt = tokens_of(2)
        begun = peer.begin(prompt)
        with refused(INVALID, f"a piece of {PIECE_BYTES + 1} bytes", str(PIECE_BYTES)):
            peer.send(begun.write_id, [b"\0" * (PIECE_BYTES + 1)])
        peer.abort(begun.write_id)

    def test_a_commit_before_the_bytes(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        with refused(PRECONDITION, "have not all come", "WriteBlocks"):
            peer.commit(begun.write_id, checksums(peer.payloads(PROMPT)))
        peer.abort(begun.write_id)
        peer.assert_unwritten(PROMPT)

    def test_the_bytes_are_sent_once(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        peer.send(begun.write_id, [b"".join(payloads)])
        with refused(PRECONDITION, "send them once"):
            peer.send(begun.write_id, [b"\0" * 8192])
        assert peer.commit(begun.write_id, checksums(payloads)) == 8

    def test_a_stream_of_nothing(self, raw: Raw) -> None:
        with refused(INVALID, "the stream is empty", "write_id"):
            raw.blocks.WriteBlocks(iter([]))

    def test_a_stream_that_is_given_up_leaves_the_write_open(self, raw: Raw, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)

        def half() -> Iterator[block_pb2.WriteBlocksRequest]:
            yield block_pb2.WriteBlocksRequest(**peer.me, write_id=begun.write_id, data=payloads[0])
            raise ConnectionAbortedError

        with pytest.raises(grpc.RpcError):
            raw.blocks.WriteBlocks(half())
        assert peer.matched(PROMPT) == 0

        def accepted() -> bool:
            try:
                return peer.send(begun.write_id, [b"".join(payloads)]) == 8192
            except grpc.RpcError:
                return False

        assert eventually(accepted), "the server never learned that the first stream has ended"
        assert peer.commit(begun.write_id, checksums(payloads)) == 8


def test_sizes_by_rank(raw: Raw) -> None:
    """What a rank writes is its own slice."""
    peer = raw.register(spec("ranks", payload_bytes=0), tp_size=2)
    assert peer.size_on(Shard(0, 2)) == peer.size_on(Shard(1, 2)) == 2 * 2 * 1 * 8 * 16 * 2
    with refused(INVALID, "0.1.0.1"):
        peer.begin(PROMPT, WHOLE)
    for rank in (0, 1):
        assert peer.write(PROMPT, Shard(rank, 2)) == [YOURS] * 8
    peer.release(peer.hold(PROMPT, "r"))
