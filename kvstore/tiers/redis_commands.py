"""What the redis tier says to one server: which keys exist, give them, take them, forget them.

Everything here speaks over a ``Wire`` that somebody else opened, raises its OSErrors, and leaves it
in step: a generator that is to be the last word of an exchange must be run to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.block import HASH_BYTES, BlockRows, MissCause
from kvstore.tiers.base import Payload, SaveOutcome
from kvstore.tiers.redis_value import (
    HEADER_ALIGNMENT,
    MAX_HEADER_BYTES,
    block_key,
    pack_header,
    parse_header,
    verify_value,
    wrong_size,
)
from kvstore.tiers.redis_wire import ErrorReply, Reply, Wire, bulk_string, command

# Asked for and not yet read. Enough to keep the server busy while a reply is read; more would only
# pile up in its memory and fall out of the caches before it is sent.
_WINDOW_BYTES = 2 * 2**20
_WINDOW_BLOCKS = 64
_REFRESH_BELOW = 0.75

Span = tuple[int, int]
"""Half-open range of blocks."""


class RowKeys:
    """The keys of some rows, as the server reads them."""

    def __init__(self, prefix: str, rows: BlockRows) -> None:
        self._prefix = prefix
        self._rows = rows

    def key(self, block: int) -> bytes:
        """One key as an argument of a command."""
        return bulk_string(block_key(self._prefix, self._rows, block))

    def keys(self, span: Span) -> bytes:
        """The keys of a span within one segment, joined."""
        start, stop = span
        # They differ in the hash alone, so that one key shows how all of them begin.
        lead = self.key(start).decode()[: -2 * HASH_BYTES - 2]
        hashes = self._rows.hashes[start * HASH_BYTES : stop * HASH_BYTES].hex("|", HASH_BYTES)
        return (lead + hashes.replace("|", f"\r\n{lead}") + "\r\n").encode()

    def segments(self) -> list[Span]:
        """The rows, cut where the segment tag changes: a command must not span two of them."""
        if len(self._rows) == 0:
            return []
        tags = np.frombuffer(self._rows.tags, dtype=np.uint64).reshape(-1, 2)
        cuts = np.flatnonzero((tags[1:] != tags[:-1]).any(axis=1)) + 1
        edges = [0, *cuts.tolist(), len(self._rows)]
        return list(zip(edges[:-1], edges[1:], strict=True))

    def variadic(self, name: bytes, span: Span) -> bytes:
        """A command over the keys of a span within one segment."""
        start, stop = span
        return b"*%d\r\n" % (1 + stop - start) + bulk_string(name) + self.keys(span)


def growing_match(wire: Wire, keys: RowKeys) -> Iterator[int]:
    """Lengths, each longer than the last, of leading runs that exist.

    The first segment is asked for alone, so that a cold prompt costs one small command; then all
    others in one round; then the first incomplete one is searched.
    """
    segments = keys.segments()
    for asked in (segments[:1], segments[1:]):
        wire.send([keys.variadic(b"EXISTS", span) for span in asked])
        incomplete: tuple[int, int] | None = None
        for start, stop in asked:
            count = _count(wire.read_reply())
            if incomplete is None and count < stop - start:
                incomplete = (start, count)
            if incomplete is None:
                yield stop
        if incomplete is not None:
            yield from _search(wire, keys, *incomplete)
            return


def _search(wire: Wire, keys: RowKeys, start: int, present: int) -> Iterator[int]:
    """Longer and longer runs from ``start`` on, in a segment of whose keys only ``present`` exist.

    The first guess is that these are the first ones, since heads outlive tails; then bisection.
    """
    low, high = start, start + present
    guess = high
    while low < high:
        wire.send([keys.variadic(b"EXISTS", (low, guess))])
        count = _count(wire.read_reply())
        if count == guess - low:
            low = guess
            yield low
        else:
            high = min(guess - 1, low + count)
        guess = (low + high + 1) // 2


class Fetched(NamedTuple):
    """What became of one block: its payload's xxh3_64, or why it was not had; and its time to live.

    ``ttl_ms`` is negative where there is none: no such key, or a key that never expires.
    """

    outcome: int | MissCause
    ttl_ms: int


def fetch(wire: Wire, keys: RowKeys, rows: BlockRows, destinations: Sequence[Payload]) -> Iterator[Fetched]:
    """Each block in turn, verified, into its destination."""
    scratch = memoryview(bytearray(MAX_HEADER_BYTES))
    ahead = _window_blocks(destinations)
    asked = 0
    for block, destination in enumerate(destinations):
        if asked - block <= ahead // 2 and asked < len(rows):
            upto = min(block + ahead, len(rows))
            wire.send([b"".join(_get_request(keys.key(i)) for i in range(asked, upto))])
            asked = upto
        outcome = _fetch_one(wire, rows, block, destination, scratch)
        ttl = wire.read_reply()
        yield Fetched(outcome, ttl if isinstance(ttl, int) else -1)


def _window_blocks(payloads: Sequence[Payload]) -> int:
    largest = max((len(payload) for payload in payloads), default=1)
    return min(max(2, _WINDOW_BYTES // max(1, largest)), _WINDOW_BLOCKS)


def _get_request(key: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n%b*2\r\n$4\r\nPTTL\r\n%b" % (key, key)


def _fetch_one(
    wire: Wire, rows: BlockRows, block: int, destination: Payload, scratch: memoryview
) -> int | MissCause:
    size = wire.read_bulk_size()
    if size is None:
        return MissCause.COLD
    if isinstance(size, ErrorReply):
        return MissCause.CORRUPT if size.code == "WRONGTYPE" else MissCause.UNAVAILABLE
    before = size - len(destination)
    if HEADER_ALIGNMENT <= before <= MAX_HEADER_BYTES:
        wire.read_bulk(scratch[:before], destination.data)
        return verify_value(scratch[:before], destination, rows, block)
    head = scratch[: min(size, len(scratch))]
    wire.read_part(head)
    header = parse_header(head)
    wire.skip_bulk(size - len(head), scratch)
    return wrong_size(header, size)


def refresh(wire: Wire, keys: RowKeys, fetched: Sequence[Fetched], ttl_ms: int) -> None:
    """Renew what is past a quarter of its life, delete what nobody can read; wait for no answer."""
    commands = []
    expiry = bulk_string(b"%d" % ttl_ms)
    for block, (outcome, left_ms) in enumerate(fetched):
        if outcome is MissCause.CORRUPT:
            commands.append(b"*2\r\n$6\r\nUNLINK\r\n" + keys.key(block))
        elif not isinstance(outcome, MissCause) and left_ms < _REFRESH_BELOW * ttl_ms:
            commands.append(b"*3\r\n$7\r\nPEXPIRE\r\n" + keys.key(block) + expiry)
    if commands:
        wire.send([b"".join(commands)])
        wire.owe(len(commands))


class Values(NamedTuple):
    """What to store: the rows, with their payloads and the payloads' xxh3_64."""

    rows: BlockRows
    payloads: Sequence[Payload]
    checksums: Sequence[int]


