"""The redis tier on a real server that works: what is stored, found, refused and deleted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kvstore.block import MissCause, Shard
from kvstore.tiers.base import LoadResult, SaveOutcome, TierStatus
from kvstore.tiers.redis import RedisOptions, RedisTier
from kvstore.tiers.redis_value import block_key, header_bytes
from tests.support.redis_store import BLOCK_SIZE, Store, assert_loads, payloads_of, rows_of
from tests.support.valkey import ValkeyServer, any_server, eventually, shared_redis, shared_valkey

__all__ = ["any_server", "shared_redis", "shared_valkey"]

pytestmark = pytest.mark.redis

KIB = 1024
DAY_MS = 86_400_000


@pytest.fixture
def store(any_server: ValkeyServer) -> Iterator[Store]:
    tier = RedisTier(RedisOptions(any_server.url), time.monotonic)
    yield Store(tier, any_server)
    tier.close()


@pytest.mark.parametrize(("size", "blocks"), [(1, 3), (KIB, 200), (128 * KIB, 40), (2048 * KIB, 6)])
def test_what_was_saved_is_matched_and_loaded(store: Store, size: int, blocks: int) -> None:
    rows, payloads = rows_of(blocks), payloads_of(blocks, size)
    assert store.save(rows, payloads) == [SaveOutcome.STORED] * blocks
    assert store.match(rows) == blocks
    assert_loads(store, rows, payloads)
    assert store.tier.errors() == {}
    assert store.tier.status() == TierStatus(healthy=True)


def test_a_reader_that_knows_only_hashes_is_served_too(store: Store) -> None:
    rows, payloads = rows_of(3), payloads_of(3, KIB)
    store.save(rows, payloads)
    assert_loads(store, replace(rows, tokens=None, fingerprints=None), payloads)


def test_nothing_asked_is_nothing_answered(store: Store) -> None:
    empty = rows_of(0)
    assert (store.match(empty), store.save(empty, []), store.load(empty, 1)[0]) == (0, [], LoadResult())


def test_missing_keys_are_cold_and_the_rest_is_loaded(store: Store) -> None:
    """LMCache PR #5124 and its 0.5.6: a missing key hung, or was answered with uninitialised memory."""
    rows, payloads = rows_of(9), payloads_of(9, 40 * KIB)
    store.save(rows, payloads)
    for block in (0, 4, 5, 8):
        store.server.client.delete(block_key("kv", rows, block))
    result, loaded = store.load(rows, 40 * KIB)
    missing = MissCause.COLD
    assert result.causes == [missing, None, None, None, missing, missing, None, None, missing]
    for block in (1, 2, 3, 6, 7):
        assert np.array_equal(loaded[block], payloads[block])
    assert_loads(store, rows.slice(1, 4), payloads[1:4])


@pytest.mark.parametrize("place", ["header", "first byte", "last byte"])
def test_one_flipped_byte_costs_that_block_and_its_key(store: Store, place: str) -> None:
    """LMCache #4533 #4558."""
    rows, payloads = rows_of(5), payloads_of(5, 3000)
    store.save(rows, payloads)
    key = block_key("kv", rows, 2)
    offset = {"header": 40, "first byte": header_bytes(BLOCK_SIZE), "last byte": -1}[place]
    value = bytearray(store.server.value(key))
    value[offset] ^= 0x10
    store.server.client.setrange(key, offset % len(value), bytes([value[offset]]))
    result, _ = store.load(rows, 3000)
    assert result.causes == [None, None, MissCause.CORRUPT, None, None]
    assert eventually(lambda: not store.has(rows, 2))
    assert [store.has(rows, block) for block in (0, 1, 3, 4)] == [True] * 4
    assert_loads(store, rows.slice(3, 5), payloads[3:])


