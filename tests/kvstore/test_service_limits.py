"""Limits of a sidecar: each is named with value and fix, and one client's excess costs the others nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.v1 import block_pb2, lookup_pb2, types_pb2
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import YOURS, Peer, Raw, Tokens, dialled, refused, spec, tokens_of

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with sidecar(client_leases=3, client_staged_bytes="8KiB") as server:
        yield server


@pytest.fixture(scope="module")
def raw(server: Sidecar) -> Iterator[Raw]:
    with dialled(server.address) as raw:
        yield raw


@pytest.fixture
def peer(raw: Raw, request: pytest.FixtureRequest) -> Peer:
    return raw.register(spec(request.node.name))


class TestHeld:
    def test_leases(self, raw: Raw, peer: Peer) -> None:
        peer.write(tokens_of(2))
        leases = [peer.hold(tokens_of(2), f"r{at}") for at in range(3)]
        with refused(EXHAUSTED, f"client {peer.request.client}", "holds 3", "at most 3", "client_leases"):
            peer.acquire(tokens_of(2), "r3")
        assert peer.hold(tokens_of(2), "r0") == leases[0], "what it has already is not another"
        other = raw.register(peer.request.spec)
        other.release(other.hold(tokens_of(2), "r3"))
        peer.release(leases.pop())
        leases.append(peer.hold(tokens_of(2), "r3"))
        for lease in leases:
            peer.release(lease)
        assert raw.await_quiet().leases == 0

    def test_complete_misses_are_no_leases(self, peer: Peer) -> None:
        for at in range(10):
            assert peer.acquire(tokens_of(2, seed=3), f"r{at}").lease_id == 0

    def test_staged_bytes(self, raw: Raw, peer: Peer) -> None:
        first = peer.begin(tokens_of(5))
        with refused(EXHAUSTED, "5120 bytes staged", "4096 more", "at most 8192", "client_staged_bytes"):
            peer.begin(tokens_of(4, seed=1))
        second = peer.begin(tokens_of(3, seed=1))
        other = raw.register(peer.request.spec)
        other.abort(other.begin(tokens_of(8, seed=2)).write_id)
        peer.abort(first.write_id)
        third = peer.begin(tokens_of(5, seed=3))
        for begun in (second, third):
            peer.abort(begun.write_id)
        assert peer.write(tokens_of(8, seed=4)) == [YOURS] * 8
        raw.await_quiet()

    def test_blocks_that_are_there_already_stage_nothing(self, peer: Peer) -> None:
        """A long conversation is written again from block 0 at each turn: only what is new takes room."""
        longer = tokens_of(12)
        peer.write(longer[: 8 * 16])
        begun = peer.begin(longer)
        assert list(begun.statuses).count(YOURS) == 4
        peer.abort(begun.write_id)


class TestMessages:
    @pytest.mark.parametrize("extra", [1, 1 << 20])
    def test_a_message_beyond_16_mib(self, raw: Raw, peer: Peer, extra: int) -> None:
        prompt = types_pb2.Prompt(namespace=peer.answer.namespace, token_ids=bytes((16 << 20) + extra))
        with refused(EXHAUSTED, str(16 << 20)):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))
        assert peer.matched(tokens_of(1)) == 0, "the connection serves on"

    def test_compression_does_not_lift_the_limit(self, raw: Raw, peer: Peer) -> None:
        prompt = types_pb2.Prompt(namespace=peer.answer.namespace, token_ids=bytes(40 << 20))
        with refused(EXHAUSTED, "larger than max"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt), compression=grpc.Compression.Gzip)

    def test_a_message_of_almost_16_mib(self, raw: Raw, peer: Peer) -> None:
        tokens = tokens_of(1000 * 250, block_size=16)
        answer = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=peer.prompt(tokens)))
        assert (answer.blocks_read, answer.matched_tokens) == (250_000, 0)


def long_spec(number: int, **fields: Any) -> block_pb2.NamespaceSpec:
    """One whose description takes more than a kilobyte."""
    texts = ("model", "weights_id", "kv_dtype", "layout", "adapter")
    return spec(**{name: f"{name}-{number}-".ljust(250, "x") for name in texts}, **fields)


class TestNamespaces:
    """Names in the pool file are for ever, and its room for them is everybody's."""

    def test_those_beyond_the_limit_leave_nothing_behind(self) -> None:
        with sidecar() as server, dialled(server.address) as raw:
            for at in range(1024):
                raw.register(spec(f"model-{at}"))
            for at in range(700):
                with refused(EXHAUSTED, "1024 namespaces", "at most 1024"):
                    raw.register(long_spec(at))
            assert raw.status().namespaces == 1024
            raw.register(spec("model-7"))
            with refused(grpc.StatusCode.NOT_FOUND, "'no such model'"):
                raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt={"model": "no such model"}))
            server.restart()
            with dialled(server.address) as again:
                again.register(spec("another"))

    def test_those_that_do_not_fit_leave_nothing_behind(self) -> None:
        with sidecar() as server, dialled(server.address) as raw:
            for at in range(760):
                with refused(grpc.StatusCode.FAILED_PRECONDITION, "extent_bytes"):
                    raw.register(long_spec(at, payload_bytes=1 << 30))
            for at in range(760):
                with refused(grpc.StatusCode.INVALID_ARGUMENT, "client"):
                    raw.register(long_spec(at), client=0)
            assert raw.status().namespaces == 0
            raw.register(spec("small"))

    def test_names_of_any_length(self, raw: Raw) -> None:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "model", "500000 bytes"):
            raw.register(spec("m" * 500_000))

    def test_a_block_that_no_extent_can_hold(self, raw: Raw) -> None:
        before = raw.status().namespaces
        with refused(grpc.StatusCode.FAILED_PRECONDITION, str(1 << 30), str(1 << 20), "extent_bytes"):
            raw.register(spec("huge", payload_bytes=1 << 30))
        assert raw.status().namespaces == before

    def test_ways_of_cutting_one_model_are_bounded(self, raw: Raw) -> None:
        """Each takes memory for all of its ranks."""
        with refused(EXHAUSTED, "at most"):
            for tp_size in range(1, 200):
                raw.register(spec("cut"), tp_size=tp_size)
        raw.register(spec("cut"), tp_size=1)

    def test_more_ranks_than_any_model_is_cut_into(self, raw: Raw) -> None:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "1025", "1024"):
            raw.register(spec("ranks"), tp_size=1025)


