"""What requests say of their own future, from the client's call to the policy that decides by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.block import WHOLE, TierName
from kvstore.errors import HintsError, LeaseError
from kvstore.events import RequestSettled
from kvstore.evict.base import Occupancy, Touch
from kvstore.evict.lru import LRU
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client import Client, ClientNamespace
from kvstore.v1 import block_pb2
from tests.support.block_server import block_server
from tests.support.clients import OPPOSITES, Kind, client_of, fill, put
from tests.support.stores import FakeClock, Recorder, Rig, make_chain, make_rig, make_spec
from tests.support.stubs import dialled, refused, spec, tokens_of

SPEC = make_spec()
CHAIN = make_chain(SPEC, "abcd")
ENDED = Hints(ended=True, priority=-8, idle_seconds=0.0)
LATER = Hints(priority=8, idle_seconds=30.5)
WRONG = [Hints(priority=9), Hints(priority=-9), Hints(idle_seconds=-1.0), Hints(idle_seconds=float("inf"))]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class Heard(LRU):
    """A policy that remembers what it was told."""

    def __init__(self, occupancy: Occupancy) -> None:
        super().__init__(occupancy)
        self.touches: list[Touch] = []
        self.later: list[Touch] = []

    def touch(self, touch: Touch) -> None:
        self.touches.append(touch)
        super().touch(touch)

    def hint(self, touch: Touch) -> None:
        self.later.append(touch)


class Ears:
    """The policies of one pool, and its events."""

    def __init__(self) -> None:
        self.made: list[Heard] = []
        self.events = Recorder()

    def __call__(self, occupancy: Occupancy) -> Heard:
        self.made.append(Heard(occupancy))
        return self.made[-1]

    @property
    def policy(self) -> Heard:
        [policy] = self.made
        return policy

    def later(self) -> list[tuple[bytes, int, Hints]]:
        """(Hashes, resident blocks, hints) of each hint that came after its request."""
        return [(each.hashes, len(each.slots), each.hints) for each in self.policy.later]

    def settled(self) -> list[Hints]:
        return [event.hints for event in self.events.of(RequestSettled)]


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture(params=OPPOSITES, ids=str)
def client(request: pytest.FixtureRequest, ears: Ears, tmp_path: Path) -> Iterator[Client]:
    kind: Kind = request.param
    with block_server(tmp_path, ears, ears.events) as address, client_of(kind, address) as made:
        yield made


@pytest.fixture
def namespace(client: Client) -> ClientNamespace:
    return client.namespace(SPEC)


class TestClient:
    def test_those_of_the_acquire_come_with_the_request(self, namespace: ClientNamespace, ears: Ears) -> None:
        put(namespace, CHAIN)
        with namespace.acquire(CHAIN, hints=LATER):
            pass
        [seen] = ears.policy.touches
        assert (seen.hints, ears.later(), ears.settled()) == (LATER, [], [LATER])

    def test_those_of_the_release_replace_them(self, namespace: ClientNamespace, ears: Ears) -> None:
        put(namespace, CHAIN)
        lease = namespace.acquire(CHAIN, hints=LATER)
        lease.release(hints=ENDED)
        lease.release(hints=LATER)
        assert ears.later() == [(CHAIN.hashes, 4, ENDED)]
        assert ears.settled() == [ENDED]

    def test_those_of_a_commit_name_the_whole_prompt(self, namespace: ClientNamespace, ears: Ears) -> None:
        put(namespace, make_chain(SPEC, "ab"))
        write = namespace.write(CHAIN, first_block=2)
        fill(write, CHAIN, first_block=2)
        write.commit(hints=ENDED)
        assert write.committed_blocks == 2
        assert ears.later() == [(CHAIN.hashes, 4, ENDED)]

    def test_a_prompt_that_was_there_already_may_end_too(
        self, namespace: ClientNamespace, ears: Ears
    ) -> None:
        put(namespace, CHAIN)
        write = namespace.write(CHAIN)
        write.commit(ENDED)
        assert ears.later() == [(CHAIN.hashes, 4, ENDED)]

    @pytest.mark.parametrize("hints", WRONG)
    def test_what_is_out_of_range_is_an_error_before_anything_happens(
        self, namespace: ClientNamespace, ears: Ears, hints: Hints
    ) -> None:
        what = "hints.priority is -?9, expected -8 … 8" if hints.priority else "hints.idle_seconds is"
        put(namespace, CHAIN)
        with pytest.raises(HintsError, match=what):
            namespace.acquire(CHAIN, hints=hints)
        lease = namespace.acquire(CHAIN)
        with pytest.raises(HintsError, match=what):
            lease.release(hints=hints)
        assert lease.valid() == 4
        lease.release()
        longer = make_chain(SPEC, "abcde")
        write = namespace.write(longer)
        fill(write, longer)
        with pytest.raises(HintsError, match=what):
            write.commit(hints)
        write.commit()
        assert write.committed_blocks == 1
        assert (ears.later(), ears.settled()) == ([], [NO_HINTS])


def test_any_client_is_told_what_is_out_of_range(ears: Ears, tmp_path: Path) -> None:
    tokens, wrong = tokens_of(4), block_pb2.Hints(priority=1 << 30)
    said = ("hints.priority is 1073741824", "expected -8 … 8", "choose one in that range")
    with block_server(tmp_path, ears) as address, dialled(address) as raw:
        peer = raw.register(spec("m"))
        begun = peer.begin(tokens)
        with refused(INVALID, *said):
            raw.blocks.CommitWrite(
                block_pb2.CommitWriteRequest(**peer.me, write_id=begun.write_id, hints=wrong)
            )
        peer.abort(begun.write_id)
        peer.write(tokens)
        with refused(INVALID, *said):
            peer.acquire(tokens, "r", hints=wrong)
        lease = peer.hold(tokens, "r")
        with refused(INVALID, *said):
            raw.blocks.Release(block_pb2.ReleaseRequest(**peer.me, lease_id=lease, hints=wrong))
        assert peer.renew(lease) == [], "it is not ended"
        raw.blocks.Release(block_pb2.ReleaseRequest(**peer.me, lease_id=lease, hints=block_pb2.Hints()))
        assert [each.hints for each in ears.policy.later] == [NO_HINTS], "said, and nothing"


class TestStore:
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        with make_rig(FakeClock(), [(SPEC, (WHOLE,))]) as made:
            made.write(CHAIN)
            yield made
            made.store.check()

    def test_a_policy_that_takes_no_late_hints_goes_without(self, rig: Rig) -> None:
        rig.store.release(rig.store.acquire("r", CHAIN), hints=ENDED)
        [settled] = rig.events.of(RequestSettled)
        assert (settled.hints, settled.hit_tokens) == (ENDED, {TierName.HOST: 16})

    @pytest.mark.parametrize("hints", WRONG)
    def test_what_is_out_of_range_changes_nothing(self, rig: Rig, hints: Hints) -> None:
        with pytest.raises(HintsError):
            rig.store.acquire("r", CHAIN, hints=hints)
        assert rig.store.leases == 0
        lease = rig.store.acquire("r", CHAIN)
        with pytest.raises(HintsError):
            rig.store.release(lease, hints=hints)
        rig.store.renew(lease)
        rig.store.release(lease)
        with pytest.raises(LeaseError, match="is over"):
            rig.store.renew(lease)
