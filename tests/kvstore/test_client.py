"""Every kind of client against a server in another process: what is written is what is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.block import WHOLE, Chain, MissCause, TierName
from kvstore.errors import LeaseError, NamespaceError, WriteError
from kvstore.service.client import BlockStatus, Client, Outcome
from kvstore.service.operator import Operator
from tests.support.clients import (
    FAST,
    KINDS,
    MAPPED,
    STREAMED,
    Kind,
    assert_right,
    client_of,
    empty_payload,
    fill,
    put,
    resident,
)
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stores import SPLIT, hash_only, make_chain, make_spec, payloads_of


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with sidecar() as running:
        yield running


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def client(server: Sidecar, kind: Kind) -> Iterator[Client]:
    with client_of(kind, server.address) as made:
        yield made


def model(kind: Kind, test: str) -> str:
    """A namespace that no other test writes to."""
    return f"{test}-{kind}"


def test_what_is_written_is_read(client: Client, kind: Kind) -> None:
    spec = make_spec(model(kind, "round"))
    namespace, chain = client.namespace(spec), make_chain(spec, "abcde", tail=2)
    write = put(namespace, chain)
    assert (write.outcome, write.committed_blocks) == (Outcome.OK, 5)
    assert namespace.mapped == kind.mapped
    with namespace.acquire(chain) as lease:
        assert_right(lease, chain, 5)
        assert (lease.outcome, lease.tokens, lease.cause, lease.pending) == (Outcome.OK, 20, None, False)
        assert lease.hit_blocks == {TierName.HOST: 5}
    assert client.failures == {}
    assert client.shortened == {}


def test_prompts_may_be_token_ids(client: Client, kind: Kind) -> None:
    spec = make_spec(model(kind, "ids"))
    namespace, chain = client.namespace(spec), make_chain(spec, "ab")
    assert chain.tokens is not None
    ids = [*chain.tokens.reshape(-1).tolist(), 7]
    with namespace.write(ids) as write:
        fill(write, chain)
    with namespace.acquire(ids) as lease:
        assert_right(lease, chain, 2)


def test_payloads_longer_than_a_piece_of_a_stream(client: Client, kind: Kind) -> None:
    size = 700_001
    spec = make_spec(model(kind, "long"), payload_bytes=size)
    namespace, chain = client.namespace(spec), make_chain(spec, "abc")
    assert put(namespace, chain).committed_blocks == 3
    with namespace.acquire(chain) as lease:
        assert_right(lease, chain, 3)


def test_a_write_fills_only_what_is_missing(client: Client, kind: Kind) -> None:
    spec = make_spec(model(kind, "missing"))
    namespace, chain = client.namespace(spec), make_chain(spec, "abcd")
    put(namespace, make_chain(spec, "ab"))
    with namespace.write(chain) as write:
        assert write.status == [BlockStatus.PRESENT] * 2 + [BlockStatus.YOURS] * 2
        with namespace.write(chain, first_block=1) as second:
            assert second.status == [BlockStatus.PRESENT] + [BlockStatus.PENDING] * 2
            assert second.payloads == []
        fill(write, chain)
    assert (second.outcome, second.committed_blocks, write.committed_blocks) == (Outcome.OK, 0, 2)
    with namespace.acquire(chain) as lease:
        assert_right(lease, chain, 4)


def test_nothing_is_visible_before_the_commit_or_after_an_exception(client: Client, kind: Kind) -> None:
    """A store that fails half-way leaves nothing visible (LMCache #4991)."""
    spec = make_spec(model(kind, "aborted"))
    namespace, chain = client.namespace(spec), make_chain(spec, "abc")

    def half() -> None:
        with namespace.write(chain) as write:
            write.payloads[0][:] = 1
            assert resident(namespace, chain) == 0
            raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError, match="the engine failed"):
        half()
    assert resident(namespace, chain) == 0
    put(namespace, chain)
    assert resident(namespace, chain) == 3


def test_places_of_a_write_that_is_over_cannot_be_written(client: Client, kind: Kind) -> None:
    spec = make_spec(model(kind, "over"))
    namespace, chain = client.namespace(spec), make_chain(spec, "a")
    with namespace.write(chain) as write:
        place = write.payloads[0]
        place[:] = 3
    assert write.payloads == []
    with pytest.raises(ValueError, match="read-only"):
        place[:] = 4
    with pytest.raises(WriteError, match="begin another"):
        write.commit()
    write.abort()


def test_a_longer_prompt_hits_its_known_part_and_says_why_it_ends(client: Client, kind: Kind) -> None:
    spec = make_spec(model(kind, "longer"))
    namespace, chain = client.namespace(spec), make_chain(spec, "abxy")
    put(namespace, make_chain(spec, "abcd"))
    with namespace.acquire(chain) as lease:
        assert_right(lease, chain, 2)
        assert lease.cause is MissCause.COLD


