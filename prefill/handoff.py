"""Prefill to decode: the combined cache as a value.

Whole blocks are named by their hashes and come through the tiers; only the unfinished tail block
has no hash, so its keys and values travel in the message. Nothing is pickled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash

from hashing import ContentItem, Extras
from kvstore.block import Chain
from prefill.errors import HandoffError, PromptError
from prefill.paged import BlockTable, KVMemory
from prefill.request import GREEDY, REQUEST_ID_MAX, STOP_IDS_MAX, Request, Result, Sampling

VERSION = 2

_DIGEST_BYTES = 8
# Bounds on what another process sent: time and memory to read it stay in proportion to a prompt.
_LIST_MAX = 1 << 20
_ITEMS_MAX = 1024
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, PromptError, msgpack.UnpackException)
_KINDS = {
    "request_id": str,
    "namespace": bytes,
    "tokens": bytes,
    "hashes": bytes,
    "tail": bytes,
    "output": list,
    "max_new_tokens": int,
    "sampling": dict,
    "stop_ids": list,
    "ignore_eos": bool,
    "cached_tokens": int,
    "queue_seconds": float,
    "execution_seconds": float,
}


@dataclass(frozen=True, slots=True)
class Handoff:
    """One prefilled prompt. ``tokens`` are packed u32, ``hashes`` packed 16-byte block hashes.

    ``tail`` holds the KV of the tokens past the last whole block: (layers, planes, tokens, KV
    heads, head size) in the namespace's dtype. ``output`` starts with the first token. The state of
    ``sampling`` is its seed and the length of ``output``. ``cached_tokens`` and the times are the
    prefill side's, as in its Result.
    """

    request_id: str
    namespace: bytes
    tokens: bytes
    hashes: bytes
    tail: bytes
    output: list[int]
    max_new_tokens: int
    extras: Extras | None = None
    sampling: Sampling = GREEDY
    stop_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    execution_seconds: float = 0.0

    @classmethod
    def of(cls, request: Request, chain: Chain, tail: bytes, result: Result) -> Handoff:
        """``chain`` has all whole blocks of the prompt, ``result`` is what came of it here."""
        return cls(
            request.request_id,
            chain.namespace,
            np.asarray(request.tokens, dtype="<u4").tobytes(),
            chain.hashes,
            tail,
            result.tokens,
            request.max_new_tokens,
            request.extras,
            request.sampling,
            list(request.stop_ids),
            request.ignore_eos,
            result.cached_tokens,
            result.queue_seconds,
            result.execution_seconds,
        )

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) // 4

    def request(self, now: float) -> Request:
        """The request as the decode side sees it, arriving now."""
        tokens = np.frombuffer(self.tokens, dtype="<u4")
        return Request(
            self.request_id,
            tokens,
            self.max_new_tokens,
            now,
            self.extras,
            sampling=self.sampling,
            stop_ids=tuple(self.stop_ids),
            ignore_eos=self.ignore_eos,
        )

    def answers(self, request: Request) -> bool:
        """Whether it is what came of ``request``, whose seed the prefill side may have chosen."""
        return (
            self.tokens == np.asarray(request.tokens, dtype="<u4").tobytes()
            and self.max_new_tokens == request.max_new_tokens
            and self.extras == request.extras
            and self.stop_ids == list(request.stop_ids)
            and self.ignore_eos == request.ignore_eos
        )

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
            fields = msgpack.unpackb(body, max_array_len=_LIST_MAX)
            version = fields.pop("version")
            if version != VERSION:
                raise HandoffError(
                    f"handoff has version {version}, expected {VERSION}; run the same release on both sides"
                )
            _require_kinds(fields)
            read = {"extras": _read_extras(fields["extras"]), "sampling": _read_sampling(fields["sampling"])}
            return cls(**{**fields, **read})
        except _UNREADABLE as error:
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
        if self.hashes != chain.hashes or wrong or len(self.output) > max(1, self.max_new_tokens):
            raise HandoffError(
                f"handoff {self.request_id!r} has hashes or output that no prompt has here, expected those "
                "of its own prompt and model; pass what to_bytes gave, unchanged"
            )


def read_tail(memory: KVMemory, table: BlockTable, prompt_tokens: int) -> bytes:
    """KV of the prompt tokens past the last whole block; ``table`` are the sequence's blocks."""
    filled = prompt_tokens % memory.block_size
    if not filled:
        return b""
    return _tail_rows(memory, table, prompt_tokens)[:, :filled].cpu().numpy().tobytes()


def write_tail(memory: KVMemory, table: BlockTable, prompt_tokens: int, tail: bytes) -> None:
    """Put a tail that ``read_tail`` gave, and that fits, into the sequence's own block."""
    filled = prompt_tokens % memory.block_size
    if filled:
        rows = np.frombuffer(tail, dtype=np.uint8).reshape(_planes(memory), filled, -1)
        _tail_rows(memory, table, prompt_tokens)[:, :filled].copy_(torch.from_numpy(rows.copy()))


def _tail_rows(memory: KVMemory, table: BlockTable, prompt_tokens: int) -> torch.Tensor:
    block = memory.block(int(table.offsets[prompt_tokens // memory.block_size]))
    return block.view(_planes(memory), memory.block_size, -1)


def _planes(memory: KVMemory) -> int:
    return 2 * memory.spec.layers


def _require_kinds(fields: dict[str, Any]) -> None:
    """ValueError where a field cannot be what ``Handoff.of`` put there: it came from another machine."""
    for name, kind in _KINDS.items():
        if type(fields[name]) is not kind:  # a bool is no number here
            raise ValueError(f"{name} is a {type(fields[name]).__name__}, not a {kind.__name__}")
    if len(fields["request_id"]) > REQUEST_ID_MAX:
        raise ValueError(f"request_id has more than {REQUEST_ID_MAX} characters")
    if len(fields["tokens"]) % 4:
        raise ValueError(f"tokens are {len(fields['tokens'])} bytes, not whole u32")
    if not fields["output"] or not _are_tokens(fields["output"]):
        raise ValueError("output has no first token")
    if not _are_tokens(fields["stop_ids"]) or len(fields["stop_ids"]) > STOP_IDS_MAX:
        raise ValueError(f"stop_ids are no token ids, or more than {STOP_IDS_MAX}")
    if not 0 <= fields["cached_tokens"] <= len(fields["tokens"]) // 4:
        raise ValueError(f"cached_tokens is {fields['cached_tokens']}, more or less than the prompt has")
    for name in ("queue_seconds", "execution_seconds"):
        if not (isfinite(fields[name]) and fields[name] >= 0):
            raise ValueError(f"{name} is {fields[name]}, which is no duration")


def _are_tokens(values: list[Any]) -> bool:
    return all(type(token) is int and token >= 0 for token in values)


def _read_sampling(fields: dict[str, Any]) -> Sampling:
    sampling = Sampling(**fields)
    if type(sampling.top_k) is not int or type(sampling.seed) not in (int, type(None)):
        raise ValueError("top_k or seed is no whole number")
    if not sampling.greedy and sampling.seed is None:
        raise ValueError("sampling at random has no seed to go on with")
    return sampling


def _read_extras(fields: dict[str, Any] | None) -> Extras | None:
    if fields is None:
        return None
    if len(fields["items"]) > _ITEMS_MAX:
        raise ValueError(f"extras have {len(fields['items'])} items, more than {_ITEMS_MAX}")
    items = tuple(ContentItem(**item) for item in fields["items"])
    return Extras(fields["request_salt"], items, tuple(fields["embeddings"]))
