"""Token ids as the bytes that are hashed: uint32, little-endian, packed."""

import operator
from array import array
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hashing.errors import TokenError
from hashing.fields import U32_MAX

TokenInput: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | bytes | bytearray | memoryview
"""Token ids, or their packed form. Bytes are always taken as packed, never as small token ids."""

TOKEN_BYTES = 4

_PACKABLE_FORMATS = ("B", "I")
_EXPECTED = f"expected integer token ids from 0 to {U32_MAX}"


def pack_tokens(tokens: TokenInput) -> bytes | memoryview:
    """4 bytes a token, as bytes or a C-contiguous memoryview of format B.

    Shares memory with packed input and with contiguous uint32 arrays, which must then not change
    while the result is in use.
    """
    if isinstance(tokens, bytes | bytearray | memoryview):
        return _from_buffer(tokens)
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    return _from_sequence(tokens)


def _from_buffer(buffer: bytes | bytearray | memoryview) -> bytes | memoryview:
    view = memoryview(buffer)
    if view.ndim != 1 or view.format.lstrip("<") not in _PACKABLE_FORMATS:
        raise TokenError(
            f"packed tokens are a {view.ndim}-D buffer of format {view.format!r}, expected 1-D uint32 "
            "(format 'I') or its bytes (format 'B'); convert with numpy.asarray(ids, dtype='<u4')"
        )
    if view.nbytes % TOKEN_BYTES:
        raise TokenError(
            f"packed tokens have {view.nbytes} bytes, expected a multiple of {TOKEN_BYTES} (uint32, "
            "little-endian, a token); pass whole tokens"
        )
    if isinstance(buffer, bytes):
        return buffer
    if view.format != "B":
        return _from_array(np.asarray(view))
    return view if view.c_contiguous else view.tobytes()


def _from_array(ids: NDArray[Any]) -> bytes | memoryview:
    if ids.ndim != 1:
        raise TokenError(
            f"token ids have shape {ids.shape}, expected one dimension; hash one prompt at a time "
            "(ids[i], or ids.ravel() for a single row)"
        )
    if ids.size == 0:
        # Before the dtype check: an empty array has no ids that could be wrong, and no known dtype.
        return b""
    if ids.dtype.kind not in "iu":
        raise TokenError(
            f"token ids have dtype {ids.dtype} (index 0 is {ids[0]!r}), {_EXPECTED}; "
            "pass the tokenizer's integer ids"
        )
    packed = np.ascontiguousarray(ids, dtype="<u4")
    if packed is not ids and not np.array_equal(packed, ids):
        index = int(np.flatnonzero(packed != ids)[0])
        raise _bad_token(index, int(ids[index]))
    return packed.view(np.uint8).data


def _from_sequence(tokens: object) -> bytes | memoryview:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise TokenError(
            f"tokens are of type {type(tokens).__name__}, expected a sequence of ints, a 1-D integer array "
            "or packed uint32 bytes; convert first, for example with tolist()"
        )
    try:
        packed = np.frombuffer(array("I", tokens), dtype=np.uint32)
    except (TypeError, OverflowError) as error:
        raise _first_bad_token(tokens) from error
    # array() takes True for 1. Only what packed to 0 or 1 can have been a bool, so only that is
    # looked at: checking the type of every token would cost more than hashing them.
    for index in np.flatnonzero(packed <= 1).tolist():
        if isinstance(tokens[index], bool):
            raise _bad_token(index, tokens[index])
    return _from_array(packed)


def _first_bad_token(tokens: Sequence[object]) -> TokenError:
    for index, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            return _bad_token(index, token)
        if not 0 <= operator.index(token) <= U32_MAX:
            return _bad_token(index, token)
    return TokenError(f"tokens of a {type(tokens).__name__} changed while they were read; pass a list")


def _bad_token(index: int, token: object) -> TokenError:
    return TokenError(
        f"token id at index {index} is {token!r}, {_EXPECTED}; pass the tokenizer's ids unchanged"
    )
