"""Requests that bring the head of their prompt themselves: nothing is asked, leased or counted for it.

No remote traffic for blocks that the GPU already has (LMCache #1109 #2205 #2334).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import grpc
import pytest

from kvstore.block import WHOLE, Chain, MissCause, TierName
from kvstore.errors import LeaseError
from kvstore.events import BlocksReused, RemovalCause
from kvstore.lease import Lease
from kvstore.service.client import Client, ClientNamespace
from kvstore.v1 import admin_pb2
from tests.support.clients import (
    KINDS,
    OPPOSITES,
    STREAMED,
    Kind,
    assert_right,
    client_of,
    put,
    resident,
)
from tests.support.clients import eventually as until
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import HeldTier
from tests.support.flights import DIVIDED, SPEC, filled_tier, finish, rig_over, settle
from tests.support.observed import Counted
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import SPLIT, Rig, make_chain, make_spec, payloads_of
from tests.support.stubs import Peer, Raw, dialled, refused, spec, tokens_of
from tests.support.valkey import ValkeyServer, shared_valkey, valkey

__all__ = ["shared_valkey", "valkey"]

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID = grpc.StatusCode.INVALID_ARGUMENT
SIZE = 4


@pytest.fixture
def redis() -> DictTier:
    return filled_tier()


@pytest.fixture
def held(redis: DictTier) -> HeldTier:
    return HeldTier(redis)


@pytest.fixture
def rig(held: HeldTier) -> Iterator[Rig]:
    with rig_over(held) as made:
        yield made
        held.open()
        made.settle()
        assert made.store.leases == 0
        made.store.check()


class TestStore:
    def ask(self, rig: Rig, first_block: int, letters: str = "abcdef") -> Lease:
        return rig.store.acquire("r", make_chain(SPEC, letters, tail=1), first_block=first_block)

    @pytest.mark.parametrize("first_block", range(7))
    def test_redis_is_asked_for_the_rest_alone(self, rig: Rig, held: HeldTier, first_block: int) -> None:
        rest = 6 - first_block
        lease = self.ask(rig, first_block)
        finish(rig, held)
        assert (lease.blocks, lease.end, lease.complete) == (rest, 6, True)
        assert (held.blocks["match"], held.blocks["load"]) == (rest, rest)
        rig.assert_promised(lease)
        settled = settle(rig, lease)
        assert settled.asked_tokens == rest * SIZE + 1
        assert settled.hit_tokens == ({TierName.REDIS: rest * SIZE} if rest else {})
        assert settled.miss_tokens == {MissCause.TAIL: 1}
        expected = dict.fromkeys((TierName.DEVICE, TierName.HOST), rest * SIZE)
        assert settled.tier_asked == expected | ({TierName.REDIS: rest * SIZE} if rest else {})
        assert (settled.first_block, settled.hit_blocks) == (first_block, rest)
        assert settled.hashes == lease.chain.hashes, "a recording needs the whole prompt"

    def test_the_head_need_not_be_anywhere(self, rig: Rig, held: HeldTier, redis: DictTier) -> None:
        head = make_chain(SPEC, "abc").rows(WHOLE)
        redis.discard(head, 0.0)
        lease = self.ask(rig, 3)
        finish(rig, held)
        assert (lease.blocks, lease.cause) == (3, None)
        assert rig.resident(rig.host, lease.chain) == 0
        assert settle(rig, lease).hit_tokens == {TierName.REDIS: 12}

    def test_a_run_that_does_not_begin_is_a_miss_of_the_rest(self, rig: Rig, held: HeldTier) -> None:
        held.open()
        rig.write(make_chain(SPEC, "abcx"))
        lease = self.ask(rig, 3, "abcyz")
        finish(rig, held)
        assert (lease.blocks, lease.tokens) == (0, 0)
        assert settle(rig, lease).miss_tokens == {MissCause.COLD: 8, MissCause.TAIL: 1}

    def test_only_the_rest_is_held(self, rig: Rig, held: HeldTier) -> None:
        held.open()
        rig.write(make_chain(SPEC, "abcdef"))
        rig.settle()
        lease = self.ask(rig, 4)
        assert lease.hit_blocks(2) == {TierName.HOST: 2}
        assert rig.host.pool.usage().leased == 2 * 1024
        assert rig.store.promote(lease) == 2
        rig.assert_promised(lease)
        settled = settle(rig, lease)
        assert settled.hit_tokens == {TierName.HOST: 8}

    def test_a_short_promotion_is_cut_at_the_right_block(self, rig: Rig, held: HeldTier) -> None:
        """The device has room for eight blocks, seven of which somebody uses."""
        held.open()
        rig.write(make_chain(SPEC, "abcdef"))
        rig.settle()
        rig.store.reserve(SPEC.root.digest, 7)
        lease = self.ask(rig, 2)
        assert rig.store.promote(lease) == 1
        assert (lease.blocks, lease.end, lease.cause) == (1, 3, MissCause.QUOTA)
        rig.assert_promised(lease)
        rig.store.release(lease)

    def test_ranks_agree_from_there_on(self, rig: Rig, held: HeldTier, redis: DictTier) -> None:
        rows = make_chain(DIVIDED, "abcd").rows(SPLIT[1])
        redis.discard(rows.slice(3, 4), 0.0)
        lease = rig.store.acquire("r", make_chain(DIVIDED, "abcd"), SPLIT, first_block=1)
        finish(rig, held)
        assert lease.blocks == 2
        rig.assert_promised(lease)
        rig.store.release(lease)

    def test_used_blocks_count_from_there(self, rig: Rig, held: HeldTier) -> None:
        lease = self.ask(rig, 2)
        finish(rig, held)
        rig.store.release(lease, used_blocks=1)
        last = settle(rig, lease)
        assert last.hit_tokens == {TierName.REDIS: 4}
        assert last.miss_tokens == {MissCause.STALE: 12, MissCause.TAIL: 1}

    def test_two_requests_share_what_both_lack(self, rig: Rig, held: HeldTier) -> None:
        whole = rig.store.acquire("1", make_chain(SPEC, "abcdef"))
        rest = rig.store.acquire("2", make_chain(SPEC, "abcdef"), first_block=2)
        finish(rig, held)
        assert (whole.blocks, rest.blocks) == (6, 4)
        for lease in (whole, rest):
            rig.assert_promised(lease)
            settle(rig, lease)

    def test_the_same_request_from_another_block_is_an_error(self, rig: Rig, held: HeldTier) -> None:
        first = self.ask(rig, 2)
        assert self.ask(rig, 2) is first
        with pytest.raises(LeaseError, match="blocks from 2 on, not from 3; release it, or use another"):
            self.ask(rig, 3)
        finish(rig, held)
        rig.store.release(first)

    @pytest.mark.parametrize("first_block", [-1, 7])
    def test_a_block_that_the_prompt_does_not_have(self, rig: Rig, first_block: int) -> None:
        with pytest.raises(LeaseError, match=rf"first_block is {first_block}, .* 6 blocks; expected 0 … 6"):
            self.ask(rig, first_block)

    def test_the_head_is_in_use_and_not_read(self, rig: Rig, held: HeldTier) -> None:
        """What hangs from it is evicted before it, and nobody has read it here."""
        held.open()
        rig.write(make_chain(SPEC, "abcd"))
        rig.settle()
        settle(rig, self.ask(rig, 2, "abcd"))
        [reuse] = rig.events.of(BlocksReused)
        assert (len(reuse.gaps), reuse.first_reads) == (2, 2)
        slots = rig.host.pool.match(make_chain(SPEC, "abcd").rows(WHOLE)).slots
        rig.host.pool.discard(slots, RemovalCause.CLEARED)
        [gone] = rig.host.pool.removed
        assert gone.history.reads.tolist() == [0, 0, 1, 1]

    def test_damage_before_it_is_not_looked_at(self, rig: Rig, held: HeldTier, redis: DictTier) -> None:
        key = next(iter(redis.values))
        redis.values[key] = redis.values[key]._replace(payload=bytes(1024))
        lease = self.ask(rig, 1)
        finish(rig, held)
        assert lease.blocks == 5
        settle(rig, lease)


PROMPT = tokens_of(8, tail=3)


@pytest.fixture(scope="module")
def server(shared_valkey: ValkeyServer) -> Iterator[Sidecar]:
    settings = {"redis_url": shared_valkey.url, "redis_probe_seconds": 10, "redis_acquire_seconds": 10}
    with sidecar(**settings) as running:
        yield running


@pytest.fixture(scope="module")
def raw(server: Sidecar) -> Iterator[Raw]:
    with dialled(server.address) as raw:
        yield raw


@pytest.mark.redis
class TestService:
    @pytest.fixture
    def peer(self, raw: Raw, valkey: ValkeyServer, request: pytest.FixtureRequest) -> Peer:
        """Of a namespace whose one prompt is in redis, and no more in memory."""
        peer = raw.register(spec(request.node.name))
        peer.write(PROMPT)
        until(lambda: valkey.client.dbsize() == 8)
        assert raw.admin.Clear(admin_pb2.ClearRequest(namespace=peer.answer.namespace)).blocks == 8
        valkey.client.config_resetstat()
        return peer

    def test_nothing_of_the_head_goes_over_the_wire(self, raw: Raw, peer: Peer, valkey: ValkeyServer) -> None:
        counted = Counted(raw)
        answer = peer.acquire(PROMPT, "r", first_block=5, wait_seconds=20)
        assert (answer.blocks, answer.cause, [each.blocks for each in answer.tiers]) == (3, "", [3])
        calls = valkey.calls()
        assert (calls["exists"], calls["get"], calls["keys"]) == (1, 3, 9), (
            "of three keys: whether, how long and what"
        )
        assert peer.read(answer.lease_id)[0] == b"".join(peer.payloads(PROMPT)[5:])
        peer.release(answer.lease_id)
        assert counted.tokens == (3 * 16 + 3, {"redis": 48}, {"tail": 3})

    def test_nothing_is_asked_where_the_caller_has_it_all(
        self, raw: Raw, peer: Peer, valkey: ValkeyServer
    ) -> None:
        counted = Counted(raw)
        for _ in range(2):
            answer = peer.acquire(PROMPT, "r", first_block=8, wait_seconds=20)
            assert (answer.lease_id, answer.blocks, answer.pending, answer.cause) == (0, 0, False, "")
        assert valkey.calls()["keys"] == 0
        assert counted.tokens == (3, {}, {"tail": 3}), "once, though it was asked twice"

    def test_another_first_block_is_another_request(self, peer: Peer) -> None:
        first = peer.acquire(PROMPT, "r", first_block=5, wait_seconds=20)
        assert peer.acquire(PROMPT, "r", first_block=5) == first
        with refused(PRECONDITION, "'r'", "from 5 on, not from 4", "another request id"):
            peer.acquire(PROMPT, "r", first_block=4)
        peer.release(first.lease_id)

    def test_a_block_beyond_the_prompt(self, raw: Raw, peer: Peer) -> None:
        with refused(INVALID, "first_block is 9", "8 whole blocks", "expected 0 … 8"):
            peer.acquire(PROMPT, "r", first_block=9)
        assert raw.status().leases == 0


@pytest.mark.redis
@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestClient:
    numbers = itertools.count()

    @pytest.fixture
    def client(self, kind: Kind, server: Sidecar) -> Iterator[Client]:
        with client_of(kind, server.address) as made:
            yield made

    @pytest.fixture
    def namespace(self, client: Client) -> ClientNamespace:
        return client.namespace(make_spec(f"first block {next(self.numbers)}"))

    @pytest.fixture
    def chain(self, namespace: ClientNamespace) -> Chain:
        chain = make_chain(namespace.spec, "abcdef")
        put(namespace, chain)
        return chain

    def test_the_run_begins_where_the_caller_s_own_ends(
        self, namespace: ClientNamespace, chain: Chain
    ) -> None:
        with namespace.acquire(chain, first_block=4) as lease:
            assert (lease.blocks, lease.tokens, lease.hit_blocks) == (2, 8, {TierName.HOST: 2})
            expected = payloads_of(chain.rows(WHOLE))[4:]
            assert [view.tobytes() for view in lease.views()] == [each.tobytes() for each in expected]
            assert lease.valid() == 2
        with namespace.acquire(chain) as lease:
            assert_right(lease, chain, 6)

    def test_another_prompt_s_head_is_noticed(self, namespace: ClientNamespace, chain: Chain) -> None:
        """Both have the same blocks after the first: the hash and the fingerprint name the whole prefix."""
        other = make_chain(namespace.spec, "xbcdef")
        with namespace.acquire(other, first_block=1) as lease:
            assert lease.blocks == 0
        assert resident(namespace, chain) == 6

    @pytest.mark.parametrize("first_block", [-1, 7])
    def test_a_block_that_the_prompt_does_not_have(
        self, namespace: ClientNamespace, chain: Chain, first_block: int
    ) -> None:
        with pytest.raises(LeaseError, match=f"first_block is {first_block} of 6 blocks"):
            namespace.acquire(chain, first_block=first_block)


@pytest.mark.parametrize("kind", OPPOSITES, ids=str)
def test_what_borrowers_see_counts_from_there_too(kind: Kind) -> None:
    chain = make_chain(make_spec(), "abcdef")
    with sidecar() as server, client_of(kind, server.address) as client:
        namespace = client.namespace(make_spec())
        put(namespace, chain)
        with namespace.acquire(chain, first_block=3) as lease:
            ticket = lease.ticket()
            assert ticket is not None
            assert ticket.blocks == 3
            with client_of(STREAMED, server.address) as other:
                borrowed = other.namespace(make_spec()).borrow(ticket.part(1, 2))
                expected = payloads_of(chain.rows(WHOLE))[4:]
                assert [each.tobytes() for each in borrowed.views()] == [each.tobytes() for each in expected]
