"""Hashes that lie, forced by a stub algorithm: a miss with its cause, never another prompt's KV.

``make_chain(colliding=True)`` hashes a capital like its small letter. (vllm #12621 #54727, aibrix #749)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hashing import fingerprint_blocks, hash_blocks
from kvstore.block import WHOLE, Chain, MissCause, TierName
from kvstore.events import BlocksDropped, DropCause, RemovalCause, RequestSettled
from kvstore.store import BlockStatus
from tests.support.dict_tier import DictTier
from tests.support.stores import FakeClock, Rig, RigOptions, make_chain, make_rig, make_spec, tokens_of

SPEC = make_spec()
LARGE = make_spec("large", payload_bytes=4096, block_size=8)


@pytest.fixture
def redis() -> DictTier:
    return DictTier()


@pytest.fixture
def rig(redis: DictTier) -> Iterator[Rig]:
    """Two extents of 4 blocks in the host tier, 16 blocks in the device tier."""
    options = RigOptions(2, 1, 8 << 10, 16 << 10, redis)
    with make_rig(FakeClock(), [(SPEC, (WHOLE,))], options) as made:
        yield made
        made.settle()
        made.store.check()


def chain_of(letters: str) -> Chain:
    return make_chain(SPEC, letters, colliding=True)


def ask(rig: Rig, letters: str) -> tuple[int, MissCause | None]:
    """(blocks of the hit, cause of the miss) of one request, whose every byte is checked."""
    lease = rig.store.acquire(letters, chain_of(letters))
    rig.settle()
    rig.assert_promised(lease)
    rig.store.release(lease)
    settled = rig.events.of(RequestSettled)[-1]
    assert sum(settled.hit_tokens.values()) == lease.tokens
    assert sum(settled.miss_tokens.values()) == 4 * len(letters) - lease.tokens
    return lease.blocks, next(iter(settled.miss_tokens), None)


def test_the_stub_collides_and_the_fingerprint_does_not() -> None:
    one, other = chain_of("abcd"), chain_of("aBcd")
    assert one.hashes == other.hashes
    assert one.fingerprints is not None
    assert other.fingerprints is not None
    assert (one.fingerprints == other.fingerprints).tolist() == [True, False, False, False]


def test_a_block_of_its_own_tokens(rig: Rig) -> None:
    rig.write(chain_of("abcd"))
    assert ask(rig, "aBcd") == (1, MissCause.COLLISION)
    assert ask(rig, "abcd") == (4, None)
    assert rig.store.lookup(chain_of("aBcd"), tiers={TierName.HOST}).matched == 4


def test_a_writer_is_refused_from_there_on(rig: Rig) -> None:
    rig.write(chain_of("abcd"))
    status = rig.write(chain_of("aBcdef"))
    assert status == [BlockStatus.PRESENT] + [BlockStatus.REFUSED] * 5
    assert [event.cause for event in rig.events.of(BlocksDropped)] == [DropCause.COLLISION]
    assert ask(rig, "abcd") == (4, None)


def test_a_middle_block_whose_parent_is_in_redis_only(rig: Rig, redis: DictTier) -> None:
    """Hash, tokens and parent of ``c`` agree; it was computed over ``b``, and redis has ``B`` by now."""
    rig.write(chain_of("abcd"))
    rig.settle()
    slots = rig.host.pool.match(chain_of("abcd").rows(WHOLE)).slots
    rig.host.pool.discard(slots[:2], RemovalCause.CLEARED)
    with make_rig(FakeClock(), [(SPEC, (WHOLE,))], RigOptions(redis=redis)) as neighbour:
        redis.discard(chain_of("abcd").rows(WHOLE, 1, 4), 0.0)
        neighbour.write(chain_of("aB"))
        neighbour.settle()
    assert ask(rig, "aBcd") == (2, MissCause.COLLISION)


def test_a_parent_in_redis_that_is_the_other_prompts(rig: Rig, redis: DictTier) -> None:
    rig.write(chain_of("abcd"))
    rig.settle()
    slots = rig.host.pool.match(chain_of("abcd").rows(WHOLE)).slots
    rig.host.pool.discard(slots[:2], RemovalCause.CLEARED)
    assert ask(rig, "aBcd") == (1, MissCause.COLLISION)
    assert ask(rig, "abcd") == (4, None)


def test_a_parent_that_was_reclaimed_and_written_anew_by_the_other_prompt() -> None:
    """Orphans are adopted by hash: of all that is compared, only the fingerprint is another."""
    clock = FakeClock()
    specs = [(SPEC, (WHOLE,)), (LARGE, (WHOLE,))]
    with make_rig(clock, specs, RigOptions(host_extents=3, extent_bytes=8 << 10)) as rig:
        for letters in ("abcdefgh", "wxyz"):
            rig.write(chain_of(letters))
            clock.advance(1)
        rig.write(make_chain(LARGE, "x"))
        assert rig.resident(rig.host, chain_of("abcdefgh")) == 0, "the extent of abcd has another slot size"
        rig.host.pool.evict(rig.host.pool.extents.classes()[-1], 1)
        assert rig.write(chain_of("aBcdefgh")) == [BlockStatus.YOURS] * 4 + [BlockStatus.REFUSED] * 4
        assert ask(rig, "aBcdefgh") == (4, MissCause.COLLISION)
        assert ask(rig, "abcdefgh") == (1, MissCause.COLLISION)
        rig.store.check()


def test_orphans_are_not_the_other_prompts(rig: Rig, redis: DictTier) -> None:
    rig.write(chain_of("abcd"))
    rig.settle()
    redis.values.clear()
    slots = rig.host.pool.match(chain_of("abcd").rows(WHOLE)).slots
    rig.host.pool.discard(slots[1:2], RemovalCause.RECLAIMED)
    assert rig.write(chain_of("aBcd")) == [
        BlockStatus.PRESENT,
        BlockStatus.YOURS,
        BlockStatus.REFUSED,
        BlockStatus.REFUSED,
    ]
    assert ask(rig, "aBcd") == (2, MissCause.COLLISION)
    assert ask(rig, "abcd") == (1, MissCause.COLLISION)


def test_computed_blocks_behind_a_collision_are_not_read_by_the_other(rig: Rig) -> None:
    first = rig.store.acquire("1", chain_of("abcd"))
    rig.publish(first, 0, 4)
    second = rig.store.acquire("2", chain_of("aBxy"))
    assert second.blocks == 1
    kept = rig.publish(second, 1, 4)
    assert len(kept) == 1, "B has b's name, so it stays the caller's"
    rig.store.unreserve(np.array(kept))
    rig.store.release(first)
    rig.store.release(second)
    assert ask(rig, "aBxy")[0] == 1
    assert ask(rig, "abxy") == (2, MissCause.COLLISION)
    assert ask(rig, "abcd") == (4, None)


def test_a_collision_in_the_device_tier_is_not_promoted_over(rig: Rig) -> None:
    first = rig.store.acquire("1", chain_of("ab"))
    rig.publish(first, 0, 2)
    rig.store.release(first)
    slots = rig.host.pool.match(chain_of("ab").rows(WHOLE)).slots
    assert len(slots) == 0, "not copied down yet"
    rig.write(chain_of("aBc"))
    lease = rig.store.acquire("2", chain_of("aBc"))
    assert lease.blocks == 3
    assert rig.store.promote(lease) == 1
    assert lease.cause is MissCause.COLLISION
    rig.assert_promised(lease)


def test_the_worst_hash_of_all_is_a_cold_cache(rig: Rig, redis: DictTier) -> None:
    """Every block has one name: a chain names it again and again, in every tier."""

    def chain(letters: str) -> Chain:
        ids = tokens_of(letters, SPEC.block_size)
        return Chain(
            SPEC.root,
            hash_blocks(SPEC.root, ids, digest=lambda _: b"the same for all"),
            len(ids),
            ids.reshape(-1, SPEC.block_size),
            fingerprint_blocks(ids, SPEC.block_size),
        )

    assert rig.write(chain("abcd")) == [BlockStatus.YOURS] + [BlockStatus.REFUSED] * 3
    rig.settle()
    rig.store.check()
    lease = rig.store.acquire("1", chain("abcd"))
    rig.settle()
    assert (lease.blocks, lease.cause) == (1, MissCause.COLLISION)
    rig.store.promote(lease)
    rig.store.check()
    other = rig.store.acquire("2", chain("xyz"))
    kept = rig.publish(other, 0, 3)
    assert len(kept) == 3
    rig.store.unreserve(np.array(kept))
    rig.settle()
    for each in (lease, other):
        rig.store.release(each)
    assert len(redis.values) == 1
    assert rig.store.usage()[TierName.HOST].ready == 1024


@pytest.mark.parametrize("prompts", [["ba", "ab"], ["abca"], ["xba", "zab"], ["yxcb", "ycbx"]])
def test_names_that_a_client_makes_up_cannot_make_blocks_hang_from_themselves(
    rig: Rig, prompts: list[str]
) -> None:
    """Rings have no leaf: nothing of them could go, and who follows parents would never come to an end."""
    for prompt in prompts:
        with rig.store.write(made_up(prompt), first_block=1):
            pass
    rig.settle()
    rig.store.check()
    pool = rig.host.pool
    assert pool.usage().ready
    for space in pool.spaces():
        pool.regroup(space, 1)
    for slot_class in pool.extents.classes():
        pool.evict(slot_class, pool.extents.slots)
    assert not pool.usage().ready


def made_up(names: str) -> Chain:
    """A prompt in which a letter is a block's hash, wherever it stands."""
    hashes = b"".join(name.encode() * 16 for name in names)
    size = SPEC.block_size
    tokens = np.zeros((len(names), size), dtype=np.uint32)
    return Chain(SPEC.root, hashes, len(names) * size, tokens, np.zeros(len(names), dtype=np.uint64))
