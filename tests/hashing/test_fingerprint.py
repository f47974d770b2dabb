"""The fingerprint covers every token and every extra before it, and can be continued."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashing import ContentItem, Extras, HashingError, fingerprint_blocks

DIGEST = hashlib.sha256(b"image").digest()
EXTRAS = Extras(b"salt", (ContentItem(DIGEST, 6, 25),), (None, DIGEST))
TOKEN = st.integers(0, 2**32 - 1)
TOKENS = st.lists(TOKEN, max_size=60)
BLOCK_SIZES = st.integers(1, 9)


@given(st.data(), st.lists(TOKEN, min_size=1, max_size=60), BLOCK_SIZES)
def test_a_changed_token_changes_every_fingerprint_from_its_block_on(
    data: st.DataObject, tokens: list[int], block_size: int
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[position] = data.draw(TOKEN.filter(lambda token: token != tokens[position]))
    before, after = (fingerprint_blocks(ids, block_size) for ids in (tokens, changed))
    block = position // block_size
    assert (before[:block] == after[:block]).all()
    assert (before[block:] != after[block:]).all()


@given(st.permutations(range(1, 13)))
def test_order_counts(tokens: list[int]) -> None:
    same = tokens == list(range(1, 13))
    assert (fingerprint_blocks(tokens, 12)[0] == fingerprint_blocks(range(1, 13), 12)[0]) == same


@given(TOKENS, BLOCK_SIZES, st.integers(0, 60), st.sampled_from([None, EXTRAS]))
def test_a_continued_fingerprint_equals_the_whole(
    tokens: list[int], block_size: int, cut: int, extras: Extras | None
) -> None:
    whole = fingerprint_blocks(tokens, block_size, extras)
    cut = min(cut, len(whole))
    head = fingerprint_blocks(tokens[: cut * block_size], block_size, extras)
    previous = head[-1] if cut else 0
    rest = tokens[cut * block_size :]
    tail = fingerprint_blocks(rest, block_size, extras, first_block=cut, previous=previous)
    assert np.concatenate([head, tail]).tolist() == whole.tolist()
    tail = fingerprint_blocks(rest, block_size, extras, first_block=cut, previous=int(previous))
    assert np.concatenate([head, tail]).tolist() == whole.tolist()


@pytest.mark.parametrize(
    "extras",
    [
        Extras(request_salt=b"salt"),
        Extras(items=(ContentItem(DIGEST, 0, 1),)),
        Extras(items=(ContentItem(DIGEST, 1, 1),)),
        Extras(embeddings=(DIGEST,)),
    ],
)
def test_extras_of_an_earlier_block_count(extras: Extras) -> None:
    plain, other = fingerprint_blocks(range(32), 4), fingerprint_blocks(range(32), 4, extras)
    assert (plain != other).all()


@given(st.integers(0, 2**16), st.integers(1, 40))
def test_block_size_does_not_change_what_a_prefix_is_called(start: int, count: int) -> None:
    """F depends on the prefix alone, so it may be compared between any two cuts of it."""
    tokens = range(start, start + 4 * count)
    assert fingerprint_blocks(tokens, 4).tolist() == fingerprint_blocks(tokens, 1)[3::4].tolist()


def test_prompts_longer_than_the_cached_keys_agree_with_their_parts() -> None:
    """Keys are cached up to 2^20 positions and computed beyond; the seam must not show."""
    tokens = np.arange(2**20 + 4096, dtype=np.uint32)
    cut = 2**20 - 2048
    whole = fingerprint_blocks(tokens, 256)
    head = fingerprint_blocks(tokens[:cut], 256)
    tail = fingerprint_blocks(tokens[cut:], 256, first_block=cut // 256, previous=head[-1])
    assert np.concatenate([head, tail]).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, r"block_size is 0, expected an int from 1 to 65536; pass"),
        ({"first_block": -1}, r"first_block is -1, expected an int from 0 to 4294967295; pass"),
        (
            {"previous": 2**64},
            r"previous is 18446744073709551616, expected an int from 0 to.*; pass the finger",
        ),
        ({"previous": 1.5}, r"previous is 1.5, expected an int"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named_with_its_fix(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(HashingError, match=message):
        fingerprint_blocks(range(8), **({"block_size": 4} | arguments))  # type: ignore[arg-type]
