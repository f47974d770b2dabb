"""Tenants of a sidecar: who gets in, what each can reach, and what each is guaranteed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.v1 import admin_pb2, block_pb2, lookup_pb2, types_pb2
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import (
    BLOCK_SIZE,
    HOST,
    YOURS,
    Credentials,
    Peer,
    Raw,
    dialled,
    refused,
    spec,
    tokens_of,
)
from tests.support.tenants import Entry, write_tenants
from tests.support.valkey import eventually

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION

PROMPT = tokens_of(8, tail=3)
BLOCK_BYTES = 60_032
"""A slot of ``big``: 60,000 bytes of payload, aligned."""
SHARE_BLOCKS = 20


SEARCH = Entry("search")
CHAT = Entry("chat", f"share_bytes = {SHARE_BLOCKS * BLOCK_BYTES}\nmaps_pool = true\n")
FORMER = Entry("former", "expires = 2020-01-01T00:00:00Z\n")
OPS = Entry("ops", "admin = true\n")


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tenants(tmp_path_factory.mktemp("tenants") / "tenants.toml", SEARCH, CHAT, FORMER, OPS)


@pytest.fixture(scope="module")
def server(tenants_file: Path) -> Iterator[Sidecar]:
    with sidecar(tenants_file=str(tenants_file), pool_bytes="4MiB") as server:
        yield server


def caller(server: Sidecar, entry: Entry) -> Raw:
    return Raw(server.address, Credentials(entry.token))


@pytest.fixture(scope="module")
def search(server: Sidecar) -> Iterator[Raw]:
    raw = caller(server, SEARCH)
    yield raw
    raw.close()


@pytest.fixture(scope="module")
def chat(server: Sidecar) -> Iterator[Raw]:
    raw = caller(server, CHAT)
    yield raw
    raw.close()


@pytest.fixture(scope="module")
def ops(server: Sidecar) -> Iterator[Raw]:
    raw = caller(server, OPS)
    yield raw
    raw.close()


def big(model: str) -> block_pb2.NamespaceSpec:
    return spec(model, payload_bytes=60_000)


class TestTokens:
    def test_the_right_one(self, search: Raw) -> None:
        peer = search.register(spec("right"))
        assert peer.write(PROMPT) == [YOURS] * 8
        assert peer.matched(PROMPT) == 128

    @pytest.mark.parametrize("token", ["wrong-token-0123456789abcdef", "", SEARCH.token + "x", "~ !"])
    def test_a_wrong_one(self, server: Sidecar, token: str) -> None:
        with dialled(server.address, Credentials(token)) as raw:
            for call in (
                lambda: raw.register(spec("wrong")),
                lambda: raw.lookup.Lookup(lookup_pb2.LookupRequest()),
                raw.status,
                lambda: next(raw.blocks.ReadBlocks(block_pb2.ReadBlocksRequest())),
                lambda: raw.blocks.WriteBlocks(iter([block_pb2.WriteBlocksRequest()])),
                lambda: next(raw.admin.WatchEvents(admin_pb2.WatchEventsRequest())),
            ):
                with refused(UNAUTHENTICATED, "unknown", "tenants file"):
                    call()

    def test_none(self, server: Sidecar) -> None:
        """Also on the unix socket: where there are tenants, a caller is one of them."""
        with dialled(server.address) as raw:
            with refused(UNAUTHENTICATED, "no token", "authorization: Bearer"):
                raw.status()
            with refused(UNAUTHENTICATED, "no token"):
                raw.register(spec("none"))

    def test_one_that_has_expired(self, server: Sidecar) -> None:
        with dialled(server.address, Credentials(FORMER.token)) as raw, refused(UNAUTHENTICATED, "expired"):
            raw.register(spec("expired"))

    @pytest.mark.parametrize(
        "value", [SEARCH.token, f"Basic {SEARCH.token}", "Bearer", "bearer", b"\xff\xfe\x00", "B" * 4000]
    )
    def test_what_is_no_bearer_token(self, server: Sidecar, value: str | bytes) -> None:
        key = "authorization-bin" if isinstance(value, bytes) else "authorization"
        with dialled(server.address) as raw, refused(UNAUTHENTICATED, "authorization: Bearer"):
            raw.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=((key, value),))

    def test_case_and_spaces_around_it_do_not_matter(self, server: Sidecar) -> None:
        with dialled(server.address) as raw:
            metadata = (("authorization", f"bEARER   {OPS.token} "),)
            raw.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata)

    def test_a_token_is_in_no_answer(self, server: Sidecar) -> None:
        with dialled(server.address, Credentials("secret-token-0123456789")) as raw:
            with pytest.raises(grpc.RpcError) as caught:
                raw.status()
            assert "secret-token" not in str(caught.value)


class TestWalls:
    """A tenant reaches nothing of another's, whatever it knows of it."""

    @pytest.fixture
    def theirs(self, chat: Raw, request: pytest.FixtureRequest) -> Peer:
        peer = chat.register(spec(request.node.name))
        peer.write(PROMPT)
        return peer

    @pytest.fixture
    def ours(self, search: Raw, theirs: Peer) -> Peer:
        """Of the same model, in the other tenant, under the same client number."""
        return search.register(theirs.request.spec, client=theirs.request.client)

    def test_the_same_model_is_two_namespaces(self, ours: Peer, theirs: Peer) -> None:
        """The salt is part of the root, and the root all that a client learns of it (cases 7)."""
        assert ours.answer.namespace != theirs.answer.namespace
        assert ours.chain(PROMPT).hashes != theirs.chain(PROMPT).hashes
        assert not ours.answer.siblings
        assert CHAT.salt not in theirs.answer.SerializeToString()

    def test_their_blocks_are_not_found(self, search: Raw, ours: Peer, theirs: Peer) -> None:
        assert ours.matched(PROMPT) == 0
        assert ours.acquire(PROMPT, "r").blocks == 0
        assert [each.cause for each in ours.explain(PROMPT).blocks] == ["cold"] * 8
        stolen = types_pb2.Prompt(
            namespace=ours.answer.namespace, block_hashes=theirs.chain(PROMPT).hashes, prompt_tokens=131
        )
        found = search.lookup.Lookup(lookup_pb2.LookupRequest(prompt=stolen))
        assert found.matched_tokens == 0, "hashes are looked for in their namespace only"

    def test_their_root_opens_nothing(self, search: Raw, ours: Peer, theirs: Peer) -> None:
        """Nor does it tell whether they have it: it is unknown, as any other."""
        calls: list[Callable[[types_pb2.Prompt], Any]] = [
            lambda prompt: search.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt)),
            lambda prompt: search.lookup.BatchLookup(
                lookup_pb2.BatchLookupRequest(requests=[lookup_pb2.LookupRequest(prompt=prompt)])
            ),
            lambda prompt: search.lookup.Explain(lookup_pb2.ExplainRequest(prompt=prompt)),
            lambda prompt: ours.acquire(PROMPT, "r", prompt=prompt),
            lambda prompt: ours.begin(PROMPT, prompt=prompt),
            lambda prompt: search.blocks.Prefetch(block_pb2.PrefetchRequest(prompt=prompt)),
        ]
        for call in calls:
            for prompt in (theirs.prompt(PROMPT), theirs.hashes(PROMPT)):
                with refused(NOT_FOUND, theirs.answer.namespace.hex(), "register it"):
                    call(prompt)

    def test_their_model_names_are_not_told(self, search: Raw, chat: Raw) -> None:
        chat.register(spec("a secret project"))
        request = lookup_pb2.LookupRequest(prompt=types_pb2.Prompt(model="a secret projekt"))
        with pytest.raises(grpc.RpcError) as caught:
            search.lookup.Lookup(request)
        status: Any = caught.value
        assert status.code() is NOT_FOUND
        assert status.details().count("secret") == 1, "the name that was asked, and no other"

    def test_their_leases_and_writes_are_out_of_reach(self, ours: Peer, theirs: Peer) -> None:
        """Client numbers of two tenants may be the same, and name two clients."""
        lease = theirs.hold(PROMPT, "r")
        other = tokens_of(4, seed=3)
        begun = theirs.begin(other)
        with refused(NOT_FOUND, str(lease)):
            ours.read(lease)
        assert ours.renew(lease) == [lease]
        ours.release(lease)
        ours.abort(begun.write_id)
        with refused(PRECONDITION, str(begun.write_id)):
            ours.send(begun.write_id, [b"\0" * 4096])
        with refused(PRECONDITION, str(begun.write_id)):
            ours.commit(begun.write_id, [0] * 4)
        assert theirs.renew(lease) == []
        assert theirs.read(lease)[0] == b"".join(theirs.payloads(PROMPT))
        theirs.abort(begun.write_id)
        theirs.release(lease)

    def test_only_an_admin_clears(self, search: Raw, ops: Raw, theirs: Peer) -> None:
        """Nobody can clear the cache without being told apart (cases 41)."""
        request = admin_pb2.ClearRequest(namespace=theirs.answer.namespace)
        for raw in (search, theirs.raw):
            with refused(DENIED, "admin"):
                raw.admin.Clear(request)
        assert theirs.matched(PROMPT) == 128
        assert ops.admin.Clear(request).blocks == 8
        assert theirs.matched(PROMPT) == 0


