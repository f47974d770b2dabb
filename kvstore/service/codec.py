"""Between the messages of ``kvstore.v1`` and the store's own values. Every check names what was wrong."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hashing import ContentItem, Extras, KVShape, Namespace, Root, fingerprint_blocks
from kvstore.block import HASH_BYTES, Chain, Shard, TierName
from kvstore.errors import HintsError
from kvstore.hints import Hints, checked
from kvstore.service.errors import InvalidRequestError, Limit, LimitError
from kvstore.spec import NamespaceSpec
from kvstore.v1 import block_pb2, types_pb2

PROTOCOL_VERSION = 1
MESSAGE_BYTES = 16 << 20
"""Longest message, in both directions."""
PIECE_BYTES = 1 << 20
"""Longest piece of a payload stream."""
RANKS_MAX = 1024
ROWS_MAX = 1 << 19
"""Blocks × ranks of one call, each of which takes about a hundred bytes while it is served."""
TOKENS_MAX = 2**32 - 1
ITEMS_MAX = 4096
ITEM_BLOCKS_MAX = 1 << 18
"""Blocks that the content items of a prompt lie in, each counted by itself."""
TEXT_BYTES_MAX = 256
"""Of a name that is kept: of a request, a pin, or in a namespace's description."""

TIERS = {
    TierName.DEVICE: types_pb2.TIER_DEVICE,
    TierName.HOST: types_pb2.TIER_HOST,
    TierName.REDIS: types_pb2.TIER_REDIS,
}
TIER_NAMES: dict[int, TierName] = {value: name for name, value in TIERS.items()}
_LISTED_TIERS = ", ".join(f"{value} ({name})" for value, name in TIER_NAMES.items())


class Parallelism(NamedTuple):
    """Over how many ranks a model is cut."""

    tp_size: int
    pp_size: int

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All ranks, tp ranks of pp rank 0 first."""
        return tuple(
            Shard(tp, self.tp_size, pp, self.pp_size)
            for pp in range(self.pp_size)
            for tp in range(self.tp_size)
        )


def require_text(name: str, text: str) -> None:
    """InvalidRequestError for a name that is too long to be kept and repeated."""
    size = len(text.encode())
    if size > TEXT_BYTES_MAX:
        raise InvalidRequestError(
            f"{name} has {size} bytes, expected at most {TEXT_BYTES_MAX}; shorten it, or send a digest of it"
        )


def parallelism_of(message: types_pb2.Parallelism) -> Parallelism:
    found = Parallelism(message.tp_size or 1, message.pp_size or 1)
    if found.tp_size * found.pp_size > RANKS_MAX:
        raise InvalidRequestError(
            f"the model is cut over {found.tp_size} × {found.pp_size} ranks, expected at most {RANKS_MAX}; "
            "correct parallelism"
        )
    return found


def shard_of(message: types_pb2.Shard) -> Shard:
    return Shard(message.tp_rank, message.tp_size or 1, message.pp_rank, message.pp_size or 1)


def tiers_of(values: list[int]) -> set[TierName] | None:
    """The tiers that a mask names; None when it names none, which means all."""
    unknown = [value for value in values if value not in TIER_NAMES]
    if unknown:
        raise InvalidRequestError(
            f"tiers holds {unknown[0]}, expected one of {_LISTED_TIERS}; "
            "correct it, or leave tiers out to ask all"
        )
    return {TIER_NAMES[value] for value in values} or None


def hints_of(message: block_pb2.Hints) -> Hints:
    idle = message.idle_seconds if message.HasField("idle_seconds") else None
    try:
        return checked(Hints(message.ended, message.priority, idle))
    except HintsError as error:
        raise InvalidRequestError(str(error)) from error


def spec_of(message: block_pb2.NamespaceSpec, salt: bytes | None) -> NamespaceSpec:
    """The namespace that a client describes, with its tenant's salt. HashingError where a field is wrong."""
    for name in ("model", "weights_id", "kv_dtype", "layout", "algorithm", "adapter"):
        require_text(f"spec.{name}", getattr(message, name))
    shape = KVShape(message.layers, message.planes, message.kv_heads, message.head_size)
    namespace = Namespace(
        model=message.model,
        weights_id=message.weights_id,
        kv_dtype=message.kv_dtype,
        layout=message.layout,
        block_size=message.block_size,
        kv_shape=shape,
        algorithm=message.algorithm,
        adapter=message.adapter or None,
        tenant_salt=salt,
        format_version=message.format_version,
    )
    return NamespaceSpec(namespace, message.payload_bytes or None)