@pytest.mark.parametrize(
    "value",
    [b"", b"x", b"PKVB", b"garbage" * 100, bytes(header_bytes(BLOCK_SIZE) + 3000), bytes(200_000)],
    ids=["empty", "one byte", "magic only", "short", "right size", "long"],
)
def test_garbage_of_any_size_is_deleted(store: Store, value: bytes) -> None:
    rows, payloads = rows_of(3), payloads_of(3, 3000)
    store.save(rows, payloads)
    store.server.client.set(block_key("kv", rows, 1), value)
    assert store.load(rows, 3000)[0].causes == [None, MissCause.CORRUPT, None]
    assert eventually(lambda: not store.has(rows, 1))
    assert_loads(store, rows.slice(2, 3), payloads[2:])


def test_a_truncated_value_is_deleted(store: Store) -> None:
    rows, payloads = rows_of(2), payloads_of(2, 3000)
    store.save(rows, payloads)
    whole = store.server.value(block_key("kv", rows, 0))
    for length in (100, 400, len(whole) - 1):
        store.server.client.set(block_key("kv", rows, 0), whole[:length])
        assert store.load(rows, 3000)[0].causes == [MissCause.CORRUPT, None]
        assert eventually(lambda: not store.has(rows, 0))


def test_a_key_of_another_type_is_deleted_and_counted(store: Store) -> None:
    rows, payloads = rows_of(3), payloads_of(3, 3000)
    store.save(rows, payloads)
    store.server.client.delete(block_key("kv", rows, 1))
    store.server.client.lpush(block_key("kv", rows, 1), "a list")
    assert store.load(rows, 3000)[0].causes == [None, MissCause.CORRUPT, None]
    assert eventually(lambda: not store.has(rows, 1))
    assert store.tier.errors() == {"wrongtype": 1}


def test_another_format_version_is_a_miss_that_stays(store: Store) -> None:
    rows, payloads = rows_of(2), payloads_of(2, 3000)
    store.save(rows, payloads)
    for length in (64, 320, 640):
        body = bytes(length - 16)
        start = b"PKVB" + (2).to_bytes(2, "little") + length.to_bytes(2, "little")
        newer = start + xxhash.xxh3_64_intdigest(start + body).to_bytes(8, "little") + body
        store.server.client.set(block_key("kv", rows, 0), newer + bytes(2000))
        assert store.load(rows, 3000)[0].causes == [MissCause.VERSION, None]
        assert store.has(rows, 0)


def test_namespaces_and_shards_never_see_each_other(store: Store) -> None:
    """sglang #33268 #36420; seen in LMCache 0.5.6: a bf16 engine got a hit on fp16 bytes."""
    mine, payloads = rows_of(3), payloads_of(3, KIB)
    store.save(mine, payloads)
    same_hashes = replace(mine, namespace=b"another name spc")
    other_shard = replace(mine, shard=Shard(1, 2, 0, 1))
    for others in (rows_of(3, model="other"), same_hashes, other_shard):
        assert store.match(others) == 0
        assert store.load(others, KIB)[0].causes == [MissCause.COLD] * 3
    assert store.match(mine) == 3


@pytest.mark.parametrize("what", ["tokens", "fingerprints", "parents", "indexes"])
def test_a_value_of_another_identity_is_a_collision_that_stays(store: Store, what: str) -> None:
    """vllm #12621 #54727, aibrix #749: a hash that collides must never hand out another prompt's KV."""
    rows, payloads = rows_of(2), payloads_of(2, KIB)
    store.save(rows, payloads)
    other = rows_of(2, first_token=1000)
    asked = {
        "tokens": replace(rows, tokens=other.tokens),
        "fingerprints": replace(rows, fingerprints=other.fingerprints),
        "parents": replace(rows, parents=b"another parent !" + rows.parents[16:]),
        "indexes": replace(rows, indexes=np.array([5, 1], dtype=np.uint32)),
    }[what]
    causes = store.load(asked, KIB)[0].causes
    assert causes[0] is MissCause.COLLISION
    assert store.has(rows, 0)
    assert_loads(store, rows, payloads)


