"""What the redis tier says to one server: which keys exist, give them, take them, forget them.

Everything here speaks over a ``Wire`` that somebody else opened, and raises its OSErrors. The wire is
in step again when a function returns, and when a generator has been run to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.block import HASH_BYTES, BlockRows, MissCause
from kvstore.tiers.base import Payload, SaveOutcome, TierMatch
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
        self._lead_tag = b""
        self._lead = ""

    def key(self, block: int) -> bytes:
        """One key as an argument of a command."""
        return f"{self._lead_of(block)}{self._rows.hash_at(block).hex()}\r\n".encode()

    def keys(self, span: Span) -> bytes:
        """The keys of a span within one segment, joined."""
        start, stop = span
        lead = self._lead_of(start)
        hashes = self._rows.hashes[start * HASH_BYTES : stop * HASH_BYTES].hex("|", HASH_BYTES)
        return (lead + hashes.replace("|", f"\r\n{lead}") + "\r\n").encode()

    def _lead_of(self, block: int) -> str:
        """All that comes before the hash: the same for a whole segment."""
        tag = self._rows.tag_at(block)
        if tag != self._lead_tag:
            argument = bulk_string(block_key(self._prefix, self._rows, block))
            self._lead, self._lead_tag = argument.decode()[: -2 * HASH_BYTES - 2], tag
        return self._lead

    def segments(self) -> list[Span]:
        """The rows, cut where the segment tag changes: a command must not span two of them."""
        if len(self._rows) == 0:
            return []
        tags = np.frombuffer(self._rows.tags, dtype=np.uint64).reshape(-1, 2)
        cuts = np.flatnonzero((tags[1:] != tags[:-1]).any(axis=1)) + 1
        edges = [0, *cuts.tolist(), len(self._rows)]
        return list(pairwise(edges))

    def variadic(self, name: bytes, span: Span) -> bytes:
        """A command over the keys of a span within one segment."""
        start, stop = span
        return b"*%d\r\n" % (1 + stop - start) + bulk_string(name) + self.keys(span)


def growing_match(wire: Wire, keys: RowKeys) -> Iterator[TierMatch]:
    """Leading runs that exist, none shorter than the one before; the cause of the last one is final.

    The first segment is asked for alone, so that a cold prompt costs one small command; then all
    others in one round; then the first incomplete one is searched. Where the server answers with an
    error the run ends as UNAVAILABLE.
    """
    segments = keys.segments()
    for asked in (segments[:1], segments[1:]):
        wire.send([keys.variadic(b"EXISTS", span) for span in asked])
        incomplete: tuple[int, int | None] | None = None
        for start, stop in asked:
            count = _count(wire.read_reply())
            if incomplete is None and (count is None or count < stop - start):
                incomplete = (start, count)
            if incomplete is None:
                yield TierMatch(stop, None)
        if incomplete is not None:
            yield from _search(wire, keys, *incomplete)
            return


def _search(wire: Wire, keys: RowKeys, start: int, present: int | None) -> Iterator[TierMatch]:
    """Longer and longer runs from ``start`` on, in a segment of whose keys only ``present`` exist.

    The first guess is that these are the first ones, since heads outlive tails; then bisection.
    """
    if present is None:
        yield TierMatch(start, MissCause.UNAVAILABLE)
        return
    low, high = start, start + present
    guess = high
    while low < high:
        wire.send([keys.variadic(b"EXISTS", (low, guess))])
        count = _count(wire.read_reply())
        if count is None:
            yield TierMatch(low, MissCause.UNAVAILABLE)
            return
        if count == guess - low:
            low = guess
            yield TierMatch(low, None)
        else:
            high = min(guess - 1, low + count)
        guess = (low + high + 1) // 2
    yield TierMatch(low, MissCause.COLD)


class Arrival(NamedTuple):
    """What came for one block: the value's head, or why there is none. Nothing is compared yet.

    ``checksum`` is the xxh3_64 of what is now in the destination. ``ttl_ms`` is negative for a key
    that never expires, None where the server did not say.
    """

    head: bytes | MissCause
    checksum: int
    ttl_ms: int | None


def fetch(wire: Wire, keys: RowKeys, destinations: Sequence[Payload]) -> Iterator[Arrival]:
    """Payloads of the rows, in order, into their destinations.

    To compare them is left for later: the code for that would be out of the processor's caches
    after every payload, and the server would wait for it.
    """
    scratch = memoryview(bytearray(MAX_HEADER_BYTES))
    ahead = _window_blocks(destinations)
    asked = 0
    for block, destination in enumerate(destinations):
        if asked - block <= ahead // 2 and asked < len(destinations):
            upto = min(block + ahead, len(destinations))
            wire.send([b"".join(_get_request(keys.key(i)) for i in range(asked, upto))])
            asked = upto
        head, checksum = _fetch_one(wire, destination.data, scratch)
        ttl = wire.read_reply()
        yield Arrival(head, checksum, ttl if isinstance(ttl, int) else None)


def _window_blocks(payloads: Sequence[Payload]) -> int:
    largest = max((len(payload) for payload in payloads), default=1)
    return min(max(2, _WINDOW_BYTES // max(1, largest)), _WINDOW_BLOCKS)


def _get_request(key: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n%b*2\r\n$4\r\nPTTL\r\n%b" % (key, key)


def _fetch_one(wire: Wire, destination: memoryview, scratch: memoryview) -> tuple[bytes | MissCause, int]:
    size = wire.read_bulk_size()
    if size is None:
        return MissCause.COLD, 0
    if isinstance(size, ErrorReply):
        return (MissCause.CORRUPT if size.code == "WRONGTYPE" else MissCause.UNAVAILABLE), 0
    before = size - len(destination)
    if HEADER_ALIGNMENT <= before <= MAX_HEADER_BYTES:
        digest = xxhash.xxh3_64()
        wire.read_part(scratch[:before])
        wire.read_part(destination, tap=digest.update)
        wire.end_bulk()
        return bytes(scratch[:before]), digest.intdigest()
    head = scratch[: min(size, MAX_HEADER_BYTES)]
    wire.read_part(head)
    cause = wrong_size(parse_header(head), size)
    wire.skip_part(size - len(head), scratch)
    wire.end_bulk()
    return cause, 0


Outcome = int | MissCause
"""The xxh3_64 of a payload that is the block's, or why it was not had."""