def test_a_prompt_with_the_same_hashes_is_no_hit(client: Client, kind: Kind) -> None:
    """A hash collision is a miss with a cause, never another prompt's KV (vllm #12621 #54727)."""
    spec = make_spec(model(kind, "collision"))
    namespace = client.namespace(spec)
    put(namespace, make_chain(spec, "abc", colliding=True))
    with namespace.acquire(make_chain(spec, "aBc", colliding=True)) as lease:
        assert (lease.blocks, lease.cause) == (1, MissCause.COLLISION)


def test_a_lookup_leaves_no_trace(client: Client, kind: Kind, server: Sidecar) -> None:
    """Existence probes never pin (Mooncake #3599); an answer says what was read (case 38)."""
    spec = make_spec(model(kind, "lookup"))
    namespace, chain = client.namespace(spec), make_chain(spec, "abcdef", tail=3)
    put(namespace, make_chain(spec, "abcd"))
    found = namespace.lookup(chain)
    assert (found.outcome, found.block_size, found.prompt_blocks, found.blocks_read) == (Outcome.OK, 4, 6, 6)
    assert (found.matched_tokens, found.verified_tokens) == (16, 16)
    assert [(tier.tier, tier.served_tokens) for tier in found.tiers] == [(TierName.HOST, 16)]
    assert namespace.lookup(chain, max_blocks=3).matched_tokens == 12
    assert namespace.lookup(hash_only(chain)).verified_tokens == 0
    with Operator(server.address) as operator:
        assert operator.status().leases == 0


def test_a_request_is_counted_once_with_what_was_used(client: Client, kind: Kind, server: Sidecar) -> None:
    spec = make_spec(model(kind, "counted"))
    namespace, chain = client.namespace(spec), make_chain(spec, "abcd", tail=3)
    put(namespace, chain)
    with Operator(server.address) as operator:
        before = operator.status()
        lease = namespace.acquire(chain, request_id="once")
        again = namespace.acquire(chain, request_id="once")
        assert operator.status().leases == before.leases + 1
        lease.release(used_blocks=3)
        lease.release()
        again.release()
        after = operator.status()
    assert after.leases == before.leases
    assert after.asked_tokens - before.asked_tokens == 19
    assert after.hit_tokens.get("host", 0) - before.hit_tokens.get("host", 0) == 12


def test_ranks_agree_on_the_shortest_run(client: Client, kind: Kind) -> None:
    """A hit is the minimum over ranks (LMCache #1467 #1379)."""
    spec = make_spec(model(kind, "ranks"))
    namespace, chain = client.namespace(spec, tp_size=2), make_chain(spec, "abc")
    put(namespace, chain, SPLIT[0])
    assert resident(namespace, chain) == 0
    put(namespace, make_chain(spec, "ab"), SPLIT[1])
    with namespace.acquire(chain) as lease:
        for shard in SPLIT:
            assert_right(lease, chain, 2, shard)
        with pytest.raises(LeaseError, match=r"not on 0\.1\.0\.1"):
            lease.views(WHOLE)


def test_an_unknown_prompt_holds_nothing(client: Client, kind: Kind, server: Sidecar) -> None:
    spec = make_spec(model(kind, "cold"))
    namespace = client.namespace(spec)
    with namespace.acquire(make_chain(spec, "ab")) as lease:
        assert (lease.outcome, lease.blocks, lease.cause) == (Outcome.OK, 0, MissCause.COLD)
        assert lease.views() == []
        assert lease.copy_out([empty_payload()]) == 0
    with namespace.acquire(make_chain(spec, "")) as lease:
        assert (lease.blocks, lease.hit_blocks) == (0, {})
    with namespace.write(make_chain(spec, "")) as write:
        assert write.status == []
    assert write.outcome is Outcome.OK


def test_mistakes_of_the_caller_raise(client: Client, kind: Kind) -> None:
    spec = make_spec(model(kind, "mistakes"))
    namespace, chain = client.namespace(spec), make_chain(spec, "ab")
    put(namespace, chain)
    foreign = make_chain(make_spec("other"), "ab")
    with pytest.raises(NamespaceError, match="namespace's own root"):
        namespace.acquire(foreign)
    with pytest.raises(WriteError, match="no token ids"):
        namespace.write(hash_only(chain))
    with pytest.raises(WriteError, match="start the write inside"):
        namespace.write(chain, first_block=3)
    with pytest.raises(WriteError, match="cut over shards"):
        namespace.write(chain, shard=SPLIT[1])
    with namespace.acquire(chain, request_id="taken"), pytest.raises(LeaseError, match="taken"):
        namespace.acquire(make_chain(spec, "xy"), request_id="taken")
    with (
        namespace.acquire(chain) as lease,
        pytest.raises(LeaseError, match="one array of the payload's bytes"),
    ):
        lease.copy_out([np.zeros(3, dtype=np.uint8)])
    with pytest.raises(LeaseError, match="released"):
        lease.views()
    with pytest.raises(NamespaceError, match="KV heads"):
        client.namespace(make_spec("uneven", payload_bytes=None), tp_size=3).acquire(chain)
    assert resident(namespace, chain) == 2


