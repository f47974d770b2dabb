"""Operators and a sidecar: status, clearing, pins, and events as they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.block import HASH_BYTES, WHOLE, TierName
from kvstore.events import BlocksStored
from kvstore.service.events import EventLog
from kvstore.v1 import admin_pb2, types_pb2
from tests.support.sidecars import sidecar
from tests.support.stubs import (
    HOST,
    REDIS,
    YOURS,
    Peer,
    Raw,
    checksum,
    dialled,
    fork,
    opened,
    refused,
    spec,
    tokens_of,
)

PROMPT = tokens_of(8, tail=3)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def raw() -> Iterator[Raw]:
    with sidecar(pool_bytes="4MiB") as server, dialled(server.address) as raw:
        yield raw


@pytest.fixture
def peer(raw: Raw, request: pytest.FixtureRequest) -> Peer:
    """Of an otherwise empty server, with one resident prompt."""
    raw.admin.Clear(admin_pb2.ClearRequest())
    peer = raw.register(spec(request.node.name))
    peer.write(PROMPT)
    return peer


def clear(raw: Raw, **fields: Any) -> tuple[int, int]:
    answer = raw.admin.Clear(admin_pb2.ClearRequest(**fields))
    return answer.blocks, answer.held_blocks


class TestStatus:
    def test_what_is_held(self, raw: Raw, peer: Peer) -> None:
        before = raw.await_quiet()
        lease = peer.hold(PROMPT, "r")
        begun = peer.begin(tokens_of(4, seed=1))
        status = raw.status()
        pool = raw.pool()
        assert (status.leases, status.writes, status.clients) == (1, 1, 1)
        assert (pool.ready_bytes, pool.leased_bytes, pool.staged_bytes) == (8192, 8192, 4096)
        assert (pool.limit_bytes, pool.reserved_bytes, pool.quarantined_bytes) == (4 << 20, 4 << 20, 0)
        assert pool.free_bytes + pool.staged_bytes + pool.ready_bytes == pool.reserved_bytes
        assert (status.epoch, status.pool_path) == (before.epoch, before.pool_path)
        assert status.uptime_seconds > before.uptime_seconds > 0
        assert status.adopted_blocks == 0
        assert not status.tenants
        peer.abort(begun.write_id)
        peer.release(lease)
        assert raw.await_quiet().clients == 0

    def test_tiers(self, raw: Raw) -> None:
        """A tier that is not there is not called healthy without a word (cases 45)."""
        host, redis = raw.status().tiers
        assert (host.tier, host.healthy, host.HasField("pool")) == (HOST, True, True)
        assert (redis.tier, redis.HasField("pool")) == (REDIS, False)
        assert redis.reason, "no redis is configured, which is worth saying"

    def test_namespaces(self, raw: Raw, peer: Peer) -> None:
        listed = raw.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces
        [found] = [each for each in listed if each.namespace == peer.answer.namespace]
        assert found.spec == peer.request.spec
        assert (found.tenant, found.payload_bytes) == ("", 8192)
        assert [(each.tier, each.blocks) for each in found.tiers] == [(HOST, 8)]
        assert len(listed) == raw.status().namespaces


class TestClear:
    def test_one_namespace(self, raw: Raw, peer: Peer) -> None:
        other = raw.register(spec("another"))
        other.write(PROMPT)
        assert clear(raw, namespace=peer.answer.namespace) == (8, 0)
        assert (peer.matched(PROMPT), other.matched(PROMPT)) == (0, 128)
        assert clear(raw, namespace=peer.answer.namespace) == (0, 0)
        assert clear(raw) == (8, 0)
        assert raw.pool().ready_bytes == 0

    def test_what_is_held_stays(self, raw: Raw, peer: Peer) -> None:
        lease = peer.hold(PROMPT[: 5 * 16], "r")
        assert clear(raw) == (3, 5)
        assert peer.read(lease)[0] == b"".join(peer.payloads(PROMPT)[:5])
        peer.release(lease)
        assert clear(raw) == (5, 0)
        assert peer.write(PROMPT) == [YOURS] * 8

    def test_a_tier(self, raw: Raw, peer: Peer) -> None:
        assert clear(raw, tiers=[types_pb2.TIER_DEVICE]) == (0, 0)
        assert clear(raw, tiers=[HOST]) == (8, 0)

    def test_redis_forgets_by_itself(self, raw: Raw, peer: Peer) -> None:
        with refused(INVALID, "redis", "time to live"):
            clear(raw, tiers=[HOST, REDIS])
        assert peer.matched(PROMPT) == 128

    def test_an_unknown_namespace(self, raw: Raw, peer: Peer) -> None:
        with refused(NOT_FOUND, "0a" * 16):
            clear(raw, namespace=b"\x0a" * 16)
        assert peer.matched(PROMPT) == 128


class TestPins:
    def pin(self, peer: Peer, name: str, tokens: object = PROMPT) -> int:
        request = admin_pb2.PinRequest(name=name, prompt=peer.prompt(tokens))  # type: ignore[arg-type]
        kept: int = peer.raw.admin.Pin(request).tokens
        return kept

    def unpin(self, raw: Raw, name: str) -> bool:
        found: bool = raw.admin.Unpin(admin_pb2.UnpinRequest(name=name)).found
        return found

    def test_what_is_pinned_survives_clearing_and_pressure(self, raw: Raw) -> None:
        raw.admin.Clear(admin_pb2.ClearRequest())
        peer = raw.register(spec("pressed", payload_bytes=60_000))
        kept = tokens_of(8, seed=7)
        peer.write(kept)
        assert self.pin(peer, "system prompt", kept) == 128
        for seed in range(100, 110):
            peer.write(tokens_of(10, seed=seed))
        assert clear(raw)[1] == 8
        assert peer.matched(kept) == 128
        status = raw.status()
        assert (status.leases, status.clients) == (0, 0), "a pin is no client's lease"
        assert self.unpin(raw, "system prompt")
        assert clear(raw) == (8, 0)

    def test_a_name_is_one_pin(self, raw: Raw, peer: Peer) -> None:
        assert [self.pin(peer, "twice"), self.pin(peer, "twice")] == [128, 128]
        with refused(PRECONDITION, "another prompt", "unpin it first"):
            self.pin(peer, "twice", fork(PROMPT, 3))
        assert [self.unpin(raw, "twice"), self.unpin(raw, "twice")] == [True, False]
        assert clear(raw) == (8, 0)

    def test_only_what_is_there_is_kept_and_more_when_asked_again(self, raw: Raw, peer: Peer) -> None:
        longer = tokens_of(12)
        longer[:128] = PROMPT[:128]
        assert self.pin(peer, "grows", longer) == 128
        peer.write(longer)
        assert self.pin(peer, "grows", longer) == 192
        assert clear(raw) == (0, 12)
        self.unpin(raw, "grows")

    def test_nothing_is_there(self, raw: Raw, peer: Peer) -> None:
        assert self.pin(peer, "nothing", tokens_of(3, seed=55)) == 0
        assert not self.unpin(raw, "nothing"), "nothing is held, so no name is either"

    def test_hashes_do(self, raw: Raw, peer: Peer) -> None:
        assert raw.admin.Pin(admin_pb2.PinRequest(name="h", prompt=peer.hashes(PROMPT))).tokens == 128
        assert self.unpin(raw, "h")

    def test_a_pin_without_a_name(self, peer: Peer) -> None:
        with refused(INVALID, "no name"):
            self.pin(peer, "")


class TestEvents:
    def watch(self, raw: Raw, **fields: int) -> Iterator[admin_pb2.WatchEventsResponse]:
        """Answers as they come; the first has come when this returns."""
        answers: Iterator[admin_pb2.WatchEventsResponse] = raw.admin.WatchEvents(
            admin_pb2.WatchEventsRequest(**fields)
        )
        return answers

    def test_blocks_come_and_go(self, raw: Raw, peer: Peer) -> None:
        answers = self.watch(raw)
        start = next(answers)
        assert (start.epoch, start.lost, list(start.events)) == (raw.status().epoch, False, [])
        other = tokens_of(3, seed=2)
        peer.write(other)
        stored = next(answers)
        [event] = stored.events
        assert stored.sequence == start.sequence + 1
        assert (event.tier, event.removed, event.cause) == (HOST, False, "")
        assert event.namespace == peer.answer.namespace
        assert opened(event.block_hashes) == opened(peer.chain(other).hashes)
        assert (event.shard.tp_rank, event.shard.tp_size, event.shard.pp_size) == (0, 1, 1)
        clear(raw)
        removed = list(next(answers).events)
        assert {event.cause for event in removed} == {"cleared"}
        gone = {each for event in removed for each in opened(event.block_hashes)}
        assert gone == set(opened(peer.chain(other).hashes + peer.chain(PROMPT).hashes))
        answers.cancel()  # type: ignore[attr-defined]

    def test_from_a_cursor_on_nothing_is_missed(self, raw: Raw, peer: Peer) -> None:
        cursor = next(self.watch(raw))
        prompts = [tokens_of(2, seed=seed) for seed in range(40, 45)]
        for prompt in prompts:
            peer.write(prompt)
        answers = self.watch(raw, epoch=cursor.epoch, sequence=cursor.sequence)
        assert next(answers).sequence == cursor.sequence
        batch = next(answers)
        assert (batch.lost, batch.sequence) == (False, cursor.sequence + 5)
        assert [event.block_hashes for event in batch.events] == [peer.chain(each).hashes for each in prompts]

    def test_a_cursor_of_another_server_has_lost_events(self, raw: Raw, peer: Peer) -> None:
        first = next(self.watch(raw, epoch=12345, sequence=1))
        assert (first.lost, first.epoch) == (True, peer.answer.epoch)

    def test_a_cursor_ahead_of_the_server_has_lost_events(self, raw: Raw, peer: Peer) -> None:
        answers = self.watch(raw, epoch=peer.answer.epoch, sequence=1 << 60)
        peer.write(tokens_of(2, seed=60))
        assert any(answer.lost for answer in (next(answers), next(answers)))

    def test_a_watcher_that_is_far_behind_catches_up(self) -> None:
        """Events of long prompts are long: what is due fits no single message."""
        with sidecar() as server, dialled(server.address) as raw:
            blocks = 1 << 16
            peer = raw.register(spec("long", block_size=1, payload_bytes=1))
            cursor = next(self.watch(raw))
            for _ in range(9):
                begun = peer.begin(tokens_of(blocks, block_size=1))
                peer.send(begun.write_id, [bytes(blocks)])
                assert peer.commit(begun.write_id, [checksum(b"\0")] * blocks) == blocks
                assert clear(raw) == (blocks, 0)
            stored = removed = 0
            for answer in self.watch(raw, epoch=cursor.epoch, sequence=cursor.sequence):
                assert not answer.lost
                for event in answer.events:
                    hashes = len(event.block_hashes) // HASH_BYTES
                    stored, removed = stored + hashes * (not event.removed), removed + hashes * event.removed
                if removed == 9 * blocks:
                    break
            assert stored == removed

    def test_many_watchers_that_do_not_read_cost_nobody_anything(self, raw: Raw, peer: Peer) -> None:
        watchers = [self.watch(raw) for _ in range(20)]
        for each in watchers:
            next(each)
        began = time.monotonic()
        for seed in range(70, 90):
            peer.write(tokens_of(2, seed=seed))
        assert time.monotonic() - began < 5
        with ThreadPoolExecutor(20) as threads:
            firsts = list(threads.map(lambda each: next(each).events[0].block_hashes, watchers))
        assert set(firsts) == {peer.chain(tokens_of(2, seed=70)).hashes}
        for each in watchers:
            each.cancel()  # type: ignore[attr-defined]


def test_the_log_is_bounded_in_bytes() -> None:
    """However long prompts are, what is kept for watchers is not (cases 23)."""
    log = EventLog()
    for at in range(300):
        hashes = at.to_bytes(4) * (1 << 18)
        log(BlocksStored(float(at), TierName.HOST, b"n" * 16, WHOLE, hashes, 1))
    kept, sequence = 0, 0
    while (batch := log.after(sequence, 16)).changes:
        kept, sequence = kept + sum(len(event.hashes) for event in batch.changes), batch.sequence
    assert sequence == log.sequence, "the last ones are there"
    assert 0 < kept <= 128 << 20
