"""What a namespace's blocks weigh: its published fields, and the bytes of one block on one shard."""

from __future__ import annotations

from dataclasses import dataclass

from hashing import Namespace, Root
from kvstore.block import WHOLE, Shard
from kvstore.errors import NamespaceError

SLOT_ALIGNMENT = 64
"""Slots start on a cache line, so that copies and checksums run at full width."""

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """A namespace and the size of its blocks.

    ``payload_bytes`` overrides the size that the KV shape gives, for layouts with padding or
    scales beside the values; it is the size on every shard.
    """

    namespace: Namespace
    payload_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.payload_bytes is not None and self.payload_bytes < 1:
            raise NamespaceError(
                f"payload_bytes is {self.payload_bytes}, expected at least 1; leave it out to compute it"
            )

    @property
    def root(self) -> Root:
        return self.namespace.root()

    @property
    def block_size(self) -> int:
        return self.namespace.block_size

    def payload_bytes_on(self, shard: Shard = WHOLE) -> int:
        """Bytes of one block on ``shard``: KV heads divide over tp ranks, layers over pp ranks.

        With more tp ranks than KV heads the heads are replicated, one a rank.
        """
        if not (0 <= shard.tp_rank < shard.tp_size and 0 <= shard.pp_rank < shard.pp_size):
            raise NamespaceError(f"shard {shard} has a rank beyond its size; ranks count from 0")
        if self.payload_bytes is not None:
            return self.payload_bytes
        shape = self.namespace.kv_shape
        if shape.layers < shard.pp_size:
            raise NamespaceError(
                f"pp size {shard.pp_size} exceeds the {shape.layers} layers of "
                f"{self.namespace.model}; use at most one rank a layer"
            )
        if shape.kv_heads % shard.tp_size and shard.tp_size % shape.kv_heads:
            raise NamespaceError(
                f"{shape.kv_heads} KV heads of {self.namespace.model} do not divide over tp size "
                f"{shard.tp_size}; use one that divides them or is a multiple, or pass payload_bytes"
            )
        element = DTYPE_BYTES.get(self.namespace.kv_dtype)
        if element is None:
            raise NamespaceError(
                f"KV dtype {self.namespace.kv_dtype!r} has no known size; expected one of "
                f"{', '.join(sorted(DTYPE_BYTES))}, or pass payload_bytes"
            )
        heads = max(1, shape.kv_heads // shard.tp_size)
        layers = len(range(shard.pp_rank, shape.layers, shard.pp_size))
        return layers * shape.planes * heads * shape.head_size * self.block_size * element


def slot_bytes_for(payload_bytes: int) -> int:
    """The slot that holds a payload: its size rounded up to ``SLOT_ALIGNMENT``."""
    return -(-payload_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
