"""Traces of requests: what was asked and when, never the tokens themselves."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hashing import Root
from kvstore.block import Chain
from kvstore.errors import KVStoreError

MOONCAKE_BLOCK_TOKENS = 512

# One token a block, its id: a table row stays small, and the same code names blocks as for prompts.
_ROOT = Root(digest=bytes(16), block_size=1, algorithm="xxh3_128")
_GZIP_MAGIC = b"\x1f\x8b"
_SHOWN_CHARACTERS = 60


class TraceError(KVStoreError):
    """A trace cannot be read, or a line of it is not what the format says."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    ``chain`` names its blocks, a partly filled last one included; ``tokens`` is the length of the
    prompt. ``time`` is in seconds since the trace began.
    """

    time: float
    chain: Chain
    tokens: int
    block_tokens: int

    def tokens_in(self, blocks: int) -> int:
        """Prompt tokens in the first ``blocks`` blocks."""
        return min(self.tokens, blocks * self.block_tokens)


class _MooncakeLine(BaseModel):
    """The fields of a line that a replay needs; ``output_length`` and others are not looked at."""

    model_config = ConfigDict(strict=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1)
    hash_ids: list[int]


def read_mooncake(paths: Sequence[Path]) -> list[Request]:
    """Read traces as Mooncake published them (FAST'25): one JSON object a line, plain or gzipped.

    ``hash_ids`` names one block per 512 tokens of ``input_length``, the last one full or not. Files are
    parts of one trace: the same ids are the same blocks, and the requests are merged by
    ``timestamp`` (milliseconds), in the order given where that is equal. TraceError for what cannot
    be read.
    """
    numbers: dict[int, int] = {}
    requests = [
        _request(_parse(line, where), where, numbers)
        for path in paths
        for where, line in _lines(path)
        if not line.isspace()
    ]
    if not requests:
        names = ", ".join(map(str, paths))
        raise TraceError(f"{names} holds no request, expected one JSON object a line; check the file")
    requests.sort(key=lambda request: request.time)
    return requests


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line with its place, for messages."""
    number = 0
    try:
        with path.open("rb") as file:
            packed = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            for number, line in enumerate(_unpacked(file) if packed else file, start=1):
                yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(
            f"{path} cannot be read after line {number} ({reason}), expected JSON lines, plain or gzipped; "
            "check the path, or fetch the file again"
        ) from error


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        yield from cast("BinaryIO", stream)


def _parse(line: bytes, where: str) -> _MooncakeLine:
    try:
        return _MooncakeLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        # Of a line that is no object, or lacks a field, the whole is the value.
        value = repr(first["input"])
        if len(value) > _SHOWN_CHARACTERS:
            value = value[:_SHOWN_CHARACTERS] + "…"
        field = ".".join(map(str, first["loc"])) or "the line"
        raise TraceError(
            f"{where}: {field} is wrong ({first['msg']}): got {value}; expected a Mooncake trace, with "
            '{"timestamp": milliseconds, "input_length": tokens, "hash_ids": [one integer a block]}'
        ) from error


def _request(line: _MooncakeLine, where: str, numbers: dict[int, int]) -> Request:
    blocks = -(-line.input_length // MOONCAKE_BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        raise TraceError(
            f"{where}: hash_ids has {len(line.hash_ids)} ids, expected {blocks} for input_length "
            f"{line.input_length}, one per {MOONCAKE_BLOCK_TOKENS} tokens; correct one of the two"
        )
    # Ids may be of any size; tokens are 32 bits wide.
    ids = [numbers.setdefault(block, len(numbers)) for block in line.hash_ids]
    chain = Chain.of(_ROOT, np.array(ids, dtype=np.uint32))
    return Request(line.timestamp / 1000, chain, line.input_length, MOONCAKE_BLOCK_TOKENS)
