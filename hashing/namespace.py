"""What makes blocks interchangeable, and its digest: the root of every chain."""

import struct
from dataclasses import dataclass, field

from hashing.algorithm import DIGEST_BYTES, require_algorithm, root_digest
from hashing.errors import HashingError
from hashing.fields import (
    U16_MAX,
    U32_MAX,
    encode_field,
    require_digest,
    require_int,
    require_salt,
    require_text,
)

FORMAT_VERSION = 1
"""Version of the block hash and of its encoding; another version is another namespace."""

MAX_BLOCK_SIZE = 65536


def require_block_size(value: object) -> int:
    """``value`` as tokens per block."""
    return require_int("block_size", value, 1, MAX_BLOCK_SIZE, "pass the engine's tokens per block")


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the whole model's KV cache, not of one rank's part.

    ``planes`` is 2 (keys and values) or 1 where both share one latent (MLA); ``head_size`` is in
    elements.
    """

    layers: int
    planes: int
    kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        fix = "take it from the model's configuration, before tensor parallelism"
        require_int("layers", self.layers, 1, U32_MAX, fix)
        require_int("planes", self.planes, 1, 2, "2 for keys and values, 1 for a shared latent (MLA)")
        require_int("kv_heads", self.kv_heads, 1, U32_MAX, fix)
        require_int("head_size", self.head_size, 1, U32_MAX, fix)

    def encode(self) -> bytes:
        """4 × u32 LE in the order of the fields."""
        return struct.pack("<4I", self.layers, self.planes, self.kv_heads, self.head_size)


@dataclass(frozen=True, slots=True)
class Root:
    """Where a chain starts: a namespace's digest, with what is needed to hash under it.

    Opaque: it may contain a tenant's salt, which cannot be recovered from it.
    """

    digest: bytes
    block_size: int
    algorithm: str

    def __post_init__(self) -> None:
        require_digest("root digest", self.digest, DIGEST_BYTES, "pass Namespace.root() or the server's root")
        require_block_size(self.block_size)
        require_algorithm(self.algorithm)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that two blocks must share before one may stand in for the other.

    ``weights_id`` is a hub revision, or a digest of a local folder's contents, never its path.
    ``layout`` names the order of axes, the packing, and the instruction set where the packing
    depends on it. ``adapter`` holds LoRA id and version. None means absent, which no value equals.
    """

    model: str
    weights_id: str
    kv_dtype: str
    layout: str
    block_size: int
    kv_shape: KVShape
    algorithm: str = "xxh3_128"
    adapter: str | None = None
    tenant_salt: bytes | None = field(default=None, repr=False)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        require_text("model", self.model, "pass the name that the engine serves")
        require_text("weights_id", self.weights_id, "pass the hub revision or a digest of the weight files")
        require_text("kv_dtype", self.kv_dtype, "pass the cache's dtype, such as 'bfloat16'")
        require_text("layout", self.layout, "pass the engine's name for its KV layout")
        require_block_size(self.block_size)
        if not isinstance(self.kv_shape, KVShape):
            raise HashingError(
                f"kv_shape is {self.kv_shape!r}, expected a KVShape; "
                "pass KVShape(layers, planes, kv_heads, head_size)"
            )
        require_algorithm(self.algorithm)
        if self.adapter is not None:
            require_text("adapter", self.adapter, "pass LoRA id and version, or None for the base model")
        if self.tenant_salt is not None:
            require_salt("tenant_salt", self.tenant_salt)
        require_int("format_version", self.format_version, 1, U16_MAX, "leave it out to get the current one")

    def encode(self) -> bytes:
        """Canonical bytes: the present fields, tagged and length-prefixed, in the order of tags."""
        fields = [
            (1, struct.pack("<H", self.format_version)),
            (2, self.algorithm.encode()),
            (3, self.model.encode()),
            (4, self.weights_id.encode()),
            (5, self.kv_dtype.encode()),
            (6, self.layout.encode()),
            (7, struct.pack("<I", self.block_size)),
            (8, self.kv_shape.encode()),
            (9, None if self.adapter is None else self.adapter.encode()),
            (10, self.tenant_salt),
        ]
        return b"".join(encode_field(tag, value) for tag, value in fields if value is not None)

    def root(self) -> Root:
        """The digest of ``encode()`` as the parent of every chain's block 0."""
        digest = root_digest(self.algorithm)(self.encode())
        return Root(digest=digest, block_size=self.block_size, algorithm=self.algorithm)