def test_a_payload_of_another_size_than_asked_for_stays(store: Store) -> None:
    rows, payloads = rows_of(2), payloads_of(2, 3000)
    store.save(rows, payloads)
    for size in (2000, 2999, 3000 - 64, 3001, 100_000):
        assert store.load(rows, size)[0].causes == [MissCause.COLLISION] * 2
    assert_loads(store, rows, payloads)


def test_every_key_has_a_time_to_live_and_reading_renews_it_late(store: Store) -> None:
    """LMCache #426 PR #3066: keys without one filled the server."""
    rows, payloads = rows_of(4), payloads_of(4, KIB)
    store.save(rows, payloads)
    keys = [block_key("kv", rows, block) for block in range(4)]
    client = store.server.client
    assert all(DAY_MS - 10_000 < client.pttl(key) <= DAY_MS for key in keys)
    client.pexpire(keys[1], int(0.76 * DAY_MS))
    client.pexpire(keys[2], int(0.74 * DAY_MS))
    client.persist(keys[3])
    client.config_resetstat()
    assert_loads(store, rows, payloads)
    assert eventually(lambda: client.pttl(keys[2]) > 0.99 * DAY_MS)
    assert eventually(lambda: client.pttl(keys[3]) > 0.99 * DAY_MS)
    assert client.pttl(keys[1]) < 0.77 * DAY_MS
    assert store.server.calls()["pexpire"] == 2
    # The replies that nobody waited for must not be taken for those of the next exchange.
    assert store.match(rows) == 4
    assert_loads(store, rows, payloads)


def test_a_cold_prompt_costs_one_small_command(store: Store) -> None:
    """LMCache PR #3955 #499."""
    assert store.match(rows_of(1024)) == 0
    calls = store.server.calls()
    assert (calls["exists"], calls["keys"]) == (1, 128)


def test_a_present_prompt_costs_one_command_for_four_segments(store: Store) -> None:
    rows = rows_of(1024)
    store.save(rows, payloads_of(1, 64) * 1024)
    store.server.client.config_resetstat()
    assert store.match(rows) == 1024
    calls = store.server.calls()
    assert (calls["exists"], calls["keys"]) == (1 + 2, 1024)


def test_a_prompt_that_was_there_a_moment_ago_costs_one_round(store: Store) -> None:
    """And once it is gone, one such round more before it is asked for with one small command again."""
    rows = rows_of(1024)
    store.save(rows, payloads_of(1, 64) * 1024)
    assert store.match(rows) == 1024
    expected = iter([(2, 1024, 1024), (2, 1024, 0), (1, 128, 0)])
    for _ in range(3):
        store.server.client.config_resetstat()
        commands, keys, found = next(expected)
        assert store.match(rows) == found
        calls = store.server.calls()
        assert (calls["exists"], calls["keys"]) == (commands, keys)
        store.server.client.flushall()


def test_a_part_that_was_there_a_moment_ago_is_told_in_one_round(store: Store) -> None:
    """Whether it is still that part, or grew, or shrank."""
    rows = rows_of(512)
    store.save(rows.slice(0, 300), payloads_of(1, 64) * 300)
    assert store.match(rows) == 300
    store.server.client.config_resetstat()
    assert store.match(rows) == 300
    calls = store.server.calls()
    assert (calls["exists"], calls["keys"]) == (2, 512)
    store.save(rows.slice(300, 400), payloads_of(1, 64) * 100)
    assert store.match(rows) == 400
    assert store.tier.discard(rows.slice(150, 512), time.monotonic() + 5) == 250
    assert store.match(rows) == 150
    assert store.match(rows.slice(0, 140)) == 140


