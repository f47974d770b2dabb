"""Prefill to decode: the combined cache as a value.

Whole blocks are named by their hashes and come through the tiers; only the unfinished tail block
has no hash, so its keys and values travel in the message. Nothing is pickled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash

from hashing import ContentItem, Extras
from kvstore.block import Chain
from prefill.errors import HandoffError
from prefill.paged import KVMemory
from prefill.request import Request
from prefill.sequence import Sequence

VERSION = 1

_DIGEST_BYTES = 8
_KINDS = {
    "request_id": str,
    "namespace": bytes,
    "tokens": bytes,
    "hashes": bytes,
    "tail": bytes,
    "output": list,
    "max_new_tokens": int,
}


@dataclass(frozen=True, slots=True)
class Handoff:
    """One prefilled prompt. ``tokens`` are packed u32, ``hashes`` packed 16-byte block hashes.

    ``tail`` holds the KV of the tokens past the last whole block: (layers, planes, tokens, KV
    heads, head size) in the namespace's dtype. ``output`` starts with the first token.
    """

    request_id: str
    namespace: bytes
    tokens: bytes
    hashes: bytes
    tail: bytes
    output: list[int]
    max_new_tokens: int
    extras: Extras | None = None

    @classmethod
    def of(cls, sequence: Sequence, tail: bytes) -> Handoff:
        request = sequence.request
        return cls(
            request.request_id,
            sequence.chain.namespace,
            request.tokens.astype("<u4").tobytes(),
            sequence.chain.hashes,
            tail,
            list(sequence.output),
            request.max_new_tokens,
            request.extras,
        )

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) // 4

    def request(self, now: float) -> Request:
        """The request as the decode side sees it, arriving now."""
        tokens = np.frombuffer(self.tokens, dtype="<u4")
        return Request(self.request_id, tokens, self.max_new_tokens, now, self.extras)

    def to_bytes(self) -> bytes:
        body = bytes(msgpack.packb({"version": VERSION, **asdict(self)}))
        return xxhash.xxh3_64_digest(body) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Handoff:
        """HandoffError when ``data`` is no handoff of this version, or was damaged."""
        body = memoryview(data)[_DIGEST_BYTES:]
        try:
            if xxhash.xxh3_64_digest(body) != data[:_DIGEST_BYTES]:
                raise ValueError("checksum does not match")
            fields = msgpack.unpackb(body)
            version = fields.pop("version")
            if version != VERSION:
                raise HandoffError(
                    f"handoff has version {version}, expected {VERSION}; run the same release on both sides"
                )
            _require_kinds(fields)
            return cls(**{**fields, "extras": _read_extras(fields["extras"])})
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise HandoffError(
                f"{len(data)} bytes are no handoff ({error}); pass what to_bytes gave, whole and unchanged"
            ) from error

    def require_fitting(self, chain: Chain, memory: KVMemory) -> None:
        """HandoffError unless it is of this model and whole; ``chain`` is what its tokens hash to here."""
        if self.namespace != chain.namespace:
            raise HandoffError(
                f"handoff {self.request_id!r} is of namespace {self.namespace.hex()}, expected "
                f"{chain.namespace.hex()}; run the same model, dtype and block size on both sides"
            )
        filled = self.prompt_tokens % memory.block_size
        expected = _planes(memory) * filled * memory.spec.row_bytes
        if len(self.tail) != expected:
            raise HandoffError(
                f"handoff {self.request_id!r} has a tail of {len(self.tail)} bytes, expected {expected} for "
                f"{filled} tokens; run the same model and block size on both sides"
            )
        wrong = [token for token in self.output if token >= memory.spec.vocab_size]
        if self.hashes != chain.hashes or wrong:
            raise HandoffError(
                f"handoff {self.request_id!r} has hashes or output that no prompt has here, expected those "
                "of its own prompt and model; pass what to_bytes gave, unchanged"
            )


def read_tail(memory: KVMemory, sequence: Sequence) -> bytes:
    """KV of the prompt tokens past the last whole block."""
    filled = sequence.plan.prompt_tokens % sequence.block_size
    if not filled:
        return b""
    block = memory.block(int(sequence.table.offsets[sequence.plan.prompt_tokens // sequence.block_size]))
    return block.view(_planes(memory), memory.block_size, -1)[:, :filled].cpu().numpy().tobytes()


def write_tail(memory: KVMemory, sequence: Sequence, tail: bytes) -> None:
    """Put a tail that ``read_tail`` gave, and that fits, into the sequence's own block."""
    filled = sequence.plan.prompt_tokens % sequence.block_size
    if filled:
        block = memory.block(int(sequence.table.offsets[sequence.plan.prompt_tokens // sequence.block_size]))
        rows = np.frombuffer(tail, dtype=np.uint8).reshape(_planes(memory), filled, -1)
        target = block.view(_planes(memory), memory.block_size, -1)[:, :filled]
        target.copy_(torch.from_numpy(rows.copy()))


def _planes(memory: KVMemory) -> int:
    return 2 * memory.spec.layers


def _require_kinds(fields: dict[str, Any]) -> None:
    """ValueError where a field cannot be what ``Handoff.of`` put there: it came from another machine."""
    for name, kind in _KINDS.items():
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} is a {type(fields[name]).__name__}, not a {kind.__name__}")
    if len(fields["tokens"]) % 4:
        raise ValueError(f"tokens are {len(fields['tokens'])} bytes, not whole u32")
    if not fields["output"] or not all(isinstance(token, int) and token >= 0 for token in fields["output"]):
        raise ValueError("output has no first token")


def _read_extras(fields: dict[str, Any] | None) -> Extras | None:
    if fields is None:
        return None
    items = tuple(ContentItem(**item) for item in fields["items"])
    return Extras(fields["request_salt"], items, tuple(fields["embeddings"]))