def spec_message(spec: NamespaceSpec) -> block_pb2.NamespaceSpec:
    """What a namespace is, without its tenant's salt."""
    namespace, shape = spec.namespace, spec.namespace.kv_shape
    return block_pb2.NamespaceSpec(
        format_version=namespace.format_version,
        algorithm=namespace.algorithm,
        model=namespace.model,
        weights_id=namespace.weights_id,
        kv_dtype=namespace.kv_dtype,
        layout=namespace.layout,
        block_size=namespace.block_size,
        layers=shape.layers,
        planes=shape.planes,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        adapter=namespace.adapter or "",
        payload_bytes=spec.payload_bytes or 0,
    )


def extras_of(message: types_pb2.Extras, block_size: int) -> Extras | None:
    """None where there are none. InvalidRequestError where it would take long to hash them."""
    if not message.ByteSize():
        return None
    touched = sum(item.length // block_size + 2 for item in message.items)
    if len(message.items) > ITEMS_MAX or touched > ITEM_BLOCKS_MAX:
        raise InvalidRequestError(
            f"prompt.extras has {len(message.items)} items that lie in about {touched} blocks, at most "
            f"{ITEMS_MAX} items and {ITEM_BLOCKS_MAX} blocks are taken; send block_hashes and "
            "fingerprints instead"
        )
    return Extras(
        request_salt=message.request_salt or None,
        items=tuple(ContentItem(item.digest, item.start, item.length) for item in message.items),
        embeddings=tuple(digest or None for digest in message.embeddings),
    )


def chain_of(prompt: types_pb2.Prompt, root: Root, max_blocks: int = 0) -> Chain:
    """The prompt's whole blocks. Hashes and fingerprints are taken as given where they are given."""
    if not prompt.block_hashes:
        return Chain.of(
            root, prompt.token_ids, extras_of(prompt.extras, root.block_size), max_blocks=max_blocks or None
        )
    blocks = len(prompt.block_hashes) // HASH_BYTES
    if prompt.prompt_tokens > TOKENS_MAX:
        raise InvalidRequestError(
            f"prompt.prompt_tokens is {prompt.prompt_tokens}, expected at most {TOKENS_MAX}; correct it"
        )
    if len(prompt.block_hashes) % HASH_BYTES:
        raise InvalidRequestError(
            f"prompt.block_hashes has {len(prompt.block_hashes)} bytes, expected a multiple of {HASH_BYTES}; "
            "send whole hashes"
        )
    count = min(blocks, max_blocks) if max_blocks else blocks
    tokens, fingerprints, prompt_tokens = None, None, max(prompt.prompt_tokens, blocks * root.block_size)
    if prompt.token_ids:
        _require_words("prompt.token_ids", prompt.token_ids, 4)
        ids = np.frombuffer(prompt.token_ids, dtype=np.uint32)
        if len(ids) // root.block_size != blocks:
            raise InvalidRequestError(
                f"prompt has {blocks} block hashes and {len(ids)} token ids, which are "
                f"{len(ids) // root.block_size} whole blocks of {root.block_size}; send both of one prompt"
            )
        prompt_tokens = max(prompt.prompt_tokens, len(ids))
        tokens = ids[: count * root.block_size].reshape(count, root.block_size)
    if prompt.fingerprints:
        _require_words("prompt.fingerprints", prompt.fingerprints, 8)
        fingerprints = np.frombuffer(prompt.fingerprints, dtype=np.uint64)
        if len(fingerprints) != blocks:
            raise InvalidRequestError(
                f"prompt has {blocks} block hashes and {len(fingerprints)} fingerprints; send one a block"
            )
        fingerprints = fingerprints[:count]
    elif tokens is not None:
        fingerprints = fingerprint_blocks(
            tokens.reshape(-1), root.block_size, extras_of(prompt.extras, root.block_size)
        )
    return Chain(root, prompt.block_hashes[: count * HASH_BYTES], prompt_tokens, tokens, fingerprints)


def checksums_of(packed: bytes) -> list[int]:
    _require_words("checksums", packed, 8)
    sums: list[int] = np.frombuffer(packed, dtype="<u8").tolist()
    return sums


def require_bounded(chain: Chain, shards: tuple[Shard, ...]) -> None:
    """LimitError where a prompt over so many ranks would cost the others too much."""
    if len(chain) * len(shards) > ROWS_MAX:
        raise LimitError(
            Limit.ROWS,
            f"the prompt has {len(chain)} blocks and is read by {len(shards)} ranks, at most {ROWS_MAX} "
            "blocks x ranks are taken in one call; send a part of it, or take larger blocks",
        )


def _require_words(name: str, packed: bytes, size: int) -> None:
    if len(packed) % size:
        raise InvalidRequestError(
            f"{name} has {len(packed)} bytes, expected a multiple of {size}; send whole words"
        )