def store(wire: Wire, keys: RowKeys, values: Values, ttl_ms: int) -> Iterator[SaveOutcome]:
    """Outcomes of the leading blocks, in order. After one that failed, no more are sent."""
    blocks = len(values.rows)
    batch_blocks = max(1, _window_blocks(values.payloads) // 2)
    expiry = b"\r\n$2\r\nPX\r\n" + bulk_string(b"%d" % ttl_ms)
    unanswered = 0
    for start in range(0, blocks, batch_blocks):
        batch = range(start, min(start + batch_blocks, blocks))
        wire.send([piece for block in batch for piece in _set_request(keys, values, block, expiry)])
        # This batch keeps the server busy while the one before it is answered.
        failed = False
        for outcome in _save_outcomes(wire, unanswered):
            failed = failed or outcome is not SaveOutcome.STORED
            yield outcome
        unanswered = len(batch)
        if failed:
            break
    yield from _save_outcomes(wire, unanswered)


def _set_request(keys: RowKeys, values: Values, block: int, expiry: bytes) -> Iterator[bytes | memoryview]:
    payload = values.payloads[block]
    header = pack_header(values.rows, block, len(payload), values.checksums[block])
    size = len(header) + len(payload)
    yield b"*5\r\n$3\r\nSET\r\n%b$%d\r\n%b" % (keys.key(block), size, header)
    yield payload.data
    yield expiry


def _save_outcomes(wire: Wire, blocks: int) -> Iterator[SaveOutcome]:
    for _ in range(blocks):
        reply = wire.read_reply()
        if reply == b"OK":
            yield SaveOutcome.STORED
        elif isinstance(reply, ErrorReply) and reply.code == "OOM":
            yield SaveOutcome.FULL
        else:
            yield SaveOutcome.UNAVAILABLE


def forget(wire: Wire, keys: RowKeys) -> int:
    """Delete all keys; how many there were."""
    segments = keys.segments()
    wire.send([keys.variadic(b"UNLINK", span) for span in segments])
    return sum(_count(wire.read_reply()) for _ in segments)


def memory_policy(wire: Wire) -> dict[str, str] | None:
    """The server's settings about ``maxmemory``; None where it does not let us ask."""
    wire.send([command(b"CONFIG", b"GET", b"maxmemory*")])
    reply = wire.read_reply()
    if not isinstance(reply, list):
        return None
    words = [word.decode("utf-8", "replace") for word in reply if isinstance(word, bytes)]
    return dict(zip(words[::2], words[1::2], strict=False))


def _count(reply: Reply) -> int:
    """A reply that is a number of keys; none where there is an error in its place."""
    return reply if isinstance(reply, int) else 0
