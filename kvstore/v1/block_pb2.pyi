from kvstore.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATUS_UNSPECIFIED: _ClassVar[BlockStatus]
    BLOCK_STATUS_PRESENT: _ClassVar[BlockStatus]
    BLOCK_STATUS_BEING_WRITTEN: _ClassVar[BlockStatus]
    BLOCK_STATUS_YOURS: _ClassVar[BlockStatus]
    BLOCK_STATUS_REFUSED: _ClassVar[BlockStatus]
BLOCK_STATUS_UNSPECIFIED: BlockStatus
BLOCK_STATUS_PRESENT: BlockStatus
BLOCK_STATUS_BEING_WRITTEN: BlockStatus
BLOCK_STATUS_YOURS: BlockStatus
BLOCK_STATUS_REFUSED: BlockStatus

class NamespaceSpec(_message.Message):
    __slots__ = ("format_version", "algorithm", "model", "weights_id", "kv_dtype", "layout", "block_size", "layers", "planes", "kv_heads", "head_size", "adapter", "payload_bytes")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    algorithm: str
    model: str
    weights_id: str
    kv_dtype: str
    layout: str
    block_size: int
    layers: int
    planes: int
    kv_heads: int
    head_size: int
    adapter: str
    payload_bytes: int
    def __init__(self, format_version: _Optional[int] = ..., algorithm: _Optional[str] = ..., model: _Optional[str] = ..., weights_id: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ..., layers: _Optional[int] = ..., planes: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., adapter: _Optional[str] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("protocol_version", "client", "spec", "parallelism", "can_map")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    CAN_MAP_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client: int
    spec: NamespaceSpec
    parallelism: _types_pb2.Parallelism
    can_map: bool
    def __init__(self, protocol_version: _Optional[int] = ..., client: _Optional[int] = ..., spec: _Optional[_Union[NamespaceSpec, _Mapping]] = ..., parallelism: _Optional[_Union[_types_pb2.Parallelism, _Mapping]] = ..., can_map: bool = ...) -> None: ...

class RegisterNamespaceResponse(_message.Message):
    __slots__ = ("namespace", "epoch", "pool_path", "payload_bytes", "siblings", "lease_seconds", "write_seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_PATH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    epoch: int
    pool_path: str
    payload_bytes: _containers.RepeatedScalarFieldContainer[int]
    siblings: _containers.RepeatedCompositeFieldContainer[NamespaceSpec]
    lease_seconds: float
    write_seconds: float
    def __init__(self, namespace: _Optional[bytes] = ..., epoch: _Optional[int] = ..., pool_path: _Optional[str] = ..., payload_bytes: _Optional[_Iterable[int]] = ..., siblings: _Optional[_Iterable[_Union[NamespaceSpec, _Mapping]]] = ..., lease_seconds: _Optional[float] = ..., write_seconds: _Optional[float] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("client", "epoch", "request_id", "prompt", "wait_seconds", "hints", "first_block")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    request_id: str
    prompt: _types_pb2.Prompt
    wait_seconds: float
    hints: Hints
    first_block: int
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., wait_seconds: _Optional[float] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ..., first_block: _Optional[int] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("ended", "priority", "idle_seconds")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ended: bool
    priority: int
    idle_seconds: float
    def __init__(self, ended: bool = ..., priority: _Optional[int] = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "blocks", "pending", "cause", "shards", "tiers")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: int
    pending: bool
    cause: str
    shards: _containers.RepeatedCompositeFieldContainer[Places]
    tiers: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[int] = ..., pending: bool = ..., cause: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[Places, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("offsets", "generations")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    offsets: bytes
    generations: bytes
    def __init__(self, offsets: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    blocks: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("client", "epoch", "lease_ids")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lost_lease_ids",)
    LOST_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lost_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lost_lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("client", "epoch", "lease_id", "used_blocks", "compared_blocks", "hints")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    lease_id: int
    used_blocks: int
    compared_blocks: int
    hints: Hints
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., used_blocks: _Optional[int] = ..., compared_blocks: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginWriteRequest(_message.Message):
    __slots__ = ("client", "epoch", "prompt", "shard", "first_block", "write_id")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    prompt: _types_pb2.Prompt
    shard: _types_pb2.Shard
    first_block: int
    write_id: int
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ..., first_block: _Optional[int] = ..., write_id: _Optional[int] = ...) -> None: ...

class BeginWriteResponse(_message.Message):
    __slots__ = ("write_id", "statuses", "offsets", "seconds")
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    write_id: int
    statuses: bytes
    offsets: bytes
    seconds: float
    def __init__(self, write_id: _Optional[int] = ..., statuses: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., seconds: _Optional[float] = ...) -> None: ...

class CommitWriteRequest(_message.Message):
    __slots__ = ("client", "epoch", "write_id", "checksums", "hints")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    write_id: int
    checksums: bytes
    hints: Hints
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., write_id: _Optional[int] = ..., checksums: _Optional[bytes] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class CommitWriteResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class AbortWriteRequest(_message.Message):
    __slots__ = ("client", "epoch", "write_id")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    write_id: int
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., write_id: _Optional[int] = ...) -> None: ...

class AbortWriteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("client", "epoch", "lease_id", "shard", "first_block", "blocks")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    lease_id: int
    shard: _types_pb2.Shard
    first_block: int
    blocks: int
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ..., first_block: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("data", "checksums")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    checksums: bytes
    def __init__(self, data: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class WriteBlocksRequest(_message.Message):
    __slots__ = ("client", "epoch", "write_id", "data")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    client: int
    epoch: int
    write_id: int
    data: bytes
    def __init__(self, client: _Optional[int] = ..., epoch: _Optional[int] = ..., write_id: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteBlocksResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("prompt", "wait_seconds")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    prompt: _types_pb2.Prompt
    wait_seconds: float
    def __init__(self, prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("resident_tokens", "pending")
    RESIDENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    resident_tokens: int
    pending: bool
    def __init__(self, resident_tokens: _Optional[int] = ..., pending: bool = ...) -> None: ...
