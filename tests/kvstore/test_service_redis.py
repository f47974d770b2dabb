"""A sidecar with a redis tier: look-ups in both tiers, and requests that wait for redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.v1 import admin_pb2, block_pb2
from tests.support.observed import Counted, report, tier_tokens
from tests.support.sidecars import sidecar
from tests.support.stubs import HOST, REDIS, Peer, Raw, dialled, refused, spec, tokens_of
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, valkey

__all__ = ["shared_valkey", "valkey"]

PROMPT = tokens_of(8, tail=3)
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def tiers(shared_valkey: ValkeyServer) -> Iterator[Raw]:
    """A server that gives its redis ten seconds for an answer."""
    settings = {"redis_url": shared_valkey.url, "redis_probe_seconds": 10, "redis_acquire_seconds": 10}
    with sidecar(**settings) as server, dialled(server.address) as raw:
        yield raw


@pytest.fixture(scope="module")
def hasty(shared_valkey: ValkeyServer) -> Iterator[Raw]:
    """A server that gives it half a second."""
    settings = {"redis_url": shared_valkey.url, "redis_probe_seconds": 0.5}
    with sidecar(**settings) as server, dialled(server.address) as raw:
        yield raw


@pytest.mark.redis
class TestLookups:
    @pytest.fixture
    def peer(self, hasty: Raw, valkey: ValkeyServer, request: pytest.FixtureRequest) -> Peer:
        """Of a namespace whose one prompt is in memory and in redis."""
        peer = hasty.register(spec(request.node.name))
        peer.write(PROMPT)
        assert eventually(lambda: valkey.client.dbsize() == 8)
        return peer

    def forget(self, peer: Peer) -> None:
        request = admin_pb2.ClearRequest(namespace=peer.answer.namespace)
        assert peer.raw.admin.Clear(request).blocks == 8

    def test_memory_is_asked_first_and_redis_only_for_the_rest(
        self, peer: Peer, valkey: ValkeyServer
    ) -> None:
        valkey.client.config_resetstat()
        assert tier_tokens(peer.look_up(PROMPT)) == {HOST: (128, 128)}
        assert valkey.calls()["keys"] == 0
        longer = tokens_of(10)
        longer[:128] = PROMPT[:128]
        assert tier_tokens(peer.look_up(longer)) == {HOST: (128, 128)}

    def test_what_only_redis_has_is_matched_and_not_verified(self, peer: Peer) -> None:
        self.forget(peer)
        answer = peer.look_up(PROMPT)
        assert (answer.matched_tokens, answer.verified_tokens) == (128, 0)
        assert tier_tokens(answer) == {HOST: (0, 0), REDIS: (128, None)}
        assert peer.raw.status().leases == 0
        assert report(peer, PROMPT) == [([REDIS], "", False)] * 8, "a probe brings nothing into memory"
        assert tier_tokens(peer.look_up(PROMPT, tiers=[HOST])) == {HOST: (0, 0)}

    def test_a_run_that_begins_in_memory_and_goes_on_in_redis(self, peer: Peer) -> None:
        self.forget(peer)
        peer.write(PROMPT[: 3 * 16])
        answer = peer.look_up(PROMPT)
        assert (answer.matched_tokens, answer.verified_tokens) == (128, 48)
        assert tier_tokens(answer) == {HOST: (48, 48), REDIS: (80, None)}
        named = peer.look_up(PROMPT, tiers=[HOST, REDIS])
        assert tier_tokens(named) == {HOST: (48, 48), REDIS: (80, 128)}

    def test_redis_alone(self, peer: Peer) -> None:
        answer = peer.look_up(PROMPT, tiers=[REDIS])
        assert (answer.matched_tokens, answer.verified_tokens) == (128, 0)
        assert tier_tokens(answer) == {REDIS: (128, 128)}

    def test_explain_names_both_and_each(self, peer: Peer) -> None:
        assert report(peer, PROMPT) == [([HOST, REDIS], "", False)] * 8
        self.forget(peer)
        assert report(peer, PROMPT) == [([REDIS], "", False)] * 8
        assert not any(each.HasField("age_seconds") for each in peer.explain(PROMPT).blocks)

    def test_a_redis_that_does_not_answer_costs_its_part_only(self, peer: Peer, valkey: ValkeyServer) -> None:
        longer = tokens_of(10)
        longer[:128] = PROMPT[:128]
        valkey.stop()
        try:
            assert peer.look_up(longer).matched_tokens == 128
            assert [cause for _, cause, _ in report(peer, longer)] == [""] * 8 + ["unknown"] * 2
        finally:
            valkey.resume()


@pytest.mark.redis
class TestWaiting:
    @pytest.fixture
    def absent(self, tiers: Raw, valkey: ValkeyServer, request: pytest.FixtureRequest) -> Peer:
        """Of a namespace whose one prompt is in redis only."""
        absent = tiers.register(spec(request.node.name))
        absent.write(PROMPT)
        assert eventually(lambda: valkey.client.dbsize() == 8)
        cleared = tiers.admin.Clear(admin_pb2.ClearRequest(namespace=absent.answer.namespace))
        assert cleared.blocks == 8
        return absent

    def test_the_server_waits_for_redis_in_the_callers_stead(self, absent: Peer) -> None:
        """No polling: one call brings the blocks (LMCache #2710 #3694, sglang #32724)."""
        counted = Counted(absent.raw)
        answer = absent.acquire(PROMPT, "r", wait_seconds=10)
        assert (answer.blocks, answer.pending, answer.cause) == (8, False, "")
        assert [(each.tier, each.blocks) for each in answer.tiers] == [(REDIS, 8)]
        data, _ = absent.read(answer.lease_id)
        assert data == b"".join(absent.payloads(PROMPT))
        absent.release(answer.lease_id)
        assert counted.tokens == (131, {"redis": 128}, {"tail": 3})
        assert absent.look_up(PROMPT).verified_tokens == 128, "it is in memory now"

    def test_without_waiting_the_rest_is_pending(self, absent: Peer, valkey: ValkeyServer) -> None:
        valkey.stop()
        try:
            answer = absent.acquire(PROMPT, "r")
            assert (answer.blocks, answer.pending) == (0, True)
            assert answer.lease_id, "the request goes on, so it can be renewed, released, asked again"
            began = time.monotonic()
            late = absent.acquire(PROMPT, "r", wait_seconds=0.3)
            assert (late.lease_id, late.blocks, late.pending) == (answer.lease_id, 0, True)
            assert 0.3 <= time.monotonic() - began < 3
        finally:
            valkey.resume()
        found = absent.acquire(PROMPT, "r", wait_seconds=10)
        assert (found.lease_id, found.blocks, found.pending) == (answer.lease_id, 8, False)
        absent.release(found.lease_id)

    def test_who_waits_is_answered_as_soon_as_the_blocks_are_there(
        self, absent: Peer, valkey: ValkeyServer
    ) -> None:
        valkey.stop()
        with ThreadPoolExecutor(1) as thread:
            try:
                waiting = thread.submit(absent.acquire, PROMPT, "r", wait_seconds=30)
                assert eventually(lambda: absent.raw.status().leases == 1), "others are served meanwhile"
            finally:
                valkey.resume()
            answer = waiting.result(10)
        assert (answer.blocks, answer.pending) == (8, False)
        absent.release(answer.lease_id)

    def test_a_request_that_is_given_up_before_redis_answers(
        self, absent: Peer, valkey: ValkeyServer
    ) -> None:
        counted = Counted(absent.raw)
        valkey.stop()
        try:
            absent.release(absent.acquire(PROMPT, "r").lease_id)
            assert counted.tokens == (131, {}, {"timeout": 128, "tail": 3})
        finally:
            valkey.resume()
        assert absent.raw.status().leases == 0

    def test_a_request_that_is_given_up_while_it_waits_is_over_and_counted_once(
        self, absent: Peer, valkey: ValkeyServer
    ) -> None:
        """Engines abort requests at every moment: no lease and no wrong count is left (cases 18, 49)."""
        counted = Counted(absent.raw)
        valkey.stop()
        with ThreadPoolExecutor(1) as thread:
            try:
                lease = absent.acquire(PROMPT, "r").lease_id
                waiting = thread.submit(absent.acquire, PROMPT, "r", wait_seconds=10)
                time.sleep(0.1)
                absent.release(lease)
                answer = waiting.result(10)
            finally:
                valkey.resume()
        leases = absent.raw.status().leases
        absent.release(answer.lease_id)
        assert (answer.lease_id, answer.blocks, leases) == (0, 0, 0)
        assert counted.tokens == (131, {}, {"timeout": 128, "tail": 3})

    def test_a_prefetch_brings_blocks_and_counts_nothing(self, absent: Peer) -> None:
        counted = Counted(absent.raw)
        request = block_pb2.PrefetchRequest(prompt=absent.prompt(PROMPT), wait_seconds=10)
        answer = absent.raw.blocks.Prefetch(request)
        assert (answer.resident_tokens, answer.pending) == (128, False)
        assert counted.tokens == (0, {}, {})
        assert absent.look_up(PROMPT).verified_tokens == 128
        assert absent.raw.status().leases == 0

    def test_a_prefetch_that_does_not_wait_leaves_another_that_does_alone(
        self, absent: Peer, valkey: ValkeyServer
    ) -> None:
        valkey.stop()
        with ThreadPoolExecutor(1) as thread:
            try:
                waits = block_pb2.PrefetchRequest(prompt=absent.prompt(PROMPT), wait_seconds=20)
                waiting = thread.submit(absent.raw.blocks.Prefetch, waits)
                assert eventually(lambda: absent.raw.status().leases == 1)
                hurried = absent.raw.blocks.Prefetch(block_pb2.PrefetchRequest(prompt=absent.prompt(PROMPT)))
                assert (hurried.resident_tokens, hurried.pending) == (0, True)
                time.sleep(0.1)
                assert not waiting.done(), "it has asked to be told when the blocks are there"
            finally:
                valkey.resume()
            assert waiting.result(20).resident_tokens == 128

    def test_a_prefetch_needs_tokens(self, absent: Peer) -> None:
        with refused(INVALID, "token ids"):
            absent.raw.blocks.Prefetch(block_pb2.PrefetchRequest(prompt=absent.hashes(PROMPT)))