def test_a_hash_only_chain_reads_where_rows_can_be_compared(server: Sidecar) -> None:
    """A client that streams has to send token ids, since the server compares for it."""
    spec = make_spec("hashes")
    chain = make_chain(spec, "abc")
    with client_of(MAPPED, server.address) as client:
        namespace = client.namespace(spec)
        put(namespace, chain)
        with namespace.acquire(hash_only(chain)) as lease:
            assert_right(lease, chain, 3)
    with client_of(STREAMED, server.address) as client, pytest.raises(LeaseError, match="token ids"):
        client.namespace(spec).acquire(hash_only(chain))


def test_many_threads_share_one_client(server: Sidecar) -> None:
    """Each thread writes prompts that overlap with the others', and reads none but its own bytes."""
    spec = make_spec("threads")
    problems: list[BaseException] = []

    def work(client: Client, thread: int) -> None:
        namespace = client.namespace(spec)
        try:
            for turn in range(12):
                chain = make_chain(spec, "ab" + chr(0x3000 + turn % 5) + chr(0x4000 + thread))
                put(namespace, chain)
                with namespace.acquire(chain) as lease:
                    assert_right(lease, chain, lease.blocks)
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    with Client(server.address, options=FAST) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert problems == []
        assert client.failures == {}
    with Operator(server.address) as operator:
        status = operator.status()
        assert (status.leases, status.writes) == (0, 0)


def test_closing_releases_everything_and_keeps_what_is_in_use(server: Sidecar) -> None:
    spec = make_spec("closing")
    chain = make_chain(spec, "abc")
    client = Client(server.address, options=FAST)
    namespace = client.namespace(spec)
    put(namespace, chain)
    lease = namespace.acquire(chain)
    views = lease.views()
    with Operator(server.address) as operator:
        assert operator.status().leases == 1
        client.close()
        client.close()
        assert operator.status().leases == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-renewal"]
    assert views[0].tobytes() == bytes(empty_payload() + views[0])
    assert lease.valid() == 0
    with pytest.raises(Exception, match="is closed; make another"):
        namespace.acquire(chain)


def test_root_and_siblings_come_with_the_registration(server: Sidecar) -> None:
    """Different block sizes of one model are two namespaces, each told of the other (dynamo #1233)."""
    small, large = make_spec("siblings", block_size=4), make_spec("siblings", block_size=8)
    with Client(server.address, options=FAST) as client:
        client.namespace(small).register()
        namespace = client.namespace(large)
        assert namespace.root is None
        assert namespace.register() is Outcome.OK
        assert namespace.root == large.root
        assert [spec.block_size for spec in namespace.siblings] == [4]
        assert isinstance(Chain.of(namespace.root, [1] * 8), Chain)


def test_a_write_is_filled_and_summed_in_one_pass(client: Client, kind: Kind) -> None:
    spec = make_spec(model(kind, "copied"))
    namespace, chain = client.namespace(spec), make_chain(spec, "abcd")
    sources = payloads_of(chain.rows(WHOLE))
    with namespace.write(chain) as write:
        with pytest.raises(WriteError, match="3 payloads were given for 4 blocks"):
            write.copy_in(sources[:3])
        with pytest.raises(WriteError, match="a payload has 3 bytes, expected 1024"):
            write.copy_in([*sources[:3], b"abc"])
        with pytest.raises(WriteError, match=r"a payload is a str \(.*\), expected a buffer of 1024 bytes"):
            write.copy_in(["a" * 1024, *sources[1:]])  # type: ignore[list-item]
        with pytest.raises(WriteError, match="a payload is a ndarray"):
            write.copy_in([np.array([None] * 8), *sources[1:]])
        as_floats, apart = sources[0].view(np.float32).reshape(16, 16), np.repeat(sources[1], 2)[::2]
        write.copy_in([as_floats, apart, sources[2].tobytes(), sources[3].data])
    assert write.committed_blocks == 4
    with namespace.acquire(chain) as lease:
        assert_right(lease, chain, 4)