class TestOneClientCostsTheOthersNothing:
    """Whatever one asks for, others are answered meanwhile (cases 36)."""

    def assert_fair(self, server: Sidecar, call: Callable[[], object]) -> None:
        """Another client's look-ups are answered while ``call`` is served, if it is not refused."""
        slowest, began = 0.0, time.monotonic()
        with dialled(server.address) as raw, ThreadPoolExecutor(1) as thread:
            other = raw.register(spec("bystander"))
            running = thread.submit(call)
            while not running.done():
                asked = time.monotonic()
                other.matched(tokens_of(4))
                slowest = max(slowest, time.monotonic() - asked)
            if running.exception() is not None:
                code = running.exception().code()  # type: ignore[union-attr]
                assert code in (EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        seconds = time.monotonic() - began
        assert slowest < max(0.4, seconds / 2), f"one look-up took {slowest:.2f} of {seconds:.2f} s"

    def long_prompt(self, blocks: int) -> Tokens:
        return tokens_of(blocks, seed=30)

    def test_explaining_a_very_long_prompt(self, server: Sidecar, peer: Peer) -> None:
        prompt = self.long_prompt(60_000)
        self.assert_fair(server, lambda: peer.explain(prompt))

    def test_many_images_over_many_blocks(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        tokens = self.long_prompt(1500)
        item = types_pb2.ContentItem(digest=b"d" * 32, start=0, length=len(tokens))
        prompt = peer.prompt(tokens, extras=types_pb2.Extras(items=[item] * 1500))
        request = lookup_pb2.LookupRequest(prompt=prompt)
        self.assert_fair(server, lambda: raw.lookup.Lookup(request))

    def test_many_ranks_over_many_blocks(self, server: Sidecar, raw: Raw) -> None:
        peer = raw.register(spec("wide", block_size=1, payload_bytes=64), tp_size=1024)
        prompt = self.long_prompt(1500)
        self.assert_fair(server, lambda: peer.look_up(prompt))

    def test_a_large_batch(self, server: Sidecar, raw: Raw, peer: Peer) -> None:
        one = lookup_pb2.LookupRequest(prompt=peer.prompt(tokens_of(250)))
        batch = lookup_pb2.BatchLookupRequest(requests=[one] * 1000)
        self.assert_fair(server, lambda: raw.lookup.BatchLookup(batch))
