from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_REDIS: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_REDIS: Tier

class Shard(_message.Message):
    __slots__ = ("tp_rank", "tp_size", "pp_rank", "pp_size")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    def __init__(self, tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ...) -> None: ...

class Parallelism(_message.Message):
    __slots__ = ("tp_size", "pp_size")
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    tp_size: int
    pp_size: int
    def __init__(self, tp_size: _Optional[int] = ..., pp_size: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("namespace", "model", "token_ids", "block_hashes", "fingerprints", "extras", "prompt_tokens", "parallelism")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    model: str
    token_ids: bytes
    block_hashes: bytes
    fingerprints: bytes
    extras: Extras
    prompt_tokens: int
    parallelism: Parallelism
    def __init__(self, namespace: _Optional[bytes] = ..., model: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., parallelism: _Optional[_Union[Parallelism, _Mapping]] = ...) -> None: ...

class Extras(_message.Message):
    __slots__ = ("request_salt", "items", "embeddings")
    REQUEST_SALT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    request_salt: bytes
    items: _containers.RepeatedCompositeFieldContainer[ContentItem]
    embeddings: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_salt: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[ContentItem, _Mapping]]] = ..., embeddings: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ContentItem(_message.Message):
    __slots__ = ("digest", "start", "length")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    start: int
    length: int
    def __init__(self, digest: _Optional[bytes] = ..., start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...
