"""Payload streams of a sidecar: every byte, and what becomes of streams that stall or are given up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.block import Shard
from kvstore.v1 import block_pb2, types_pb2
from tests.support.sidecars import sidecar
from tests.support.stubs import PIECE_BYTES, YOURS, Peer, Raw, checksum, dialled, refused, spec, tokens_of
from tests.support.valkey import eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
STREAMS = 3
BLOCKS = 16
PAYLOAD = 1_500_000
"""16 of these are more than HTTP/2 buffers between a server and a client that does not read."""


@pytest.fixture(scope="module")
def raw() -> Iterator[Raw]:
    settings = {
        "pool_bytes": "64MiB",
        "extent_bytes": "32MiB",
        "client_streams": STREAMS,
        "lease_seconds": 1.5,
    }
    with sidecar(**settings) as server, dialled(server.address) as raw:
        yield raw


@pytest.fixture(scope="module")
def big(raw: Raw) -> Peer:
    """A client whose one prompt has 24 MB of payloads."""
    peer = raw.register(spec("big", payload_bytes=PAYLOAD))
    assert peer.write(tokens_of(BLOCKS)) == [YOURS] * BLOCKS
    return peer


@pytest.fixture
def lease(big: Peer, request: pytest.FixtureRequest) -> Iterator[int]:
    lease = big.hold(tokens_of(BLOCKS), request.node.name)
    yield lease
    big.release(lease)


def stream(peer: Peer, lease: int) -> Iterator[block_pb2.ReadBlocksResponse]:
    """A stream that is read piece by piece; a grpc.Call too."""
    request = block_pb2.ReadBlocksRequest(**peer.me, lease_id=lease)
    pieces: Iterator[block_pb2.ReadBlocksResponse] = peer.raw.blocks.ReadBlocks(request)
    return pieces


class TestBytes:
    def test_all_of_a_lease(self, big: Peer, lease: int) -> None:
        payloads = big.payloads(tokens_of(BLOCKS))
        data, sums = big.read(lease)
        assert data == b"".join(payloads)
        assert sums == [checksum(each) for each in payloads]

    @pytest.mark.parametrize(("first", "count", "stop"), [(0, 1, 1), (3, 2, 5), (15, 1, 16), (14, 0, 16)])
    def test_part_of_a_lease(self, big: Peer, lease: int, first: int, count: int, stop: int) -> None:
        payloads = big.payloads(tokens_of(BLOCKS))[first:stop]
        assert big.read(lease, first_block=first, blocks=count) == (
            b"".join(payloads),
            [checksum(each) for each in payloads],
        )

    def test_none_of_it(self, big: Peer, lease: int) -> None:
        assert big.read(lease, first_block=BLOCKS) == (b"", [])

    @pytest.mark.parametrize(("first", "count"), [(0, 17), (17, 0), (16, 1), ((1 << 32) - 1, (1 << 32) - 1)])
    def test_more_than_there_is(self, big: Peer, lease: int, first: int, count: int) -> None:
        with refused(INVALID, str(first), "16 blocks", "correct the range"):
            big.read(lease, first_block=first, blocks=count)

    def test_a_rank_that_the_lease_is_not_on(self, big: Peer, lease: int) -> None:
        with refused(INVALID, "1.2.0.1", "0.1.0.1"):
            big.read(lease, shard=types_pb2.Shard(tp_rank=1, tp_size=2))

    def test_pieces_are_as_large_as_they_may_be(self, big: Peer, lease: int) -> None:
        """So a stream of many small blocks is not many small messages."""
        sizes = [len(piece.data) for piece in stream(big, lease)]
        whole, rest = divmod(BLOCKS * PAYLOAD, PIECE_BYTES)
        assert sizes == [PIECE_BYTES] * whole + [rest]

    def test_small_blocks_share_a_piece(self, raw: Raw) -> None:
        peer = raw.register(spec("small", payload_bytes=1000), tp_size=2)
        prompt, shard = tokens_of(40), Shard(1, 2)
        peer.write(prompt, Shard(0, 2))
        peer.write(prompt, shard)
        lease = peer.hold(prompt, "r")
        request = block_pb2.ReadBlocksRequest(
            **peer.me, lease_id=lease, shard=types_pb2.Shard(**shard._asdict())
        )
        [piece] = raw.blocks.ReadBlocks(request)
        assert piece.data == b"".join(peer.payloads(prompt, shard))
        peer.release(lease)

    def test_a_lease_that_is_over(self, big: Peer) -> None:
        lease = big.hold(tokens_of(BLOCKS), "over")
        big.release(lease)
        with refused(NOT_FOUND, str(lease), "acquire again"):
            big.read(lease)

    def test_several_at_once(self, big: Peer, lease: int) -> None:
        expected = b"".join(big.payloads(tokens_of(BLOCKS)))
        with ThreadPoolExecutor(STREAMS) as threads:
            found = list(threads.map(lambda _: big.read(lease)[0], range(STREAMS)))
        assert found == [expected] * STREAMS


class TestGivenUp:
    def test_streams_that_are_cancelled_are_no_longer_counted(self, big: Peer, lease: int) -> None:
        """An abandoned stream costs the others nothing (cases 36), and its own client no stream for ever."""
        for _ in range(4):
            pieces = [stream(big, lease) for _ in range(STREAMS)]
            for each in pieces:
                assert len(next(each).data) == PIECE_BYTES
                each.cancel()  # type: ignore[attr-defined]

            def can_read() -> bool:
                big.renew(lease)
                try:
                    return len(big.read(lease, blocks=1)[0]) == PAYLOAD
                except grpc.RpcError:
                    return False

            assert eventually(can_read), "a cancelled stream is still counted"

    def test_a_connection_that_breaks_ends_its_streams(self, raw: Raw, big: Peer, lease: int) -> None:
        target = raw.status().pool_path.replace("/pool", "/socket")
        with dialled(f"unix:{target}") as other:
            for _ in range(STREAMS):
                next(stream(Peer(other, big.request, big.answer), lease))
        assert eventually(lambda: len(big.read(lease, blocks=1)[0]) == PAYLOAD)

    def test_one_beyond_the_limit_is_refused(self, big: Peer, lease: int) -> None:
        pieces = [stream(big, lease) for _ in range(STREAMS)]
        for each in pieces:
            next(each)
        with refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"has {STREAMS} streams",
            f"at most {STREAMS}",
            "client_streams",
        ):
            big.read(lease)
        for each in pieces:
            big.renew(lease)
            assert sum(len(piece.data) for piece in each) == BLOCKS * PAYLOAD - PIECE_BYTES
        assert len(big.read(lease)[0]) == BLOCKS * PAYLOAD

    def test_who_reads_too_slowly_loses_the_lease_and_is_told(self, raw: Raw, big: Peer) -> None:
        """It holds nothing longer than a lease does, gets no wrong byte, and hinders nobody."""
        expected = b"".join(big.payloads(tokens_of(BLOCKS)))
        lease = big.hold(tokens_of(BLOCKS), "stalls")
        pieces = stream(big, lease)
        data = next(pieces).data
        slowest, deadline = 0.0, time.monotonic() + 2.5
        while time.monotonic() < deadline:
            began = time.monotonic()
            assert big.matched(tokens_of(BLOCKS)) == BLOCKS * 16
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.05)
        assert slowest < 1, "a look-up waited for somebody's stream"
        assert raw.status().leases == 0
        with refused(NOT_FOUND, str(lease), "renew it in time"):
            for piece in pieces:
                data += piece.data
        assert PIECE_BYTES <= len(data) < len(expected)
        assert data == expected[: len(data)]

    def test_a_lease_that_is_renewed_outlives_a_slow_stream(self, big: Peer, lease: int) -> None:
        pieces = stream(big, lease)
        data = next(pieces).data
        for _ in range(5):
            time.sleep(0.4)
            assert big.renew(lease) == []
        assert data + b"".join(piece.data for piece in pieces) == b"".join(big.payloads(tokens_of(BLOCKS)))

    def test_writers_that_stall_hold_streams_of_their_own_only(self, raw: Raw, big: Peer, lease: int) -> None:
        """Streams of one client count for that client."""
        writer = raw.register(spec("stalled", payload_bytes=PAYLOAD))
        begun = writer.begin(tokens_of(2))
        over: list[bool] = []

        def stalled() -> Iterator[block_pb2.WriteBlocksRequest]:
            yield block_pb2.WriteBlocksRequest(**writer.me, write_id=begun.write_id, data=b"\xee" * 1000)
            while not over:
                time.sleep(0.02)

        with ThreadPoolExecutor(1) as thread:
            stuck = thread.submit(raw.blocks.WriteBlocks, stalled())
            for _ in range(3):
                assert len(big.read(lease)[0]) == BLOCKS * PAYLOAD
                big.renew(lease)
            over.append(True)
            with refused(INVALID, "1000 bytes came"):
                stuck.result(10)
        writer.abort(begun.write_id)
