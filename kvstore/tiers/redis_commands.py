"""What the redis tier says to one server about values: give them, take them, forget them.

Everything here speaks over a ``Wire`` that somebody else opened, and raises its OSErrors. The wire is
in step again when a function returns, and when a generator has been run to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from kvstore.block import BlockRows, MissCause
from kvstore.tiers.base import Payload, SaveOutcome
from kvstore.tiers.redis_keys import RowKeys
from kvstore.tiers.redis_value import (
    HEADER_ALIGNMENT,
    MAX_HEADER_BYTES,
    Headers,
    parse_header,
    verify_value,
    wrong_size,
)
from kvstore.tiers.redis_wire import ErrorReply, Reply, StreamError, Wire, bulk_string, command

# Asked for and not yet read. Enough to keep the server busy while a reply is read; more would only
# pile up in its memory and fall out of the caches before it is sent.
_WINDOW_BYTES = 2 * 2**20
_WINDOW_BLOCKS = 64
_SHORTEST_REPLY_BYTES = 4
_REFRESH_BELOW = 0.75


class Arrival(NamedTuple):
    """What came for one block: the value's head, or why there is none. Nothing is compared yet.

    ``checksum`` is the xxh3_64 of what is now in the destination. ``ttl_ms`` is negative for a key
    that never expires, None where the server did not say.
    """

    head: bytes | MissCause | ErrorReply
    checksum: int
    ttl_ms: int | None


def fetch(
    wire: Wire, keys: RowKeys, blocks: Sequence[int], destinations: Sequence[Payload]
) -> Iterator[Arrival]:
    """Payloads of some blocks, in order, each into its destination.

    To compare them is left for later: the code for that would be out of the processor's caches
    after every payload, and the server would wait for it.
    """
    scratch = memoryview(bytearray(MAX_HEADER_BYTES))
    ahead = _window_blocks(destinations)
    asked = likely = 0
    request = b"%b*2\r\n$3\r\nGET\r\n%%b%b*2\r\n$4\r\nPTTL\r\n%%b" % (wire.preface, wire.preface)
    for done, destination in enumerate(destinations):
        if asked - done <= ahead // 2 and asked < len(destinations):
            upto = min(done + ahead, len(destinations))
            named = map(keys.key, blocks[asked:upto])
            wire.send([b"".join([request % (key, key) for key in named])])
            asked = upto
        surely = _SHORTEST_REPLY_BYTES * (1 + 2 * (asked - done - 1))
        # Most values are as long as the one before.
        size = likely if wire.take(b"$%d\r\n" % likely) else wire.read_bulk_size()
        likely = size if isinstance(size, int) else likely
        head, checksum = _fetch_one(wire, size, destination.data, scratch, surely)
        ttl = wire.read_reply()
        yield Arrival(head, checksum, ttl if isinstance(ttl, int) else None)


def _window_blocks(payloads: Sequence[Payload]) -> int:
    largest = max((len(payload) for payload in payloads), default=1)
    return min(max(2, _WINDOW_BYTES // max(1, largest)), _WINDOW_BLOCKS)


def _fetch_one(
    wire: Wire, size: int | ErrorReply | None, destination: memoryview, scratch: memoryview, surely: int
) -> tuple[bytes | MissCause | ErrorReply, int]:
    """The head of a value of this size and the checksum of the rest, which goes to its destination."""
    if size is None:
        return MissCause.COLD, 0
    if isinstance(size, ErrorReply):
        return (MissCause.CORRUPT if size.code == "WRONGTYPE" else size), 0
    before = size - len(destination)
    if HEADER_ALIGNMENT <= before <= MAX_HEADER_BYTES:
        digest = xxhash.xxh3_64()
        wire.read_string(scratch[:before], destination, digest.update, surely=surely)
        return bytes(scratch[:before]), digest.intdigest()
    head = scratch[: min(size, MAX_HEADER_BYTES)]
    wire.read_part(head)
    cause = wrong_size(parse_header(head), size)
    wire.skip_part(size - len(head), scratch)
    wire.end_bulk()
    return cause, 0


Outcome = int | MissCause | ErrorReply
"""The xxh3_64 of a payload that is the block's, or why it was not had."""


def judge(
    rows: BlockRows, blocks: Sequence[int], destinations: Sequence[Payload], arrivals: Sequence[Arrival]
) -> list[Outcome]:
    """What became of each block that arrived; ``arrivals`` may be shorter than ``blocks``."""
    knows_all = rows.tokens is not None and rows.fingerprints is not None
    headers = Headers(rows) if knows_all else None
    outcomes: list[Outcome] = []
    for block, destination, (head, checksum, _) in zip(blocks, destinations, arrivals, strict=False):
        if not isinstance(head, bytes):
            outcomes.append(head)
        elif headers is not None and head == headers.header(block, len(destination), checksum):
            # Word for word what this version writes before these very bytes.
            outcomes.append(checksum)
        else:
            outcomes.append(verify_value(rows, block, head, destination, checksum))
    return outcomes


