"""Tagged fields, and the checks of the values that go into them.

A field is ``tag u8 ‖ length u32 LE ‖ bytes``. Since every value carries its tag and its length,
no two different lists of fields encode to the same bytes.
"""

import struct

from hashing.errors import HashingError

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1

_FIELD_HEAD = struct.Struct("<BI")


def encode_field(tag: int, value: bytes) -> bytes:
    """One field; ``value`` is shorter than 4 GiB."""
    return _FIELD_HEAD.pack(tag, len(value)) + value


def require_int(name: str, value: object, low: int, high: int, fix: str) -> int:
    """``value`` as an int in [low, high].

    A bool is not a number here, and neither is a numpy scalar, whose arithmetic would wrap around.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise HashingError(f"{name} is {value!r}, expected an int from {low} to {high}; {fix}")
    return value


def require_text(name: str, value: object, fix: str) -> str:
    """``value`` as a non-empty string that UTF-8 can encode."""
    if not isinstance(value, str) or not value:
        raise HashingError(f"{name} is {value!r}, expected a non-empty string; {fix}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise HashingError(f"{name} is {value!r}, expected text that UTF-8 can encode; {fix}") from error
    return value


def require_digest(name: str, value: object, length: int, fix: str) -> bytes:
    """``value`` as exactly ``length`` bytes."""
    if not isinstance(value, bytes):
        raise HashingError(f"{name} is a {type(value).__name__}, expected {length} bytes; {fix}")
    if len(value) != length:
        raise HashingError(f"{name} has {len(value)} bytes, expected {length}; {fix}")
    return value


def require_salt(name: str, value: object) -> bytes:
    """``value`` as non-empty bytes. The message never shows a salt's contents."""
    if not isinstance(value, bytes) or not value:
        kind = "empty" if isinstance(value, bytes) else f"a {type(value).__name__}"
        raise HashingError(f"{name} is {kind}, expected non-empty bytes; pass None for no salt")
    return value