@pytest.mark.parametrize("present", [1, 63, 127, 128, 129, 200, 384, 500])
def test_a_prefix_costs_two_rounds_and_one_more_command(store: Store, present: int) -> None:
    rows = rows_of(512)
    store.save(rows.slice(0, present), payloads_of(1, 64) * present)
    store.server.client.config_resetstat()
    assert store.match(rows) == present
    rounds = 1 if present < 128 else 2
    calls = store.server.calls()
    assert calls["exists"] == rounds + (present != 128)
    first, rest = min(present, 128), max(0, present - 128)
    guess = min(rest, 384 - rest) if rest else min(first, 128 - first)
    assert calls["keys"] == 128 * (1 if present < 128 else 4) + guess


@pytest.mark.parametrize("hole", [0, 1, 64, 126, 127, 128, 130, 255])
def test_a_hole_is_found_by_a_short_bisection(store: Store, hole: int) -> None:
    rows = rows_of(256)
    store.save(rows, payloads_of(1, 64) * 256)
    store.server.client.delete(block_key("kv", rows, hole))
    store.server.client.config_resetstat()
    assert store.match(rows) == hole
    assert store.server.calls()["exists"] <= 2 + 1 + 7


def test_a_count_that_shows_a_hole_narrows_the_search(store: Store) -> None:
    rows = rows_of(128)
    store.save(rows, payloads_of(1, 64) * 128)
    store.tier.discard(rows.slice(5, 68), time.monotonic() + 5)
    store.server.client.config_resetstat()
    assert store.match(rows) == 5
    assert store.server.calls()["exists"] <= 5


def test_rows_may_start_anywhere_in_a_chain(store: Store) -> None:
    rows = rows_of(400)
    store.save(rows, payloads_of(1, 64) * 400)
    store.server.client.config_resetstat()
    assert store.match(rows.slice(100, 390)) == 290
    assert store.server.calls()["exists"] == 2
    store.server.client.delete(block_key("kv", rows, 300))
    assert store.match(rows.slice(100, 390)) == 200


def test_a_block_evicted_between_match_and_load_is_a_miss(store: Store) -> None:
    """Seen in LMCache 0.5.6: it hung."""
    rows, payloads = rows_of(3), payloads_of(3, KIB)
    store.save(rows, payloads)
    assert store.match(rows) == 3
    store.server.client.delete(block_key("kv", rows, 1))
    assert store.load(rows, KIB)[0].causes == [None, MissCause.COLD, None]


def test_discard_deletes_what_is_there_and_says_how_much(store: Store) -> None:
    rows = rows_of(300)
    store.save(rows.slice(0, 290), payloads_of(1, 64) * 290)
    assert store.tier.discard(rows.slice(100, 300), time.monotonic() + 5) == 190
    assert store.match(rows) == 100
    assert store.server.client.dbsize() == 100


def test_a_payload_past_the_limit_or_tokens_past_the_header_are_refused(any_server: ValkeyServer) -> None:
    options = RedisOptions(any_server.url, max_payload_bytes=1000)
    store = Store(RedisTier(options, time.monotonic), any_server)
    assert store.save(rows_of(2), payloads_of(2, 1001)) == [SaveOutcome.REFUSED] * 2
    tokens = np.zeros((2, 20_000), dtype=np.uint32)
    assert store.save(replace(rows_of(2), tokens=tokens), payloads_of(2, 10)) == [SaveOutcome.REFUSED] * 2
    assert any_server.client.dbsize() == 0
    store.tier.close()


def test_threads_get_their_own_bytes(store: Store) -> None:
    sets = [(rows_of(20, first_token=10_000 * i), payloads_of(20, 30_000, seed=i)) for i in range(4)]

    def work(number: int) -> int:
        rows, payloads = sets[number]
        for _ in range(5):
            assert store.save(rows, payloads) == [SaveOutcome.STORED] * 20
            assert store.match(rows) == 20
            assert_loads(store, rows, payloads)
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]
    # Two for payloads, one for look-ups, and the test's own.
    assert len(store.server.client.client_list()) == 4