def refresh(
    wire: Wire, keys: RowKeys, blocks: Sequence[int], found: Sequence[tuple[Outcome, Arrival]], ttl_ms: int
) -> None:
    """Renew what is past a quarter of its life, delete what nobody can read; wait for no answer."""
    commands = []
    expiry = bulk_string(b"%d" % ttl_ms)
    for block, (outcome, arrival) in zip(blocks, found, strict=True):
        if outcome is MissCause.CORRUPT:
            commands.append(b"%b*2\r\n$6\r\nUNLINK\r\n%b" % (wire.preface, keys.key(block)))
        elif isinstance(outcome, int) and _is_due(arrival.ttl_ms, ttl_ms):
            commands.append(b"%b*3\r\n$7\r\nPEXPIRE\r\n%b%b" % (wire.preface, keys.key(block), expiry))
    if commands:
        wire.send([b"".join(commands)])
        wire.owe(len(commands))


def _is_due(left_ms: int | None, ttl_ms: int) -> bool:
    return left_ms is not None and left_ms < _REFRESH_BELOW * ttl_ms


class Values:
    """What to store: the rows, with their payloads and the payloads' xxh3_64. Not thread-safe."""

    def __init__(self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int]) -> None:
        self.payloads = payloads
        self._checksums = checksums
        self._headers = Headers(rows)

    def header(self, block: int) -> bytes:
        """What comes before a block's payload."""
        return self._headers.header(block, len(self.payloads[block]), self._checksums[block])


def store(
    wire: Wire, keys: RowKeys, blocks: Sequence[int], values: Values, ttl_ms: int
) -> Iterator[SaveOutcome | ErrorReply]:
    """STORED, or an error, for the leading ones of some blocks.

    After an error no more are sent; only ASK says nothing about any other block.
    """
    payloads = [values.payloads[block] for block in blocks]
    batch_blocks = max(1, _window_blocks(payloads) // 2)
    ends = wire.preface, b"\r\n$2\r\nPX\r\n" + bulk_string(b"%d" % ttl_ms)
    unanswered = 0
    for start in range(0, len(blocks), batch_blocks):
        batch = blocks[start : start + batch_blocks]
        wire.send([piece for block in batch for piece in _set_request(keys, values, block, ends)])
        # This batch keeps the server busy while the one before it is answered.
        failed = False
        for outcome in _save_outcomes(wire, unanswered):
            failed = failed or (isinstance(outcome, ErrorReply) and outcome.code != "ASK")
            yield outcome
        unanswered = len(batch)
        if failed:
            break
    yield from _save_outcomes(wire, unanswered)


def _set_request(
    keys: RowKeys, values: Values, block: int, ends: tuple[bytes, bytes]
) -> Iterator[bytes | memoryview]:
    payload = values.payloads[block]
    header = values.header(block)
    size = len(header) + len(payload)
    yield b"%b*5\r\n$3\r\nSET\r\n%b$%d\r\n%b" % (ends[0], keys.key(block), size, header)
    yield payload.data
    yield ends[1]


def _save_outcomes(wire: Wire, blocks: int) -> Iterator[SaveOutcome | ErrorReply]:
    for _ in range(blocks):
        if wire.take(b"+OK\r\n"):
            yield SaveOutcome.STORED
            continue
        reply = wire.read_reply()
        if isinstance(reply, ErrorReply):
            yield reply
        elif reply == b"OK":
            yield SaveOutcome.STORED
        else:
            raise StreamError(f"got {reply!r:.32}, expected OK; is this a Redis server?")


def forget(wire: Wire, keys: RowKeys, blocks: Sequence[int]) -> Iterator[int | ErrorReply]:
    """Delete some blocks' keys; 1 for each that there was."""
    request = wire.preface + b"*2\r\n$6\r\nUNLINK\r\n%b"
    wire.send([b"".join(request % keys.key(block) for block in blocks)])
    for _ in blocks:
        yield read_number(wire)


def slot_ranges(wire: Wire) -> list[Reply] | ErrorReply:
    """Which node of a Redis Cluster serves which hash slots, in the server's own words."""
    wire.send([command(b"CLUSTER", b"SLOTS")])
    reply = wire.read_reply()
    if isinstance(reply, list | ErrorReply):
        return reply
    raise StreamError(f"got {reply!r:.32}, expected ranges of hash slots; is this a Redis server?")


def memory_policy(wire: Wire) -> dict[str, str] | None:
    """The server's settings about ``maxmemory``; None where it does not let us ask."""
    wire.send([command(b"CONFIG", b"GET", b"maxmemory*")])
    reply = wire.read_reply()
    if not isinstance(reply, list):
        return None
    words = [word.decode("utf-8", "replace") for word in reply if isinstance(word, bytes)]
    return dict(zip(words[::2], words[1::2], strict=False))


def read_number(wire: Wire) -> int | ErrorReply:
    """The next reply, to a command that is answered with a number."""
    reply = wire.read_reply()
    if isinstance(reply, int | ErrorReply):
        return reply
    raise StreamError(f"got {reply!r:.32}, expected a number; is this a Redis server?")
