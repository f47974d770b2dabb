"""Traces of requests: what was asked and when, never the tokens themselves."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Literal, TypeVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hashing import Root, hash_blocks
from kvstore.block import Chain
from kvstore.errors import KVStoreError
from kvstore.hints import NO_HINTS, PRIORITY_MOST, Hints

MOONCAKE_BLOCK_TOKENS = 512

# One token a block, its id: a table row stays small, and the same code names blocks as for prompts.
_ROOT = Root(digest=bytes(16), block_size=1, algorithm="xxh3_128")
_GZIP_MAGIC = b"\x1f\x8b"
_SHOWN_CHARACTERS = 60
_RECORDING = b'"recording"'
_log = logging.getLogger(__name__)


class TraceError(KVStoreError):
    """A trace cannot be read, or a line of it is not what the format says."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    ``chain`` names its blocks, a partly filled last one included; ``tokens`` is the length of the
    prompt. ``time`` is in seconds since the trace began. ``block_bytes`` is what a block took of the
    pool of the server that recorded it; None where the trace does not say.
    """

    time: float
    chain: Chain
    tokens: int
    block_tokens: int
    hints: Hints = NO_HINTS
    block_bytes: int | None = None


class _Line(BaseModel):
    """The fields of a line that a replay needs; others are not looked at."""

    model_config = ConfigDict(strict=True)
    expected: ClassVar[str] = (
        'a Mooncake trace, with {"timestamp": milliseconds, "input_length": tokens, "hash_ids": [one integer '
        'a block]}, one with {"timestamp": milliseconds, "token_ids": [the prompt]}, or a recording of a '
        'server, which begins with {"recording": 1}; correct the line'
    )


class _MooncakeLine(_Line):
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1)
    hash_ids: list[int]


class _TokenLine(_Line):
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(min_length=1)


class _Heading(_Line):
    expected = 'a recording that begins with {"recording": 1}; read it with the version that wrote it'

    recording: Literal[1]


class _RecordedLine(_Line):
    expected = (
        'a line of a recording, with {"time": seconds, "namespace": text, "prompt_tokens": tokens, '
        '"block_size": tokens, "hashes": [one integer a block]}; drop the line, or record again'
    )

    time: float = Field(ge=0, allow_inf_nan=False)
    namespace: str
    prompt_tokens: int = Field(ge=1)
    block_size: int = Field(ge=1)
    hashes: list[int]
    block_bytes: int | None = Field(default=None, ge=1)
    ended: bool = False
    priority: int = Field(default=0, ge=-PRIORITY_MOST, le=PRIORITY_MOST)
    idle_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)


def read_trace(paths: Sequence[Path], block_tokens: int = 16) -> list[Request]:
    """Read traces of one JSON object a line, plain or gzipped.

    Either as Mooncake published them (FAST'25), where ``hash_ids`` names one block per 512 tokens of
    ``input_length``, the last one full or not; or with ``token_ids``, the prompt, which is cut into whole
    blocks of ``block_tokens`` as the store does; or recorded by a server, whose first line says
    ``{"recording": 1}``. Files are parts of one trace: the same ids are the same blocks, and the requests
    are merged by time, in the order given where that is equal. A recording may end anywhere: its server
    may still be at it, or have been killed. TraceError for what else cannot be read.
    """
    reader = _Reader(block_tokens)
    requests: list[Request] = []
    for path in paths:
        parse = reader.request
        for where, line in _lines(path):
            if _RECORDING in line:
                _parse(_Heading, line, where)
                parse = reader.recorded
            elif not line.isspace():
                requests.append(parse(line, where))
    if not requests:
        names = ", ".join(map(str, paths))
        raise TraceError(f"{names} holds no request, expected one JSON object a line; check the file")
    if not any(map(len, (request.chain for request in requests))):
        names = ", ".join(map(str, paths))
        raise TraceError(
            f"{names} has no prompt of {block_tokens} tokens, expected some that fill a block; lower the "
            "tokens of a block"
        )
    requests.sort(key=lambda request: request.time)
    return requests


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line with its place, for messages."""
    number, recorded = 0, False
    try:
        with path.open("rb") as file:
            packed = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            for number, line in enumerate(_unpacked(file) if packed else file, start=1):
                recorded = recorded or _RECORDING in line
                if recorded and not line.endswith((b"}", b"}\n")):
                    raise EOFError("its last line is cut")
                yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        if recorded and isinstance(error, EOFError):
            _log.warning(
                "%s is a recording without an end (%s): what is replayed is what it has", path, error
            )
            return
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if not number:
            raise TraceError(f"{path} cannot be read ({reason}), expected a trace; check the path") from error
        raise TraceError(
            f"{path} cannot be read after line {number} ({reason}), expected JSON lines, plain or gzipped; "
            "check the path, fetch the file again, or unpack what there is of it with gzip -dc"
        ) from error


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        yield from cast("BinaryIO", stream)


class _Reader:
    """Makes requests of lines; the same ids in different lines are the same blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._numbers: dict[int | tuple[str, int], int] = {}
        self._block_tokens = block_tokens
        self._token_root = Root(digest=bytes(16), block_size=block_tokens, algorithm="xxh3_128")

    def request(self, line: bytes, where: str) -> Request:
        if b'"token_ids"' in line:
            return self._of_tokens(_parse(_TokenLine, line, where))
        return self._of_blocks(_parse(_MooncakeLine, line, where), where)

    def _of_tokens(self, line: _TokenLine) -> Request:
        tokens = np.array(line.token_ids, dtype=np.uint32)
        whole = len(tokens) - len(tokens) % self._block_tokens
        # Only names are needed from here on, so the tokens are let go.
        chain = Chain(self._token_root, hash_blocks(self._token_root, tokens[:whole]), len(tokens))
        return Request(line.timestamp / 1000, chain, len(tokens), self._block_tokens)

    def _of_blocks(self, line: _MooncakeLine, where: str) -> Request:
        blocks = -(-line.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(line.hash_ids) != blocks:
            raise TraceError(
                f"{where}: hash_ids has {len(line.hash_ids)} ids, expected {blocks} for input_length "
                f"{line.input_length}, one per {MOONCAKE_BLOCK_TOKENS} tokens; correct one of the two"
            )
        chain = self._chain(line.hash_ids)
        return Request(line.timestamp / 1000, chain, line.input_length, MOONCAKE_BLOCK_TOKENS)

    def recorded(self, line: bytes, where: str) -> Request:
        """A line of a server's recording, after the first."""
        fields = _parse(_RecordedLine, line, where)
        size = fields.block_size
        if len(fields.hashes) * size > fields.prompt_tokens:
            raise TraceError(
                f"{where}: hashes has {len(fields.hashes)} numbers, expected at most "
                f"{fields.prompt_tokens // size} for {fields.prompt_tokens} prompt_tokens in blocks of {size}"
                "; record again, or drop the line"
            )
        chain = self._chain([(fields.namespace, name) for name in fields.hashes])
        hints = Hints(fields.ended, fields.priority, fields.idle_seconds)
        hints = NO_HINTS if hints == NO_HINTS else hints  # one object for all that say nothing
        return Request(fields.time, chain, fields.prompt_tokens, size, hints, fields.block_bytes)

    def _chain(self, names: Sequence[int | tuple[str, int]]) -> Chain:
        # Ids may be of any size; tokens are 32 bits wide.
        ids = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
        return Chain.of(_ROOT, np.array(ids, dtype=np.uint32))


_L = TypeVar("_L", bound=_Line)


def _parse(kind: type[_L], line: bytes, where: str) -> _L:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        # Of a line that is no object, or lacks a field, the whole is the value.
        value = repr(first["input"])
        if len(value) > _SHOWN_CHARACTERS:
            value = value[:_SHOWN_CHARACTERS] + "…"
        field = ".".join(map(str, first["loc"])) or "the line"
        raise TraceError(
            f"{where}: {field} is wrong ({first['msg']}): got {value}; expected {kind.expected}"
        ) from error