class TestAdmins:
    def test_every_admin_call_is_refused_to_others(self, search: Raw) -> None:
        """No way to clear the cache or see inside without being allowed to (LMCache PR #2757 #2269)."""
        prompt = types_pb2.Prompt(model="none")
        calls: list[Callable[[], Any]] = [
            lambda: search.admin.GetStatus(admin_pb2.GetStatusRequest()),
            lambda: search.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()),
            lambda: search.admin.Clear(admin_pb2.ClearRequest()),
            lambda: search.admin.Pin(admin_pb2.PinRequest(name="p", prompt=prompt)),
            lambda: search.admin.Unpin(admin_pb2.UnpinRequest(name="p")),
            lambda: search.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="search", share_bytes=1)),
            lambda: next(search.admin.WatchEvents(admin_pb2.WatchEventsRequest())),
        ]
        for call in calls:
            with refused(DENIED, "admin = true"):
                call()

    def test_namespaces_are_listed_with_their_tenants(self, ops: Raw, search: Raw, chat: Raw) -> None:
        for raw in (search, chat):
            raw.register(spec("listed")).write(PROMPT)
        listed = ops.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces
        found = [each for each in listed if each.spec.model == "listed"]
        assert sorted(each.tenant for each in found) == ["chat", "search"]
        for each in found:
            assert [(tier.tier, tier.blocks) for tier in each.tiers] == [(HOST, 8)]
            assert each.payload_bytes == 8 * 1024
            assert each.spec == spec("listed")

    def test_without_tenants_the_unix_socket_is_the_admins(self, tmp_path: Path) -> None:
        listen = f"unix:{tmp_path}/socket,127.0.0.1:0"
        with sidecar(listen=listen) as server:
            by_socket, by_port = server.serving["addresses"]
            with dialled(by_socket) as raw, dialled(by_port) as other:
                assert raw.status().tenants == []
                peer = other.register(spec("m"))
                assert peer.write(PROMPT) == [YOURS] * 8
                assert peer.matched(PROMPT) == 128
                with refused(DENIED, "unix socket"):
                    other.status()
                with refused(DENIED, "unix socket"):
                    other.admin.Clear(admin_pb2.ClearRequest())
                with refused(INVALID, "no tenants"):
                    raw.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="search", share_bytes=1))


