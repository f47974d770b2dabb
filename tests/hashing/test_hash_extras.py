"""Request salts, multimodal content and prompt embeddings in the identity of blocks."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashing import ContentItem, Extras, HashingError, Root, hash_blocks

BLOCK = 16
ROOT = Root(digest=bytes(range(16)), block_size=BLOCK, algorithm="xxh3_128")
PROMPT = range(96)
IMAGE = hashlib.sha256(b"image").digest()
OTHER = hashlib.sha256(b"other image").digest()


def blocks_of(extras: Extras | None) -> list[bytes]:
    packed = hash_blocks(ROOT, PROMPT, extras)
    return [packed[offset : offset + 16] for offset in range(0, len(packed), 16)]


def test_empty_extras_hash_like_none() -> None:
    assert blocks_of(Extras()) == blocks_of(None) == blocks_of(Extras(embeddings=(None,) * 6))


def test_a_content_item_changes_the_blocks_from_its_first_on() -> None:
    plain, with_item = blocks_of(None), blocks_of(Extras(items=(ContentItem(IMAGE, 37, 4),)))
    assert with_item[:2] == plain[:2]
    assert not set(with_item[2:]) & set(plain[2:])


def test_content_is_told_apart_by_every_bit_of_its_digest() -> None:
    """Content keys of 16 or 31 bits made two images one: LMCache #3301 #4086 #690."""
    original = blocks_of(Extras(items=(ContentItem(IMAGE, 3, 20),)))
    for bit in range(256):
        flipped = bytearray(IMAGE)
        flipped[bit // 8] ^= 1 << bit % 8
        assert blocks_of(Extras(items=(ContentItem(bytes(flipped), 3, 20),)))[0] != original[0]


@pytest.mark.parametrize(
    "moved", [ContentItem(IMAGE, 4, 20), ContentItem(OTHER, 3, 20), ContentItem(IMAGE, 3, 40)]
)
def test_position_content_and_reach_of_an_item_count(moved: ContentItem) -> None:
    original = Extras(items=(ContentItem(IMAGE, 3, 20),))
    assert blocks_of(Extras(items=(moved,)))[-1] != blocks_of(original)[-1]


def test_an_item_is_coded_in_every_block_that_it_touches() -> None:
    extras = Extras(items=(ContentItem(IMAGE, 10, 2 * BLOCK),))

    def field(start: int) -> bytes:
        return struct.pack("<BI", 2, 36) + IMAGE + struct.pack("<i", start)

    assert [extras.encode_block(block, BLOCK) for block in range(4)] == [
        field(10),
        field(-6),
        field(-22),
        b"",
    ]


def test_an_item_that_ends_with_a_block_is_not_in_the_next() -> None:
    extras = Extras(items=(ContentItem(IMAGE, 0, BLOCK),))
    assert extras.encode_block(0, BLOCK)
    assert extras.encode_block(1, BLOCK) == b""


def test_a_request_salt_is_in_the_first_block_only_and_separates_all() -> None:
    """Requests with different salts share nothing: LMCache #4825, sglang #37160."""
    extras = Extras(request_salt=b"salt")
    assert extras.encode_block(0, BLOCK) == b"\x01\x04\x00\x00\x00salt"
    assert extras.encode_block(1, BLOCK) == b""
    assert not set(blocks_of(extras)) & set(blocks_of(None))
    assert not set(blocks_of(extras)) & set(blocks_of(Extras(request_salt=b"other")))
    assert "salt" not in repr(extras)


def test_embeddings_count_where_they_are_and_from_there_on() -> None:
    plain, embedded = blocks_of(None), blocks_of(Extras(embeddings=(None, IMAGE)))
    assert embedded[0] == plain[0]
    assert not set(embedded[1:]) & set(plain[1:])
    assert blocks_of(Extras(embeddings=(None, OTHER)))[1] != embedded[1]


def test_prompts_that_share_leading_embeddings_share_blocks() -> None:
    one, other = (blocks_of(Extras(embeddings=(IMAGE, OTHER, last))) for last in (IMAGE, OTHER))
    assert one[:2] == other[:2]
    assert one[2] != other[2]


SALTS = st.binary(min_size=1, max_size=80)


@given(SALTS, st.binary(min_size=32, max_size=32), st.integers(0, 3 * BLOCK))
def test_a_salt_cannot_pass_for_content_or_embeddings(salt: bytes, digest: bytes, start: int) -> None:
    """The kind of fault of vllm #44701: values of different meaning in one untyped list."""
    kinds = [
        Extras(request_salt=salt),
        Extras(items=(ContentItem(digest, start, 1),)),
        Extras(embeddings=(digest,)),
        Extras(request_salt=digest),
        Extras(request_salt=digest + struct.pack("<i", start)),
        Extras(request_salt=salt, embeddings=(digest,)),
    ]
    last_hashes = {blocks_of(extras)[-1] for extras in kinds}
    assert len(last_hashes) == len(set(kinds))


@given(st.permutations([ContentItem(IMAGE, 3, 20), ContentItem(OTHER, 3, 20), ContentItem(IMAGE, 30, 1)]))
def test_the_order_in_which_items_are_given_does_not_matter(items: list[ContentItem]) -> None:
    expected = Extras(items=(ContentItem(IMAGE, 3, 20), ContentItem(OTHER, 3, 20), ContentItem(IMAGE, 30, 1)))
    assert blocks_of(Extras(items=tuple(items))) == blocks_of(expected)


@given(
    st.lists(st.builds(ContentItem, st.just(IMAGE), st.integers(0, 90), st.integers(1, 90)), max_size=4),
    st.lists(st.none() | st.just(OTHER), max_size=6),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_a_run_is_its_blocks(
    items: list[ContentItem], embeddings: list[bytes | None], first: int, blocks: int
) -> None:
    extras = Extras(b"salt", tuple(items), tuple(embeddings))
    each = {block: extras.encode_block(block, BLOCK) for block in range(first, first + blocks)}
    assert extras.encode_run(first, blocks, BLOCK) == {block: data for block, data in each.items() if data}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((b"16 bytes of hash", 0, 1), r"content digest has 16 bytes, expected 32; hash the whole content"),
        (("ab" * 16, 0, 1), r"content digest is a str, expected 32 bytes"),
        ((IMAGE, -1, 1), r"item start is -1, expected an int from 0 to 2147483647; count tokens from"),
        ((IMAGE, 0, 0), r"item length is 0, expected an int from 1 to 2147483647; count the placeholder"),
        ((IMAGE, 2**31 - 2, 2), r"item length is 2, expected an int from 1 to 1; count"),
    ],
)
def test_a_bad_item_is_named_with_its_fix(item: tuple[bytes, int, int], message: str) -> None:
    with pytest.raises(HashingError, match=message):
        ContentItem(*item)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_salt": b""}, r"request_salt is empty, expected non-empty bytes; pass None for no salt"),
        ({"request_salt": 5}, r"request_salt is a int, expected non-empty bytes"),
        ({"items": [ContentItem(IMAGE, 0, 1)]}, r"items is a list, expected a tuple; pass tuple"),
        ({"items": (IMAGE,)}, r"items\[0\] is a bytes, expected a ContentItem; pass ContentItem\("),
        ({"embeddings": IMAGE}, r"embeddings is a bytes, expected a tuple"),
        (
            {"embeddings": (None, b"x")},
            r"embeddings\[1\] has 1 bytes, expected 32; hash the embedding rows of",
        ),
    ],
    ids=str,
)
def test_bad_extras_are_named_with_their_fix(fields: dict[str, object], message: str) -> None:
    with pytest.raises(HashingError, match=message):
        Extras(**fields)  # type: ignore[arg-type]