def judge(rows: BlockRows, destinations: Sequence[Payload], arrivals: Sequence[Arrival]) -> list[Outcome]:
    """What became of each block that arrived."""
    return [
        head
        if isinstance(head, MissCause)
        else verify_value(rows, block, head, destinations[block], checksum)
        for block, (head, checksum, _) in enumerate(arrivals)
    ]


def refresh(
    wire: Wire, keys: RowKeys, outcomes: Sequence[Outcome], arrivals: Sequence[Arrival], ttl_ms: int
) -> None:
    """Renew what is past a quarter of its life, delete what nobody can read; wait for no answer."""
    commands = []
    expiry = bulk_string(b"%d" % ttl_ms)
    for block, (outcome, arrival) in enumerate(zip(outcomes, arrivals, strict=True)):
        if outcome is MissCause.CORRUPT:
            commands.append(b"*2\r\n$6\r\nUNLINK\r\n" + keys.key(block))
        elif isinstance(outcome, int) and _is_due(arrival.ttl_ms, ttl_ms):
            commands.append(b"*3\r\n$7\r\nPEXPIRE\r\n" + keys.key(block) + expiry)
    if commands:
        wire.send([b"".join(commands)])
        wire.owe(len(commands))


def _is_due(left_ms: int | None, ttl_ms: int) -> bool:
    return left_ms is not None and left_ms < _REFRESH_BELOW * ttl_ms


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
    return sum(_count(wire.read_reply()) or 0 for _ in segments)


def memory_policy(wire: Wire) -> dict[str, str] | None:
    """The server's settings about ``maxmemory``; None where it does not let us ask."""
    wire.send([command(b"CONFIG", b"GET", b"maxmemory*")])
    reply = wire.read_reply()
    if not isinstance(reply, list):
        return None
    words = [word.decode("utf-8", "replace") for word in reply if isinstance(word, bytes)]
    return dict(zip(words[::2], words[1::2], strict=False))


def _count(reply: Reply) -> int | None:
    """A reply that is a number of keys; None where there is an error in its place."""
    return reply if isinstance(reply, int) else None
