"""The table of one extent: numpy columns over a buffer, one row a slot.

In the host tier the buffer is shared memory, so that clients verify what they read and a
restarted server finds its blocks again; in the device tier it is ordinary memory. Columns, not
records, so that matching a run, comparing its tokens and scanning after a restart are vectorised.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hashing import key_stream
from kvstore.block import BlockRows, Shard, Uint64Array

COLUMN_ALIGNMENT = 64
WORDS_PER_HASH = 2

Rows = NDArray[np.int64] | slice


class SlotState(IntEnum):
    """Life of a slot (docs/architecture.md, "Life of a block")."""

    FREE = 0
    STAGED = 1
    READY = 2
    QUARANTINED = 3


class Column(NamedTuple):
    """One column: ``width`` values of a numpy ``dtype`` a row."""

    name: str
    dtype: str
    width: int


def _columns(block_size: int) -> tuple[Column, ...]:
    """Columns in file order.

    ``shard`` packs four u16; ``…_at`` and ``lease_until`` are seconds. ``writer`` is the number of the
    client that may write to a slot that is not FREE or READY, 0 for the server itself. ``checked`` is 0
    where nobody has compared the payload with its checksum since another process left it.
    """
    return (
        Column("generation", "<u8", 1),
        Column("hash", "<u8", WORDS_PER_HASH),
        Column("parent", "<u8", WORDS_PER_HASH),
        Column("tag", "<u8", WORDS_PER_HASH),
        Column("fingerprint", "<u8", 1),
        Column("shard", "<u8", 1),
        Column("checksum", "<u8", 1),
        Column("identity", "<u8", 1),
        Column("stored_at", "<f8", 1),
        Column("used_at", "<f8", 1),
        Column("lease_until", "<f8", 1),
        Column("namespace", "<u4", 1),
        Column("index", "<u4", 1),
        Column("reads", "<u4", 1),
        Column("writer", "<u4", 1),
        Column("tokens", "<u4", block_size),
        Column("state", "u1", 1),
        Column("checked", "u1", 1),
    )


def _aligned(size: int) -> int:
    return -(-size // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT


def table_bytes(rows: int, block_size: int) -> int:
    """Bytes of a table of ``rows`` rows, column padding included."""
    return sum(_aligned(rows * np.dtype(c.dtype).itemsize * c.width) for c in _columns(block_size))


def pack_shard(shard: Shard) -> int:
    """Four u16 in one word, as stored in the ``shard`` column."""
    return sum(part << (16 * place) for place, part in enumerate(shard))


def unpack_shard(word: int) -> Shard:
    """The inverse of ``pack_shard``."""
    return Shard(*(word >> (16 * place) & 0xFFFF for place in range(4)))


def hash_words(packed: bytes) -> Uint64Array:
    """Packed 16-byte hashes as (n, 2) words, the form in which columns are compared."""
    return np.frombuffer(packed, dtype="<u8").reshape(-1, WORDS_PER_HASH)


def same_rows(ours: NDArray[Any], theirs: NDArray[Any]) -> int:
    """How many leading rows of two equally shaped arrays are equal."""
    differs = (ours != theirs).reshape(-1)
    if not len(differs):
        return 0
    first = int(differs.argmax())
    return first // (len(differs) // len(ours)) if differs[first] else len(ours)


class Table:
    """Columns of one extent. Owner: the pool; shared with readers through the buffer."""

    def __init__(self, buffer: NDArray[np.uint8], rows: int, block_size: int) -> None:
        self.rows = rows
        self.block_size = block_size
        columns: dict[str, NDArray[np.generic]] = {}
        offset = 0
        for column in _columns(block_size):
            size = rows * np.dtype(column.dtype).itemsize * column.width
            view = buffer[offset : offset + size].view(column.dtype)
            columns[column.name] = view.reshape(rows, column.width) if column.width > 1 else view
            offset += _aligned(size)
        self.generation: Uint64Array = columns["generation"]  # type: ignore[assignment]
        self.hash: Uint64Array = columns["hash"]  # type: ignore[assignment]
        self.parent: Uint64Array = columns["parent"]  # type: ignore[assignment]
        self.tag: Uint64Array = columns["tag"]  # type: ignore[assignment]
        self.fingerprint: Uint64Array = columns["fingerprint"]  # type: ignore[assignment]
        self.shard: Uint64Array = columns["shard"]  # type: ignore[assignment]
        self.checksum: Uint64Array = columns["checksum"]  # type: ignore[assignment]
        self.identity: Uint64Array = columns["identity"]  # type: ignore[assignment]
        self.stored_at: NDArray[np.float64] = columns["stored_at"]  # type: ignore[assignment]
        self.reads: NDArray[np.uint32] = columns["reads"]  # type: ignore[assignment]
        self.used_at: NDArray[np.float64] = columns["used_at"]  # type: ignore[assignment]
        self.lease_until: NDArray[np.float64] = columns["lease_until"]  # type: ignore[assignment]
        self.namespace: NDArray[np.uint32] = columns["namespace"]  # type: ignore[assignment]
        self.index: NDArray[np.uint32] = columns["index"]  # type: ignore[assignment]
        self.writer: NDArray[np.uint32] = columns["writer"]  # type: ignore[assignment]
        self.tokens: NDArray[np.uint32] = columns["tokens"].reshape(rows, block_size)  # type: ignore[assignment]
        self.state: NDArray[np.uint8] = columns["state"]  # type: ignore[assignment]
        self.checked: NDArray[np.uint8] = columns["checked"]  # type: ignore[assignment]

    def name_rows(self, rows: Rows, identities: BlockRows, namespace_id: int) -> None:
        """Write the identity columns of ``rows``; the blocks must carry tokens."""
        assert identities.tokens is not None
        assert identities.fingerprints is not None
        self.hash[rows] = hash_words(identities.hashes)
        self.parent[rows] = hash_words(identities.parents)
        self.tag[rows] = hash_words(identities.tags)
        self.index[rows] = identities.indexes
        self.tokens[rows] = identities.tokens
        self.fingerprint[rows] = identities.fingerprints
        self.shard[rows] = pack_shard(identities.shard)
        self.namespace[rows] = namespace_id
        self.identity[rows] = self.identity_of(rows)

    def read_rows(self, rows: Rows, namespace: bytes, shard: Shard) -> BlockRows:
        """Copy the identities of ``rows`` out; all must be of this namespace and shard."""
        return BlockRows(
            namespace=namespace,
            shard=shard,
            hashes=self.hash[rows].tobytes(),
            parents=self.parent[rows].tobytes(),
            tags=self.tag[rows].tobytes(),
            indexes=self.index[rows].copy(),
            tokens=self.tokens[rows].copy(),
            fingerprints=self.fingerprint[rows].copy(),
        )

    def agreement(self, rows: Rows, identities: BlockRows) -> int:
        """How many leading rows have the index, parent, tokens and fingerprint that the caller knows.

        Namespace, shard and hash are what the rows were found by, so they are not compared again.
        """
        agreed = same_rows(self.index[rows], identities.indexes)
        agreed = min(agreed, same_rows(self.parent[rows], hash_words(identities.parents)))
        if identities.tokens is not None:
            agreed = min(agreed, same_rows(self.tokens[rows], identities.tokens))
        if identities.fingerprints is not None:
            agreed = min(agreed, same_rows(self.fingerprint[rows], identities.fingerprints))
        return agreed

    def identity_of(self, rows: Rows) -> Uint64Array:
        """Checksum of the identity columns, one word a row; never 0.

        A multilinear hash over 64-bit words (Lemire and Kaser, "Strongly universal string hashing
        is fast", 2014): any single changed word changes it, and it is computed by column.
        """
        keys = key_stream(self.block_size + 10)
        total = self.tokens[rows].astype(np.uint64) @ keys[10:]
        for place, pairs in enumerate((self.hash, self.parent, self.tag)):
            total += pairs[rows] @ keys[2 * place : 2 * place + 2]
        singles: tuple[NDArray[Any], ...] = (self.fingerprint, self.shard, self.namespace, self.index)
        for place, words in enumerate(singles, start=6):
            total += words[rows].astype(np.uint64) * keys[place]
        return total | np.uint64(1)
