"""Leases of a sidecar: what is promised, to whom, until when, and what is counted for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore.block import WHOLE, Shard
from kvstore.tiers.pool_view import PoolView
from kvstore.v1 import block_pb2, types_pb2
from tests.support.observed import Counted
from tests.support.sidecars import sidecar
from tests.support.stubs import (
    HOST,
    YOURS,
    Peer,
    Raw,
    checksum,
    cut,
    dialled,
    fork,
    mapping,
    refused,
    spec,
    tokens_of,
)
from tests.support.valkey import eventually

PROMPT = tokens_of(8, tail=3)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def raw() -> Iterator[Raw]:
    with sidecar() as server, dialled(server.address) as raw:
        yield raw


@pytest.fixture
def peer(raw: Raw, request: pytest.FixtureRequest) -> Peer:
    """A client of a namespace of its own, whose one prompt is resident."""
    peer = raw.register(spec(request.node.name))
    peer.write(PROMPT)
    return peer


@pytest.fixture(scope="module")
def brief() -> Iterator[Raw]:
    """A server whose leases last a second, with room for 30 blocks of ``big_spec``."""
    settings = {"lease_seconds": 1, "pool_bytes": "2MiB"}
    with sidecar(**settings) as server, dialled(server.address) as raw:
        yield raw


def big_spec(model: str) -> block_pb2.NamespaceSpec:
    return spec(model, payload_bytes=60_000)


class TestAcquire:
    def test_the_resident_run_is_promised(self, peer: Peer) -> None:
        answer = peer.acquire(PROMPT, "r")
        assert (answer.blocks, answer.pending, answer.cause) == (8, False, "")
        assert [(each.tier, each.blocks) for each in answer.tiers] == [(HOST, 8)]
        assert not answer.shards, "a client that streams has no use for places"
        data, sums = peer.read(answer.lease_id)
        assert data == b"".join(peer.payloads(PROMPT))
        assert sums == [checksum(each) for each in peer.payloads(PROMPT)]
        peer.release(answer.lease_id)

    def test_part_of_it(self, peer: Peer) -> None:
        answer = peer.acquire(fork(PROMPT, 5), "r")
        assert (answer.blocks, answer.pending, answer.cause) == (5, False, "cold")
        peer.release(answer.lease_id)

    def test_asking_twice_is_asking_once(self, raw: Raw, peer: Peer) -> None:
        counted = Counted(raw)
        first, second = peer.acquire(PROMPT, "r"), peer.acquire(PROMPT, "r")
        assert first == second
        assert (raw.status().leases, raw.status().clients) == (1, 1)
        assert counted.tokens == (0, {}, {}), "a request is counted when its lease is settled"
        peer.release(first.lease_id)
        assert counted.tokens == (131, {"host": 128}, {"tail": 3})
        assert (raw.status().leases, raw.status().clients) == (0, 0)

    def test_the_same_id_for_another_prompt(self, peer: Peer) -> None:
        lease = peer.hold(PROMPT, "r")
        with refused(PRECONDITION, "'r'", "another prompt", "another request id"):
            peer.acquire(fork(PROMPT, 5), "r")
        assert peer.renew(lease) == []
        peer.release(lease)

    def test_a_request_without_an_id(self, peer: Peer) -> None:
        with refused(INVALID, "request_id is empty"):
            peer.acquire(PROMPT, "")

    def test_a_client_that_streams_has_to_send_tokens(self, raw: Raw, peer: Peer) -> None:
        """The server compares for it, and hashes are no proof."""
        with refused(INVALID, "token ids"):
            peer.acquire(PROMPT, "r", prompt=peer.hashes(PROMPT))
        assert raw.status().leases == 0

    @pytest.mark.parametrize("seconds", [-1.0, 1e9, float("nan")])
    def test_a_wait_that_makes_no_sense(self, peer: Peer, seconds: float) -> None:
        with refused(INVALID, "wait_seconds", "60"):
            peer.acquire(PROMPT, "r", wait_seconds=seconds)

    def test_hints_are_taken(self, raw: Raw, peer: Peer) -> None:
        hints = block_pb2.Hints(ended=True, priority=-3, idle_seconds=1.5)
        peer.release(peer.hold(PROMPT, "r", hints=hints))
        with refused(INVALID, "idle_seconds"):
            peer.acquire(PROMPT, "s", hints=block_pb2.Hints(idle_seconds=-1))

    def test_ranks_agree_on_the_shortest_run(self, raw: Raw, request: pytest.FixtureRequest) -> None:
        """TP ranks never disagree: a hit is the minimum over ranks (cases 47)."""
        peer = raw.register(spec(request.node.name), tp_size=2)
        left, right = Shard(0, 2), Shard(1, 2)
        peer.write(PROMPT, left)
        missing = peer.acquire(PROMPT, "none")
        assert (missing.blocks, missing.cause, missing.lease_id) == (0, "cold", 0)
        peer.write(PROMPT[:80], right)
        answer = peer.acquire(PROMPT, "some")
        assert (answer.blocks, answer.cause) == (5, "cold")
        assert [(each.tier, each.blocks) for each in answer.tiers] == [(HOST, 5)]
        for shard in (left, right):
            data, _ = peer.read(answer.lease_id, shard=types_pb2.Shard(**shard._asdict()))
            assert data == b"".join(peer.payloads(PROMPT, shard)[:5])
        peer.release(answer.lease_id)
        peer.write(PROMPT, right)
        peer.release(peer.hold(PROMPT, "all"))

    def test_pipeline_ranks_have_the_layers_that_they_compute(
        self, raw: Raw, request: pytest.FixtureRequest
    ) -> None:
        """Sizes are told with tp ranks of pp rank 0 first."""
        peer = raw.register(spec(request.node.name, payload_bytes=0, layers=3), tp_size=2, pp_size=2)
        two_layers, one_layer = (layers * 2 * 1 * 8 * 16 * 2 for layers in (2, 1))
        assert list(peer.answer.payload_bytes) == [two_layers, two_layers, one_layer, one_layer]
        ranks = [Shard(tp, 2, pp, 2) for pp in (0, 1) for tp in (0, 1)]
        for blocks, shard in zip((8, 7, 6, 5), ranks, strict=True):
            peer.write(PROMPT[: blocks * 16], shard)
        answer = peer.acquire(PROMPT, "r")
        assert answer.blocks == 5
        for shard in ranks:
            data, _ = peer.read(answer.lease_id, shard=types_pb2.Shard(**shard._asdict()))
            assert data == b"".join(peer.payloads(PROMPT, shard)[:5])
        peer.release(answer.lease_id)


class TestWhoAsks:
    def test_an_epoch_of_another_server(self, peer: Peer) -> None:
        with refused(PRECONDITION, "12345", str(peer.answer.epoch), "register again"):
            peer.raw.blocks.Renew(block_pb2.RenewRequest(client=peer.request.client, epoch=12345))

    def test_a_client_that_has_not_registered(self, peer: Peer) -> None:
        with refused(PRECONDITION, "client 999999", "register"):
            peer.raw.blocks.Renew(block_pb2.RenewRequest(client=999_999, epoch=peer.answer.epoch))

    @pytest.mark.parametrize("number", [0, 1 << 31, (1 << 64) - 1])
    def test_a_number_that_no_client_has(self, raw: Raw, number: int) -> None:
        with refused(INVALID, str(number), str((1 << 31) - 1)):
            raw.register(spec("numbers"), client=number)

    def test_another_version_of_the_protocol(self, raw: Raw) -> None:
        with refused(PRECONDITION, "version 2", "1"):
            raw.register(spec("versions"), protocol_version=2)

    def test_leases_are_their_owners_alone(self, raw: Raw, peer: Peer) -> None:
        other = raw.register(peer.request.spec)
        lease = peer.hold(PROMPT, "r")
        assert other.renew(lease) == [lease]
        other.release(lease)
        with refused(NOT_FOUND, str(lease)):
            other.read(lease)
        assert peer.renew(lease) == []
        theirs = other.hold(PROMPT, "r")
        assert theirs != lease, "request ids of two clients are two requests"
        assert raw.status().clients == 2
        peer.release(lease)
        other.release(theirs)

    def test_a_restart_ends_every_lease(self) -> None:
        with sidecar() as server:
            with dialled(server.address) as raw:
                peer = raw.register(spec("r"))
                peer.write(PROMPT)
                lease = peer.hold(PROMPT, "r")
            server.restart()
            with dialled(server.address) as raw:
                stale = Peer(raw, peer.request, peer.answer)
                for call in (
                    lambda: stale.acquire(PROMPT, "r"),
                    lambda: stale.renew(lease),
                    lambda: stale.release(lease),
                    lambda: stale.read(lease),
                    lambda: stale.begin(PROMPT),
                ):
                    with refused(PRECONDITION, "epoch", "register again"):
                        call()
                again = stale.again()
                answer = again.acquire(PROMPT, "r")
                assert answer.blocks == 8
                data, _ = again.read(answer.lease_id)
                assert data == b"".join(again.payloads(PROMPT))
                again.release(answer.lease_id)


class TestUntilWhen:
    def test_renewed_leases_stay_and_others_end_and_count_once(self, brief: Raw) -> None:
        peer = brief.register(spec("renewed"))
        peer.write(PROMPT)
        counted = Counted(brief)
        kept, left = peer.hold(PROMPT, "kept"), peer.hold(PROMPT, "left")
        for _ in range(6):
            time.sleep(0.3)
            lost = peer.renew(kept)
        assert lost == []
        assert peer.renew(kept, left, 999) == [left, 999]
        assert counted.tokens == (131, {"host": 128}, {"tail": 3})
        assert brief.status().leases == 1
        peer.release(left)
        peer.release(kept)
        assert counted.tokens == (262, {"host": 256}, {"tail": 6})

    def test_who_acquires_again_gets_what_is_still_there(self, brief: Raw) -> None:
        """A lease that ran out is renewed if its blocks are there, never a failure (cases 16)."""
        peer = brief.register(spec("again"))
        peer.write(PROMPT)
        lost = peer.hold(PROMPT, "r")
        assert eventually(lambda: peer.renew(lost) == [lost] if brief.status().leases == 0 else False)
        with refused(NOT_FOUND, str(lost), "acquire again"):
            peer.read(lost)
        lease = peer.hold(PROMPT, "r")
        assert lease != lost
        peer.release(lease)

    def test_releasing_twice_counts_once(self, raw: Raw, peer: Peer) -> None:
        counted = Counted(raw)
        lease = peer.hold(PROMPT, "r")
        peer.release(lease)
        peer.release(lease)
        peer.release(12_345_678)
        assert counted.tokens == (131, {"host": 128}, {"tail": 3})

    def test_leased_blocks_outlive_any_pressure(self, brief: Raw) -> None:
        """What acquire promised stays readable until the lease ends (cases 15)."""
        peer = brief.register(big_spec("pressure"))
        prompt = tokens_of(10, seed=50)
        peer.write(prompt)
        lease = peer.hold(prompt, "r")
        for seed in range(51, 57):
            assert peer.write(tokens_of(10, seed=seed)) == [YOURS] * 10
            peer.renew(lease)
        data, _ = peer.read(lease)
        assert data == b"".join(peer.payloads(prompt))
        assert brief.pool().leased_bytes == 10 * 60_032
        peer.release(lease)
        assert brief.pool().leased_bytes == 0
        for seed in range(57, 60):
            peer.write(tokens_of(10, seed=seed))
        assert peer.matched(prompt) == 0, "and not any longer"


class TestCounts:
    @pytest.mark.parametrize(
        ("used", "hit", "stale"), [(None, 128, 0), (8, 128, 0), (5, 80, 48), (0, 0, 128), (99, 128, 0)]
    )
    def test_used_blocks_are_hits_and_others_are_stale(
        self, raw: Raw, peer: Peer, used: int | None, hit: int, stale: int
    ) -> None:
        counted = Counted(raw)
        peer.release(peer.hold(PROMPT, "r"), used)
        hits = {"host": hit} if hit else {}
        misses = {"tail": 3} | ({"stale": stale} if stale else {})
        assert counted.tokens == (131, hits, misses)

    def test_a_complete_miss_is_counted_when_it_is_asked_and_once(self, raw: Raw, peer: Peer) -> None:
        counted = Counted(raw)
        cold = tokens_of(4, seed=5)
        for _ in range(3):
            answer = peer.acquire(cold, "r")
            assert (answer.lease_id, answer.blocks, answer.pending, answer.cause) == (0, 0, False, "cold")
        assert counted.tokens == (64, {}, {"cold": 64})
        peer.acquire(cold, "another")
        assert counted.tokens == (128, {}, {"cold": 128})
        assert raw.status().leases == 0

    def test_a_prompt_without_a_whole_block_is_all_tail(self, raw: Raw, peer: Peer) -> None:
        counted = Counted(raw)
        answer = peer.acquire(tokens_of(0, tail=7), "r")
        assert (answer.lease_id, answer.blocks, answer.cause) == (0, 0, "")
        assert counted.tokens == (7, {}, {"tail": 7})

    def test_a_workload_adds_up_exactly(self, raw: Raw, request: pytest.FixtureRequest) -> None:
        """A scripted workload gives exact counter values; hits and misses are what was asked (cases 43)."""
        peer = raw.register(spec(request.node.name))
        counted, before = Counted(raw), raw.status().namespaces
        hits = misses = tail = 0
        for turn in range(1, 11):
            prompt = tokens_of(turn * 3, seed=77, tail=turn)
            answer = peer.acquire(prompt, f"turn-{turn}")
            assert answer.blocks == (turn - 1) * 3
            peer.write(prompt, first_block=answer.blocks)
            peer.release(answer.lease_id, answer.blocks)
            hits, misses, tail = hits + answer.blocks * 16, misses + 3 * 16, tail + turn
        assert counted.tokens == (hits + misses + tail, {"host": hits}, {"cold": misses, "tail": tail})
        status = raw.status()
        assert (status.namespaces, status.leases, status.writes) == (before, 0, 0)
        assert status.asked_tokens == sum(status.hit_tokens.values()) + sum(status.miss_tokens.values())


class TestMapped:
    @pytest.fixture
    def mapped(self, peer: Peer) -> Peer:
        return peer.raw.register(peer.request.spec, can_map=True)

    def test_places_in_the_pool_file_hold_the_bytes(self, peer: Peer, mapped: Peer) -> None:
        with mapping(mapped) as view:
            answer = mapped.acquire(PROMPT, "r", prompt=mapped.hashes(PROMPT))
            [places] = answer.shards
            offsets = np.frombuffer(places.offsets, dtype="<i8")
            generations = np.frombuffer(places.generations, dtype="<u8")
            rows = mapped.chain(PROMPT).rows(WHOLE)
            assert view.verify(rows, offsets, generations) == 8
            found = [each.tobytes() for each in view.views(offsets, mapped.size_on(WHOLE))]
            assert found == mapped.payloads(PROMPT)
            assert mapped.raw.status().leases == 1
            mapped.release(answer.lease_id, 8)

    def test_what_a_client_that_is_gone_held_is_let_go(self, raw: Raw, mapped: Peer) -> None:
        """Its file lock is gone with it: the server need not wait for the lease to run out (cases 18)."""
        path, epoch, number = Path(mapped.answer.pool_path), mapped.answer.epoch, mapped.request.client
        view = PoolView(path, epoch, number)
        counted = Counted(raw)
        mapped.hold(PROMPT, "r")
        begun = mapped.begin(fork(PROMPT, 2))
        time.sleep(0.6)
        assert (raw.status().leases, raw.status().writes) == (1, 1), "who lives keeps what it holds"
        view.close()
        status = raw.await_quiet()
        assert (status.leases, status.writes, status.clients) == (0, 0, 0)
        assert counted.tokens[0] == 131
        with refused(PRECONDITION, "register"):
            mapped.commit(begun.write_id, [])


def test_a_byte_that_changed_while_no_server_ran_is_found_by_its_first_reader() -> None:
    """Who reads says how far the checksums held; the block at which they did not is removed."""
    with sidecar() as server:
        with dialled(server.address) as raw:
            raw.register(spec("flipped")).write(PROMPT)
        server.restart()
        with dialled(server.address) as raw:
            mapped = raw.register(spec("flipped"), can_map=True)
            with mapping(mapped) as view:
                found = mapped.acquire(PROMPT, "where")
                offsets = np.frombuffer(found.shards[0].offsets, dtype="<i8")
                assert view.unverified(offsets).tolist() == list(range(8)), "nobody has read them since"
                view.memory[offsets[3] + 100] ^= 1
                mapped.release(found.lease_id, 0)
            peer = raw.register(spec("flipped"))
            counted = Counted(raw)
            lease = peer.hold(PROMPT, "r")
            data, sums = peer.read(lease)
            right = [checksum(piece) == known for piece, known in zip(cut(data, 1024), sums, strict=True)]
            assert right == [True] * 3 + [False] + [True] * 4
            peer.release(lease, 3)
            assert counted.tokens == (131, {"host": 48}, {"stale": 80, "tail": 3})
            assert peer.matched(PROMPT) == 48
            peer.write(PROMPT)
            peer.assert_holds(PROMPT)
