"""The vocabulary of blocks: identity, where a block lives, and why it may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

from hashing import Extras, Root, TokenInput, fingerprint_blocks, hash_blocks, pack_tokens
from kvstore.errors import NamespaceError

BlockHash = NewType("BlockHash", bytes)
SlotId = NewType("SlotId", int)

HASH_BYTES = 16
SEGMENT_BLOCKS = 128
"""Consecutive blocks of a chain that share a Redis Cluster slot (docs/wire-format.md)."""

Uint32Array = NDArray[np.uint32]
Uint64Array = NDArray[np.uint64]
SlotArray = NDArray[np.int64]


class TierName(StrEnum):
    """Where bytes live, fastest first."""

    DEVICE = "device"
    HOST = "host"
    SIDECAR = "sidecar"
    """Another process's store, below that of a worker which has one of its own."""
    REDIS = "redis"


class Residency(StrEnum):
    """Answer to "is this block here?": being written is neither yes nor no."""

    MISS = "miss"
    PENDING = "pending"
    READY = "ready"


class MissCause(StrEnum):
    """Why asked tokens were not hit; the label values of ``kvstore_miss_tokens_total``."""

    COLD = "cold"
    EVICTED = "evicted"
    EXPIRED = "expired"
    TAIL = "tail"
    COLLISION = "collision"
    CORRUPT = "corrupt"
    STALE = "stale"
    VERSION = "version"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    SLOWER = "slower"
    """Redis has it, and to load it is expected to take longer than to compute it."""
    QUOTA = "quota"
    UNKNOWN = "unknown"


class Shard(NamedTuple):
    """Which slice of a block's bytes: tensor-parallel and pipeline-parallel rank and size."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __str__(self) -> str:
        return f"{self.tp_rank}.{self.tp_size}.{self.pp_rank}.{self.pp_size}"


WHOLE = Shard()
"""The shard of a model that runs on one rank."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Identities of n blocks of one namespace and shard, as columns.

    ``hashes``, ``parents`` and ``tags`` are n × 16 packed bytes; ``indexes`` (n,) is each block's
    place in its chain. ``tokens`` (n, block_size) and ``fingerprints`` (n,) are None when the
    caller knows only hashes: then nothing but hash and parent can be compared. ``chain`` is the prompt
    that they are blocks of, None where they come from a pool: there is no prompt there.
    """

    namespace: bytes
    shard: Shard
    hashes: bytes
    parents: bytes
    tags: bytes
    indexes: Uint32Array
    tokens: Uint32Array | None
    fingerprints: Uint64Array | None
    chain: Chain | None = None

    def __len__(self) -> int:
        return len(self.indexes)

    def hash_at(self, block: int) -> BlockHash:
        return BlockHash(self.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    def tag_at(self, block: int) -> BlockHash:
        return BlockHash(self.tags[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    def parent_at(self, block: int) -> BlockHash:
        return BlockHash(self.parents[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    @classmethod
    def join(cls, parts: list[BlockRows]) -> BlockRows:
        """Rows of several pieces of one namespace and shard, in order; all with tokens."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            parts[0].namespace,
            parts[0].shard,
            b"".join(part.hashes for part in parts),
            b"".join(part.parents for part in parts),
            b"".join(part.tags for part in parts),
            np.concatenate([part.indexes for part in parts]),
            np.concatenate([part.tokens for part in parts if part.tokens is not None]),
            np.concatenate([part.fingerprints for part in parts if part.fingerprints is not None]),
        )

    def pick(self, blocks: NDArray[np.int64]) -> BlockRows:
        """The rows of some blocks, in that order: copies, or these rows themselves where that is all."""
        if len(blocks) == len(self) and np.array_equal(blocks, np.arange(len(self))):
            return self
        return BlockRows(
            self.namespace,
            self.shard,
            _pick_hashes(self.hashes, blocks),
            _pick_hashes(self.parents, blocks),
            _pick_hashes(self.tags, blocks),
            self.indexes[blocks],
            None if self.tokens is None else self.tokens[blocks],
            None if self.fingerprints is None else self.fingerprints[blocks],
            self.chain,
        )

    def slice(self, start: int, stop: int) -> BlockRows:
        """Blocks [start, stop) of these rows, sharing memory."""
        cut = slice(start * HASH_BYTES, stop * HASH_BYTES)
        return BlockRows(
            self.namespace,
            self.shard,
            self.hashes[cut],
            self.parents[cut],
            self.tags[cut],
            self.indexes[start:stop],
            None if self.tokens is None else self.tokens[start:stop],
            None if self.fingerprints is None else self.fingerprints[start:stop],
            self.chain,
        )


