from kvstore.v1 import block_pb2 as _block_pb2
from kvstore.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "epoch", "uptime_seconds", "pool_path", "tiers", "leases", "writes", "clients", "namespaces", "asked_tokens", "hit_tokens", "miss_tokens", "tenants", "adopted_blocks", "pins", "what_if")
    class HitTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOL_PATH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    WHAT_IF_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    uptime_seconds: float
    pool_path: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierReport]
    leases: int
    writes: int
    clients: int
    namespaces: int
    asked_tokens: int
    hit_tokens: _containers.ScalarMap[str, int]
    miss_tokens: _containers.ScalarMap[str, int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantReport]
    adopted_blocks: int
    pins: _containers.RepeatedCompositeFieldContainer[PinReport]
    what_if: _containers.RepeatedCompositeFieldContainer[WhatIfReport]
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., pool_path: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierReport, _Mapping]]] = ..., leases: _Optional[int] = ..., writes: _Optional[int] = ..., clients: _Optional[int] = ..., namespaces: _Optional[int] = ..., asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[_Mapping[str, int]] = ..., miss_tokens: _Optional[_Mapping[str, int]] = ..., tenants: _Optional[_Iterable[_Union[TenantReport, _Mapping]]] = ..., adopted_blocks: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinReport, _Mapping]]] = ..., what_if: _Optional[_Iterable[_Union[WhatIfReport, _Mapping]]] = ...) -> None: ...

class WhatIfReport(_message.Message):
    __slots__ = ("scale", "capacity_bytes", "asked_tokens", "hit_tokens")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scale: float
    capacity_bytes: int
    asked_tokens: int
    hit_tokens: int
    def __init__(self, scale: _Optional[float] = ..., capacity_bytes: _Optional[int] = ..., asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class PinReport(_message.Message):
    __slots__ = ("name", "tenant", "tokens", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    tokens: int
    bytes: int
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("tier", "healthy", "reason", "pool")
    TIER_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    healthy: bool
    reason: str
    pool: PoolReport
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., healthy: bool = ..., reason: _Optional[str] = ..., pool: _Optional[_Union[PoolReport, _Mapping]] = ...) -> None: ...

class PoolReport(_message.Message):
    __slots__ = ("limit_bytes", "reserved_bytes", "free_bytes", "staged_bytes", "ready_bytes", "quarantined_bytes", "leased_bytes", "unread_bytes")
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    limit_bytes: int
    reserved_bytes: int
    free_bytes: int
    staged_bytes: int
    ready_bytes: int
    quarantined_bytes: int
    leased_bytes: int
    unread_bytes: int
    def __init__(self, limit_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., staged_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., unread_bytes: _Optional[int] = ...) -> None: ...

class TenantReport(_message.Message):
    __slots__ = ("name", "share_bytes", "ready_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    share_bytes: int
    ready_bytes: int
    def __init__(self, name: _Optional[str] = ..., share_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceReport]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceReport, _Mapping]]] = ...) -> None: ...

class NamespaceReport(_message.Message):
    __slots__ = ("namespace", "spec", "tenant", "tiers", "payload_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    spec: _block_pb2.NamespaceSpec
    tenant: str
    tiers: _containers.RepeatedCompositeFieldContainer[_block_pb2.TierBlocks]
    payload_bytes: int
    def __init__(self, namespace: _Optional[bytes] = ..., spec: _Optional[_Union[_block_pb2.NamespaceSpec, _Mapping]] = ..., tenant: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[_block_pb2.TierBlocks, _Mapping]]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace", "tiers")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    def __init__(self, namespace: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("blocks", "held_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    held_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("name", "prompt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    prompt: _types_pb2.Prompt
    def __init__(self, name: _Optional[str] = ..., prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "share_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    share_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., share_bytes: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("epoch", "sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "lost", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    lost: bool
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., lost: bool = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("time", "tier", "namespace", "shard", "block_hashes", "removed", "cause")
    TIME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    time: float
    tier: _types_pb2.Tier
    namespace: bytes
    shard: _types_pb2.Shard
    block_hashes: bytes
    removed: bool
    cause: str
    def __init__(self, time: _Optional[float] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., namespace: _Optional[bytes] = ..., shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ..., block_hashes: _Optional[bytes] = ..., removed: bool = ..., cause: _Optional[str] = ...) -> None: ...
