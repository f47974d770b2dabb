"""Token ids to packed bytes: every accepted form, every refused one, and no needless copy."""

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashing import TokenError, TokenInput, pack_tokens

PACKED = b"\x01\x00\x00\x00\xff\xff\xff\xff\x00\x00\x00\x00"
IDS = [1, 2**32 - 1, 0]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        array("Q", IDS),
        [np.int64(1), np.uint32(2**32 - 1), np.uint8(0)],
        np.array(IDS, dtype=np.uint32),
        np.array(IDS, dtype=np.int64),
        np.array(IDS, dtype=np.uint64),
        np.array(IDS, dtype=">u4"),
        np.array([[1, 7], [2**32 - 1, 7], [0, 7]], dtype=np.uint32)[:, 0],
        PACKED,
        bytearray(PACKED),
        memoryview(PACKED),
        memoryview(PACKED).cast("I"),
        memoryview(bytes(b for byte in PACKED for b in (byte, 0)))[::2],
        np.array([1, 7, 2**32 - 1, 7, 0, 7], dtype=np.uint32).data[::2],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_accepted_form_packs_alike(tokens: TokenInput) -> None:
    packed = memoryview(pack_tokens(tokens))
    assert bytes(packed) == PACKED
    assert (packed.format, packed.ndim, packed.c_contiguous) == ("B", 1, True)


@pytest.mark.parametrize(
    "empty",
    [[], (), b"", bytearray(), memoryview(b""), np.array([]), np.empty(0, np.int64), range(0)],
    ids=lambda tokens: type(tokens).__name__,
)
def test_no_tokens_pack_to_nothing(empty: TokenInput) -> None:
    assert bytes(pack_tokens(empty)) == b""


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packing_is_lossless(tokens: list[int]) -> None:
    assert np.frombuffer(pack_tokens(tokens), dtype="<u4").tolist() == tokens


def test_packed_input_and_uint32_arrays_are_not_copied() -> None:
    ids = np.array(IDS, dtype="<u4")
    assert np.shares_memory(np.frombuffer(pack_tokens(ids), dtype=np.uint8), ids)
    assert pack_tokens(PACKED) is PACKED
    buffer = bytearray(PACKED)
    assert np.shares_memory(np.frombuffer(pack_tokens(buffer), np.uint8), np.frombuffer(buffer, np.uint8))


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (-1, "-1"),
        (2**32, "4294967296"),
        (10**30, "1" + "0" * 30),
        (True, "True"),
        (False, "False"),
        (1.0, r"1\.0"),
        ("7", "'7'"),
        (None, "None"),
        ([7], r"\[7\]"),
        (np.True_, "np.True_"),
    ],
)
def test_a_bad_token_is_named_with_index_expectation_and_fix(token: int, shown: str) -> None:
    expected = rf"token id at index 3 is {shown}, expected integer token ids from 0 to 4294967295; pass the"
    with pytest.raises(TokenError, match=expected):
        pack_tokens([0, 1, 2, token, 4])


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.int8, -1), (np.int64, -1), (np.int64, 2**32), (np.uint64, 2**63)]
)
def test_a_bad_token_in_an_array_is_named(dtype: type[np.integer[Any]], value: int) -> None:
    ids = np.array([0, 1, value, value], dtype=dtype)
    with pytest.raises(TokenError, match=rf"token id at index 2 is {value}, expected integer token ids"):
        pack_tokens(ids)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (PACKED[:-1], r"packed tokens have 11 bytes, expected a multiple of 4 .*; pass whole tokens"),
        (np.zeros((1, 4), np.uint32), r"token ids have shape \(1, 4\), expected one dimension; hash one"),
        (np.array(5), r"token ids have shape \(\), expected one dimension"),
        ("", r"tokens are of type str, expected a sequence of ints"),
        (np.array([1.0]), r"token ids have dtype float64 \(index 0 is np.float64\(1.0\)\), expected integer"),
        (np.array([True]), r"token ids have dtype bool .*expected integer token ids.*; pass the tokenizer's"),
        (
            np.zeros(4).data,
            r"packed tokens are a 1-D buffer of format 'd', expected 1-D uint32 .*; conv",
        ),
        (np.zeros(4, np.int32).data, r"packed tokens are a 1-D buffer of format 'i', expected"),
        (np.zeros((2, 2), np.uint8).data, r"packed tokens are a 2-D buffer of format 'B', expected"),
        ("ids", r"tokens are of type str, expected a sequence of ints, .*; convert first"),
        (iter([1]), r"tokens are of type list_iterator, expected a sequence of ints"),
        (7, r"tokens are of type int, expected a sequence of ints"),
        (None, r"tokens are of type NoneType, expected a sequence of ints"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_bad_container_is_named_with_its_fix(tokens: TokenInput, message: str) -> None:
    with pytest.raises(TokenError, match=message) as caught:
        pack_tokens(tokens)
    assert isinstance(caught.value, ValueError)
