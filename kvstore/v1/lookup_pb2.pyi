from kvstore.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("prompt", "tiers", "max_blocks")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    prompt: _types_pb2.Prompt
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    max_blocks: int
    def __init__(self, prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("block_size", "prompt_blocks", "blocks_read", "matched_tokens", "verified_tokens", "tiers")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_READ_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    prompt_blocks: int
    blocks_read: int
    matched_tokens: int
    verified_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierTokens]
    def __init__(self, block_size: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., blocks_read: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., verified_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ...) -> None: ...

class TierTokens(_message.Message):
    __slots__ = ("tier", "served_tokens", "leading_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    SERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEADING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    served_tokens: int
    leading_tokens: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., served_tokens: _Optional[int] = ..., leading_tokens: _Optional[int] = ...) -> None: ...

class BatchLookupRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LookupRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LookupRequest, _Mapping]]] = ...) -> None: ...

class BatchLookupResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[LookupResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[LookupResponse, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("prompt", "shard")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    prompt: _types_pb2.Prompt
    shard: _types_pb2.Shard
    def __init__(self, prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("block_size", "blocks", "tail_tokens")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockReport]
    tail_tokens: int
    def __init__(self, block_size: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockReport, _Mapping]]] = ..., tail_tokens: _Optional[int] = ...) -> None: ...

class BlockReport(_message.Message):
    __slots__ = ("index", "block_hash", "tiers", "cause", "being_written", "payload_bytes", "age_seconds", "idle_seconds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BEING_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    block_hash: bytes
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    cause: str
    being_written: bool
    payload_bytes: int
    age_seconds: float
    idle_seconds: float
    def __init__(self, index: _Optional[int] = ..., block_hash: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., cause: _Optional[str] = ..., being_written: bool = ..., payload_bytes: _Optional[int] = ..., age_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ...) -> None: ...
