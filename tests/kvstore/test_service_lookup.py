"""Look-ups of a sidecar: exact tokens by tier, and the reason for each block that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvstore.block import Shard
from kvstore.v1 import admin_pb2, lookup_pb2, types_pb2
from tests.support.observed import report, tier_tokens
from tests.support.sidecars import sidecar
from tests.support.stubs import (
    HOST,
    YOURS,
    Peer,
    Raw,
    dialled,
    fork,
    opened,
    refused,
    spec,
    tokens_of,
)
from tests.support.valkey import eventually

PROMPT = tokens_of(8, tail=5)
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def raw() -> Iterator[Raw]:
    with sidecar() as server, dialled(server.address) as raw:
        yield raw


@pytest.fixture
def peer(raw: Raw, request: pytest.FixtureRequest) -> Peer:
    """A client with a namespace of its own."""
    return raw.register(spec(request.node.name))


class TestRuns:
    def test_a_prompt_that_is_all_there(self, peer: Peer) -> None:
        peer.write(PROMPT)
        answer = peer.look_up(PROMPT)
        assert (answer.block_size, answer.prompt_blocks, answer.blocks_read) == (16, 8, 8)
        assert (answer.matched_tokens, answer.verified_tokens) == (128, 128)
        assert tier_tokens(answer) == {HOST: (128, 128)}

    def test_nothing_is_there(self, peer: Peer) -> None:
        answer = peer.look_up(PROMPT)
        assert (answer.prompt_blocks, answer.blocks_read) == (8, 8)
        assert (answer.matched_tokens, answer.verified_tokens) == (0, 0)
        assert tier_tokens(answer) == {HOST: (0, 0)}

    @pytest.mark.parametrize("at", [0, 1, 7])
    def test_a_prompt_that_parts_from_a_known_one(self, peer: Peer, at: int) -> None:
        peer.write(PROMPT)
        assert peer.matched(fork(PROMPT, at)) == at * 16

    def test_only_what_follows_block_0_counts(self, peer: Peer) -> None:
        """A run leads: blocks 4 … 7 serve nobody without those before them."""
        peer.write(PROMPT, first_block=4)
        assert peer.matched(PROMPT) == 0
        peer.write(PROMPT)
        assert peer.matched(PROMPT) == 128

    @pytest.mark.parametrize("length", [0, 15])
    def test_less_than_a_block(self, peer: Peer, length: int) -> None:
        answer = peer.look_up(tokens_of(1)[:length])
        assert (answer.prompt_blocks, answer.blocks_read, answer.matched_tokens) == (0, 0, 0)

    def test_hashes_alone_match_and_are_not_verified(self, raw: Raw, peer: Peer) -> None:
        peer.write(PROMPT)
        answer = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=peer.hashes(PROMPT)))
        assert (answer.matched_tokens, answer.verified_tokens) == (128, 0)
        assert (answer.prompt_blocks, answer.blocks_read) == (8, 8)

    def test_tokens_and_hashes_of_one_prompt_are_verified(self, raw: Raw, peer: Peer) -> None:
        peer.write(PROMPT)
        prompt = peer.prompt(PROMPT, block_hashes=peer.chain(PROMPT).hashes)
        answer = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))
        assert (answer.matched_tokens, answer.verified_tokens) == (128, 128)

    @pytest.mark.parametrize("by_hashes", [False, True])
    def test_max_blocks_bounds_what_is_read(self, raw: Raw, peer: Peer, *, by_hashes: bool) -> None:
        peer.write(PROMPT)
        prompt = peer.hashes(PROMPT) if by_hashes else peer.prompt(PROMPT)
        for most, read in ((3, 3), (8, 8), (99, 8), (0, 8)):
            answer = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt, max_blocks=most))
            assert (answer.prompt_blocks, answer.blocks_read) == (8, read)
            assert answer.matched_tokens == read * 16

    def test_a_long_prompt_is_not_silently_capped(self, peer: Peer) -> None:
        """The answer says how many blocks were read (cases 38)."""
        prompt = tokens_of(16_384)
        peer.write(prompt[: 16 * 16])
        answer = peer.look_up(prompt)
        assert (answer.prompt_blocks, answer.blocks_read, answer.matched_tokens) == (16_384, 16_384, 256)

    def test_extras_are_part_of_the_identity(self, raw: Raw, peer: Peer) -> None:
        peer.write(PROMPT)
        for extras, matched in (
            (types_pb2.Extras(), 128),
            (types_pb2.Extras(request_salt=b"s"), 0),
            (types_pb2.Extras(items=[types_pb2.ContentItem(digest=b"d" * 32, start=40, length=3)]), 32),
            (types_pb2.Extras(embeddings=[b"", b"e" * 32]), 16),
        ):
            prompt = peer.prompt(PROMPT, extras=extras)
            assert raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt)).matched_tokens == matched

    def test_all_ranks_must_have_it(self, raw: Raw, request: pytest.FixtureRequest) -> None:
        """A hit is the minimum over ranks (cases 47)."""
        peer = raw.register(spec(request.node.name), tp_size=2)
        peer.write(PROMPT, Shard(0, 2))
        assert peer.matched(PROMPT) == 0
        peer.write(PROMPT[: 5 * 16], Shard(1, 2))
        answer = peer.look_up(PROMPT)
        assert answer.matched_tokens == answer.verified_tokens == 80
        assert tier_tokens(answer) == {HOST: (80, 80)}

    def test_a_model_that_is_cut_in_two_ways_needs_to_be_told_which(
        self, raw: Raw, request: pytest.FixtureRequest
    ) -> None:
        namespace = spec(request.node.name)
        whole = raw.register(namespace)
        raw.register(namespace, tp_size=2)
        whole.write(PROMPT)
        with refused(INVALID, "tp size 1", "tp size 2", "parallelism"):
            whole.look_up(PROMPT)
        for size, matched in ((1, 128), (2, 0)):
            prompt = whole.prompt(PROMPT, parallelism=types_pb2.Parallelism(tp_size=size))
            found = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))
            assert found.matched_tokens == matched
        with refused(INVALID, "tp size 4", "register it"):
            prompt = whole.prompt(PROMPT, parallelism=types_pb2.Parallelism(tp_size=4))
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))


class TestMasks:
    def test_one_tier(self, peer: Peer) -> None:
        peer.write(PROMPT)
        assert tier_tokens(peer.look_up(PROMPT, tiers=[HOST])) == {HOST: (128, 128)}
        other = peer.look_up(PROMPT, tiers=[types_pb2.TIER_DEVICE])
        assert (other.matched_tokens, tier_tokens(other)) == (0, {})

    @pytest.mark.parametrize("value", [0, 77])
    def test_a_tier_that_does_not_exist(self, peer: Peer, value: int) -> None:
        with refused(INVALID, f"tiers holds {value}", "expected one of", "leave tiers out"):
            peer.look_up(PROMPT, tiers=[HOST, value])


class TestNames:
    def test_a_model_name_that_only_one_namespace_has(self, raw: Raw, peer: Peer) -> None:
        peer.write(PROMPT)
        prompt = types_pb2.Prompt(model=peer.request.spec.model, token_ids=PROMPT.tobytes())
        answer = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))
        assert (answer.matched_tokens, answer.verified_tokens) == (128, 128)

    def test_an_unknown_model(self, raw: Raw) -> None:
        with refused(NOT_FOUND, "'nobody'"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=types_pb2.Prompt(model="nobody")))

    def test_an_ambiguous_model(self, raw: Raw, request: pytest.FixtureRequest) -> None:
        """Two block sizes of one model are two namespaces (cases 9); which one is meant is not guessed."""
        model = request.node.name
        first = raw.register(spec(model))
        second = raw.register(spec(model, block_size=32))
        assert [each.block_size for each in second.answer.siblings] == [16]
        roots = [peer.answer.namespace.hex() for peer in (first, second)]
        with refused(INVALID, "block size 16", "block size 32", "by its root", *roots):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=types_pb2.Prompt(model=model)))

    def test_an_unknown_root(self, raw: Raw) -> None:
        prompt = types_pb2.Prompt(namespace=b"\x07" * 16, token_ids=PROMPT.tobytes())
        with refused(NOT_FOUND, "07" * 16, "register it"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))

    def test_no_namespace_at_all(self, raw: Raw) -> None:
        with refused(INVALID, "names no namespace", "model"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest())


class TestBatches:
    def test_answers_are_those_of_single_look_ups_in_order(self, raw: Raw, peer: Peer) -> None:
        peer.write(PROMPT)
        prompts = [PROMPT, fork(PROMPT, 3), tokens_of(0), PROMPT[:50]]
        requests = [lookup_pb2.LookupRequest(prompt=peer.prompt(each)) for each in prompts]
        answers = raw.lookup.BatchLookup(lookup_pb2.BatchLookupRequest(requests=requests)).responses
        assert list(answers) == [peer.look_up(each) for each in prompts]
        assert [each.matched_tokens for each in answers] == [128, 48, 0, 48]

    def test_an_empty_batch(self, raw: Raw) -> None:
        assert not raw.lookup.BatchLookup(lookup_pb2.BatchLookupRequest()).responses

    def test_a_batch_beyond_the_limit(self, raw: Raw, peer: Peer) -> None:
        request = lookup_pb2.LookupRequest(prompt=peer.prompt(PROMPT))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "1025", "1024", "split it"):
            raw.lookup.BatchLookup(lookup_pb2.BatchLookupRequest(requests=[request] * 1025))


class TestProbesChangeNothing:
    def test_status_is_as_before(self, raw: Raw, peer: Peer) -> None:
        """Existence probes never pin, count no hit and no miss (cases 19)."""
        peer.write(PROMPT)
        before = raw.await_quiet()
        for prompt in (PROMPT, fork(PROMPT, 3), tokens_of(9, seed=7)):
            peer.look_up(prompt)
            peer.explain(prompt)
        after = raw.status()
        before.ClearField("uptime_seconds")
        after.ClearField("uptime_seconds")
        assert after == before

    def test_probes_keep_nothing_in_memory(self) -> None:
        """What was probed goes first all the same, where what was read stays."""
        big = spec("recency", payload_bytes=60_000)
        with sidecar(pool_bytes="2MiB") as server, dialled(server.address) as raw:
            peer = raw.register(big)
            probed, read, new = (tokens_of(10, seed=seed) for seed in (1, 2, 3))
            peer.write(probed)
            peer.write(read)
            for _ in range(5):
                peer.look_up(probed)
                peer.explain(probed)
            assert set(peer.write(new)) == set(peer.write(tokens_of(6, seed=4))) == {YOURS}
            assert peer.matched(read) == 160
            assert peer.matched(probed) < 160


class TestExplain:
    def test_resident_cold_and_tail(self, peer: Peer) -> None:
        """ "Always 0 cached" can be explained, block by block (cases 39)."""
        peer.write(PROMPT)
        longer = tokens_of(10, tail=3)
        longer[: 8 * 16] = PROMPT[: 8 * 16]
        answer = peer.explain(longer)
        assert (answer.block_size, answer.tail_tokens) == (16, 3)
        assert [each.index for each in answer.blocks] == list(range(10))
        assert [each.block_hash for each in answer.blocks] == opened(peer.chain(longer).hashes)
        assert report(peer, longer) == [([HOST], "", False)] * 8 + [([], "cold", False)] * 2
        for each in answer.blocks:
            assert each.payload_bytes == 1024
            assert each.HasField("age_seconds") == each.HasField("idle_seconds") == (each.index < 8)
            assert 0 <= each.idle_seconds <= each.age_seconds < 60

    def test_a_block_after_a_gap_is_reported_where_it_is(self, peer: Peer) -> None:
        peer.write(PROMPT, first_block=4)
        assert report(peer, PROMPT) == [([], "cold", False)] * 4 + [([HOST], "", False)] * 4

    def test_being_written(self, peer: Peer) -> None:
        begun = peer.begin(PROMPT)
        assert report(peer, PROMPT) == [([], "cold", True)] * 8
        peer.abort(begun.write_id)
        assert report(peer, PROMPT) == [([], "cold", False)] * 8

    def test_a_collision_is_neither_hit_nor_cold(self, raw: Raw, peer: Peer) -> None:
        """Somebody else's tokens under the same hash: a miss that says so (cases 8)."""
        peer.write(PROMPT)
        other = peer.prompt(fork(PROMPT, 2), block_hashes=peer.chain(PROMPT).hashes)
        found = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=other))
        assert found.matched_tokens == found.verified_tokens == 32
        blocks = raw.lookup.Explain(lookup_pb2.ExplainRequest(prompt=other)).blocks
        assert [each.cause for each in blocks] == [""] * 2 + ["collision"] * 6

    def test_what_was_forgotten_may_have_been_there(self, raw: Raw, peer: Peer) -> None:
        """Once something has left, a miss is unknown: it is not called cold."""
        peer.write(PROMPT)
        cleared = raw.admin.Clear(admin_pb2.ClearRequest(namespace=peer.answer.namespace))
        assert (cleared.blocks, cleared.held_blocks) == (8, 0)
        assert report(peer, PROMPT) == [([], "unknown", False)] * 8

    def test_one_rank(self, raw: Raw, request: pytest.FixtureRequest) -> None:
        peer = raw.register(spec(request.node.name), tp_size=2)
        peer.write(PROMPT[:32], Shard(1, 2))
        for rank, there in ((0, 0), (1, 2)):
            answer = peer.explain(PROMPT, shard=types_pb2.Shard(tp_rank=rank, tp_size=2))
            assert [bool(each.tiers) for each in answer.blocks] == [True] * there + [False] * (8 - there)
        assert not any(each.tiers for each in peer.explain(PROMPT).blocks), "the first rank is the default"
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "0.4.0.1"):
            peer.explain(PROMPT, shard=types_pb2.Shard(tp_size=4))


def test_a_restart_keeps_names_and_blocks() -> None:
    """Routers ask on, by root or by name, before any engine has registered again."""
    with sidecar() as server:
        with dialled(server.address) as raw:
            peer = raw.register(spec("kept"))
            peer.write(PROMPT)
        server.restart()
        with dialled(server.address) as raw:
            by_root = peer.prompt(PROMPT)
            by_name = types_pb2.Prompt(model="kept", token_ids=PROMPT.tobytes())
            for prompt in (by_root, by_name):
                answer = raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))
                assert (answer.matched_tokens, answer.verified_tokens) == (128, 128)
            again = raw.register(spec("kept"))
            assert again.answer.namespace == peer.answer.namespace
            assert again.answer.epoch == peer.answer.epoch + 1
            assert raw.status().adopted_blocks == 8
            assert report(again, fork(PROMPT, 7))[7] == ([], "unknown", False)
            again.assert_holds(PROMPT)
            assert eventually(
                lambda: (
                    {(each.asked_tokens, each.hit_tokens) for each in raw.status().what_if} == {(133, 128)}
                )
            ), "what would hit in a pool of another size agrees with what was hit"