class TestMaps:
    def test_only_a_tenant_of_the_trust_domain_gets_the_file(self, search: Raw, chat: Raw, ops: Raw) -> None:
        """Who maps the pool file can read and damage what all tenants stored."""
        assert chat.register(spec("mapped"), can_map=True).answer.pool_path == ops.status().pool_path
        assert chat.register(spec("mapped"), can_map=False).answer.pool_path == ""
        outsider = search.register(spec("mapped"), can_map=True)
        assert outsider.answer.pool_path == ""
        outsider.write(PROMPT)
        answer = outsider.acquire(PROMPT, "r")
        assert (answer.blocks, list(answer.shards)) == (8, [])
        begun = outsider.begin(tokens_of(2, seed=8))
        assert begun.offsets == b""
        outsider.abort(begun.write_id)
        outsider.release(answer.lease_id)


def flood(peer: Peer, first_seed: int) -> None:
    """Write more than the pool holds."""
    for seed in range(first_seed, first_seed + 10):
        peer.write(tokens_of(10, seed=seed))


def shares(ops: Raw) -> dict[str, tuple[int, int]]:
    return {each.name: (each.share_bytes, each.ready_bytes) for each in ops.status().tenants}


class TestShares:
    """The pool has room for about 65 blocks; chat is guaranteed 20."""

    def test_nobody_is_pushed_below_its_share(self, search: Raw, chat: Raw, ops: Raw) -> None:
        ops.admin.Clear(admin_pb2.ClearRequest())
        guaranteed, pushing = chat.register(big("share")), search.register(big("share"))
        for seed in (1, 2):
            assert guaranteed.write(tokens_of(10, seed=seed)) == [YOURS] * 10
        flood(pushing, 100)
        assert [guaranteed.matched(tokens_of(10, seed=seed)) for seed in (1, 2)] == [160, 160]
        assert pushing.matched(tokens_of(10, seed=109)) == 160, "who pushes has the rest"
        found = shares(ops)
        assert found["chat"] == (SHARE_BLOCKS * BLOCK_BYTES, SHARE_BLOCKS * 60_000)
        assert found["search"][0] == 0

    def test_what_exceeds_a_share_goes_like_everybodys(self, search: Raw, chat: Raw, ops: Raw) -> None:
        ops.admin.Clear(admin_pb2.ClearRequest())
        guaranteed, pushing = chat.register(big("beyond")), search.register(big("beyond"))
        prompts = [tokens_of(10, seed=seed) for seed in range(1, 6)]
        for prompt in prompts:
            guaranteed.write(prompt)
        assert shares(ops)["chat"][1] == 50 * 60_000
        flood(pushing, 200)
        kept = sum(guaranteed.matched(prompt) for prompt in prompts) // BLOCK_SIZE
        assert SHARE_BLOCKS <= kept < 50
        assert [guaranteed.matched(prompt) for prompt in prompts[-2:]] == [160, 160], "the last used stay"

    def test_a_tenant_fills_its_own_share_anew(self, search: Raw, chat: Raw, ops: Raw) -> None:
        ops.admin.Clear(admin_pb2.ClearRequest())
        guaranteed, pushing = chat.register(big("anew")), search.register(big("anew"))
        guaranteed.write(tokens_of(10, seed=1))
        flood(pushing, 300)
        for seed in range(2, 8):
            assert guaranteed.write(tokens_of(10, seed=seed)) == [YOURS] * 10
        assert guaranteed.matched(tokens_of(10, seed=7)) == 160

    def test_a_quota_is_set_anew_and_holds_at_once(self, search: Raw, chat: Raw, ops: Raw) -> None:
        ops.admin.Clear(admin_pb2.ClearRequest())
        theirs, pushing = search.register(big("quota")), chat.register(big("quota"))
        prompts = [tokens_of(10, seed=seed) for seed in (1, 2, 3)]
        for prompt in prompts:
            theirs.write(prompt)
        ops.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="search", share_bytes=30 * BLOCK_BYTES))
        try:
            flood(pushing, 400)
            assert shares(ops)["search"] == (30 * BLOCK_BYTES, 30 * 60_000)
            assert [theirs.matched(prompt) for prompt in prompts] == [160] * 3
        finally:
            ops.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="search", share_bytes=0))
        flood(pushing, 500)
        share, ready = shares(ops)["search"]
        assert (share, ready < 30 * 60_000) == (0, True)

    def test_a_quota_beyond_the_pool(self, ops: Raw) -> None:
        with refused(PRECONDITION, "the pool has 4 MiB", "pool_bytes", "lower"):
            ops.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="search", share_bytes=4 << 20))
        with refused(PRECONDITION, str((1 << 64) - 1)):
            ops.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="search", share_bytes=(1 << 64) - 1))
        assert shares(ops)["search"][0] == 0

    def test_a_quota_for_nobody(self, ops: Raw) -> None:
        with refused(INVALID, "'nobody'", "'chat'", "'search'"):
            ops.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant="nobody", share_bytes=1))

    def test_shares_outlive_a_restart(self, tenants_file: Path) -> None:
        """Blocks that were taken over are their tenant's before anybody has registered."""
        with sidecar(tenants_file=str(tenants_file), pool_bytes="4MiB") as server:
            with dialled(server.address, Credentials(CHAT.token)) as raw:
                peer = raw.register(big("kept"))
                for seed in (1, 2):
                    peer.write(tokens_of(10, seed=seed))
            server.restart()
            with dialled(server.address, Credentials(SEARCH.token)) as raw:
                pushing = raw.register(big("kept"))
                assert pushing.matched(tokens_of(10, seed=1)) == 0
                flood(pushing, 100)
            with dialled(server.address, Credentials(CHAT.token)) as raw:
                again = raw.register(big("kept"))
                assert again.answer.namespace == peer.answer.namespace
                assert [again.matched(tokens_of(10, seed=seed)) for seed in (1, 2)] == [160, 160]
            with dialled(server.address, Credentials(OPS.token)) as raw:
                assert shares(raw)["chat"][1] == SHARE_BLOCKS * 60_000


def test_clients_of_every_tenant_are_quiet_in_the_end(ops: Raw) -> None:
    assert eventually(
        lambda: (ops.status().leases, ops.status().writes, ops.pool().leased_bytes) == (0, 0, 0)
    )
