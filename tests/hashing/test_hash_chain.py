"""Chains of block hashes: whole blocks, prefixes, continuation, stub digests."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashing import ContentItem, Extras, HashingError, Root, fingerprint_blocks, hash_blocks

ROOT = Root(digest=bytes(16), block_size=4, algorithm="xxh3_128")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
EXTRAS = Extras(
    request_salt=b"salt",
    items=(ContentItem(hashlib.sha256(b"image").digest(), 6, 25),),
    embeddings=(None, hashlib.sha256(b"rows").digest()),
)
ALGORITHMS = st.sampled_from(["xxh3_128", "sha256"])


@given(TOKENS)
def test_only_whole_blocks_have_hashes(tokens: list[int]) -> None:
    assert len(hash_blocks(ROOT, tokens)) == len(tokens) // 4 * 16
    assert hash_blocks(ROOT, tokens) == hash_blocks(ROOT, tokens[: len(tokens) // 4 * 4])


@given(TOKENS, ALGORITHMS)
def test_all_forms_of_input_hash_alike(tokens: list[int], algorithm: str) -> None:
    root = Root(ROOT.digest, 4, algorithm)
    expected = hash_blocks(root, tokens)
    packed = np.array(tokens, dtype="<u4")
    forms = (tuple(tokens), packed, packed.astype(np.int64), packed.astype(">u4"), packed.tobytes())
    assert {hash_blocks(root, form) for form in forms} == {expected}
    assert hash_blocks(root, bytearray(packed.tobytes())) == expected
    assert hash_blocks(root, memoryview(packed.tobytes())) == expected


@given(TOKENS, TOKENS, st.sampled_from([None, EXTRAS]))
def test_equal_prefixes_have_equal_hashes_and_differing_ones_never(
    one: list[int], other: list[int], extras: Extras | None
) -> None:
    first, second = hash_blocks(ROOT, one, extras), hash_blocks(ROOT, other, extras)
    for block in range(min(len(one), len(other)) // 4):
        end = (block + 1) * 4
        same = first[block * 16 : (block + 1) * 16] == second[block * 16 : (block + 1) * 16]
        assert same == (one[:end] == other[:end])


@given(TOKENS, st.integers(0, 15), st.sampled_from([None, EXTRAS]), ALGORITHMS)
def test_a_continued_chain_equals_the_whole(
    tokens: list[int], cut: int, extras: Extras | None, algorithm: str
) -> None:
    root = Root(ROOT.digest, 4, algorithm)
    whole = hash_blocks(root, tokens, extras)
    cut = min(cut, len(tokens) // 4)
    head = hash_blocks(root, tokens[: cut * 4], extras)
    parent = head[-16:] if cut else None
    tail = hash_blocks(root, tokens[cut * 4 :], extras, parent=parent, first_block=cut)
    assert head + tail == whole


def test_another_root_shares_nothing() -> None:
    other = Root(bytes(15) + b"\x01", 4, "xxh3_128")
    hashes = [hash_blocks(root, range(40)) for root in (ROOT, other)]
    one, two = ({packed[offset : offset + 16] for offset in range(0, 160, 16)} for packed in hashes)
    assert len(one) == len(two) == 10
    assert not one & two


def test_a_stub_digest_forces_collisions_that_the_fingerprint_shows() -> None:
    """A hash collision must be noticeable, tokens of an ancestor included.

    vllm #12621 #54727, aibrix #749. Both prompts end in the same block, so comparing its own
    tokens and its parent shows nothing: only the fingerprint tells them apart.
    """
    prompt, other = [1, 2, 3, 4, 9, 9, 9, 9], [5, 6, 7, 8, 9, 9, 9, 9]

    def collide(data: bytes) -> bytes:
        return bytes(16)

    assert hash_blocks(ROOT, prompt, digest=collide) == hash_blocks(ROOT, other, digest=collide) == bytes(32)
    assert hash_blocks(ROOT, prompt) != hash_blocks(ROOT, other)
    assert fingerprint_blocks(prompt, 4)[1] != fingerprint_blocks(other, 4)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"parent": bytes(16)},
            r"first_block is 0 with a parent, expected a parent exactly where.*pass both",
        ),
        ({"first_block": 3}, r"first_block is 3 with no parent, expected.*pass both"),
        ({"first_block": 3, "parent": bytes(32)}, r"parent has 32 bytes, expected 16; pass one block hash"),
        ({"first_block": -1}, r"first_block is -1, expected an int from 0 to 4294967295; pass the index"),
        (
            {"first_block": np.uint32(3), "parent": bytes(16)},
            r"first_block is np.uint32\(3\), expected an int",
        ),
        ({"digest": hashlib.md5}, r"made 64 bytes for 2 blocks, expected 16 a block; return exactly 16"),
    ],
    ids=["parent", "no-parent", "parent-length", "negative", "numpy", "digest"],
)
def test_a_bad_argument_is_named_with_its_fix(arguments: dict[str, object], message: str) -> None:
    if "digest" in arguments:
        arguments = {"digest": lambda data: hashlib.sha256(data).digest()}
    with pytest.raises(HashingError, match=message):
        hash_blocks(ROOT, range(8), **arguments)  # type: ignore[arg-type]