def _pick_hashes(packed: bytes, blocks: NDArray[np.int64]) -> bytes:
    return np.frombuffer(packed, dtype=f"V{HASH_BYTES}")[blocks].tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The whole blocks of one prompt in one namespace, from block 0.

    ``hashes`` is blocks × 16 packed bytes. ``prompt_tokens`` counts the tokens past the last
    block too, so that hit rates divide by everything that was asked. ``tokens``
    (blocks, block_size) and ``fingerprints`` (blocks,) are None when only hashes are known. ``extras``
    are what ``of`` hashed beside the tokens.
    """

    root: Root
    hashes: bytes
    prompt_tokens: int
    tokens: Uint32Array | None = None
    fingerprints: Uint64Array | None = None
    extras: Extras | None = None

    @classmethod
    def of(
        cls,
        root: Root,
        tokens: TokenInput,
        extras: Extras | None = None,
        *,
        max_blocks: int | None = None,
    ) -> Chain:
        """Hash a prompt; ``max_blocks`` limits the chain, not ``prompt_tokens``."""
        packed = pack_tokens(tokens)
        ids = np.frombuffer(packed, dtype="<u4")
        blocks = len(ids) // root.block_size
        if max_blocks is not None:
            blocks = min(blocks, max_blocks)
        # A copy: the caller may use its buffer again, and what was hashed must stay what is stored.
        used = ids[: blocks * root.block_size].copy()
        used.setflags(write=False)
        return cls(
            root=root,
            hashes=hash_blocks(root, used, extras),
            prompt_tokens=len(ids),
            tokens=used.reshape(blocks, root.block_size),
            fingerprints=fingerprint_blocks(used, root.block_size, extras),
            extras=extras,
        )

    def grown(self, tokens: TokenInput, extras: Extras | None = None) -> Chain:
        """This chain and the blocks of ``tokens`` behind it; ``extras`` of the whole prompt.

        ``tokens`` must be whole blocks, as a model produces them.
        """
        assert self.tokens is not None
        assert self.fingerprints is not None
        ids = np.frombuffer(pack_tokens(tokens), dtype="<u4").reshape(-1, self.root.block_size)
        first, root = len(self), self.root
        parent = self.hashes[-HASH_BYTES:] if first else None
        previous = int(self.fingerprints[-1]) if first else 0
        return Chain(
            root,
            self.hashes + hash_blocks(root, ids.reshape(-1), extras, parent=parent, first_block=first),
            max(self.prompt_tokens, (first + len(ids)) * root.block_size),
            np.concatenate((self.tokens, ids)),
            np.concatenate(
                (
                    self.fingerprints,
                    fingerprint_blocks(
                        ids.reshape(-1),
                        root.block_size,
                        extras,
                        first_block=first,
                        previous=previous,
                    ),
                )
            ),
            extras,
        )

    def __post_init__(self) -> None:
        if len(self.hashes) % HASH_BYTES:
            raise NamespaceError(
                f"packed hashes are {len(self.hashes)} bytes, expected a multiple of {HASH_BYTES}; "
                "pass the bytes that hash_blocks returned"
            )
        if self.tokens is not None and self.tokens.shape != (len(self), self.root.block_size):
            raise NamespaceError(
                f"tokens have shape {self.tokens.shape}, expected {(len(self), self.root.block_size)} "
                "for these hashes; hash and pass the same whole blocks"
            )

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def namespace(self) -> bytes:
        return self.root.digest

    @property
    def nbytes(self) -> int:
        """Bytes that the chain keeps."""
        arrays = [array.nbytes for array in (self.tokens, self.fingerprints) if array is not None]
        return len(self.hashes) + sum(arrays)

    @property
    def known_by_tokens(self) -> bool:
        """Whether blocks may be kept under this chain, and not only be found."""
        return self.tokens is not None and self.fingerprints is not None

    def rows(self, shard: Shard, start: int = 0, stop: int | None = None) -> BlockRows:
        """Identities of blocks [start, stop) for one shard."""
        stop = len(self) if stop is None else stop
        before = (start - 1) * HASH_BYTES
        parents = (
            self.root.digest + self.hashes[: max(0, stop - 1) * HASH_BYTES]
            if start == 0
            else self.hashes[before : (stop - 1) * HASH_BYTES]
        )
        return BlockRows(
            self.namespace,
            shard,
            self.hashes[start * HASH_BYTES : stop * HASH_BYTES],
            parents[: (stop - start) * HASH_BYTES],
            self._segment_tags(start, stop),
            np.arange(start, stop, dtype=np.uint32),
            None if self.tokens is None else self.tokens[start:stop],
            None if self.fingerprints is None else self.fingerprints[start:stop],
            self,
        )

    def _segment_tags(self, start: int, stop: int) -> bytes:
        parts = []
        block = start
        while block < stop:
            head = block - block % SEGMENT_BLOCKS
            end = min(stop, head + SEGMENT_BLOCKS)
            tag = self.hashes[head * HASH_BYTES : (head + 1) * HASH_BYTES]
            parts.append(tag * (end - block))
            block = end
        return b"".join(parts)
