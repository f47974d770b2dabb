"""The server as operators and routers ask it: blocking, typed, one call a question.

Engines use ``kvstore.service.client``, which holds leases and moves bytes; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from hashing import Extras
from kvstore.block import Shard, TierName
from kvstore.errors import KVStoreError
from kvstore.service.client.channel import open_channel
from kvstore.service.client.messages import (
    LookupResult,
    PrefetchResult,
    extras_message,
    lookup_of,
    shard_message,
)
from kvstore.service.client.options import TLS, CallError, Outcome
from kvstore.service.codec import MESSAGE_BYTES, TIERS, Parallelism, shard_of, spec_of
from kvstore.spec import NamespaceSpec
from kvstore.v1 import admin_pb2, block_pb2, lookup_pb2, types_pb2
from kvstore.v1.admin_pb2_grpc import AdminServiceStub
from kvstore.v1.block_pb2_grpc import BlockServiceStub
from kvstore.v1.lookup_pb2_grpc import LookupServiceStub

Report = TypeVar("Report")
Answer = TypeVar("Answer")

_TIER_NAMES = {message: name for name, message in TIERS.items()}
_TOKEN_BYTES = 4
_OUTCOMES = {
    grpc.StatusCode.UNAUTHENTICATED: Outcome.REJECTED,
    grpc.StatusCode.PERMISSION_DENIED: Outcome.REJECTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.REFUSED,
}


class RequestError(KVStoreError):
    """The server cannot do what it was asked, whoever asks; the message is its own."""


@dataclass(frozen=True, slots=True)
class PromptQuery:
    """A whole prompt in one namespace: of a model by its name, or by its root.

    ``token_ids`` are packed u32, little-endian. ``parallelism`` is needed only where the namespace
    is registered for several.
    """

    token_ids: bytes
    model: str = ""
    namespace: bytes = b""
    extras: Extras | None = None
    parallelism: Parallelism | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Where one block is, or the ``cause`` (a MissCause) for which it is nowhere."""

    index: int
    block_hash: bytes
    tiers: tuple[TierName, ...]
    cause: str
    being_written: bool
    payload_bytes: int
    age_seconds: float | None
    idle_seconds: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prompt block by block; ``tail_tokens`` are past the last whole block."""

    block_size: int
    blocks: tuple[BlockReport, ...]
    tail_tokens: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Bytes by state; ``reserved_bytes`` is the sum of free, staged, ready and quarantined."""

    limit_bytes: int
    reserved_bytes: int
    free_bytes: int
    staged_bytes: int
    ready_bytes: int
    quarantined_bytes: int
    leased_bytes: int


@dataclass(frozen=True, slots=True)
class TierReport:
    """``pool`` is None for a tier whose memory is elsewhere."""

    tier: TierName
    healthy: bool
    reason: str
    pool: PoolReport | None


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What a tenant is guaranteed and has."""

    name: str
    share_bytes: int
    ready_bytes: int


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Everything that a status page shows; token counts since the start."""

    version: str
    epoch: int
    uptime_seconds: float
    pool_path: str
    tiers: tuple[TierReport, ...]
    leases: int
    writes: int
    clients: int
    namespaces: int
    asked_tokens: int
    hit_tokens: Mapping[str, int]
    miss_tokens: Mapping[str, int]
    tenants: tuple[TenantReport, ...]
    adopted_blocks: int


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """A namespace and its resident blocks by tier in memory, all ranks together."""

    root: bytes
    spec: NamespaceSpec
    tenant: str
    blocks: Mapping[TierName, int]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Blocks that were forgotten, and blocks that leases hold and that stay."""

    blocks: int
    held_blocks: int


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks that became readable in a tier, or, where ``removed``, stopped being so for ``cause``."""

    time: float
    tier: TierName
    namespace: bytes
    shard: Shard
    block_hashes: bytes
    removed: bool
    cause: str


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order, and the cursor (epoch, sequence) behind them; ``lost`` tells of a gap before."""

    epoch: int
    sequence: int
    lost: bool
    events: tuple[BlockEvent, ...]


class Operator:
    """One server, asked over one connection, from any thread.

    Methods raise RequestError for what the server cannot do, and CallError when it does not answer
    within ``timeout_seconds`` (its outcome is UNREACHABLE), is at a limit (REFUSED) or does not
    accept the token (REJECTED).
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: TLS | None = None, timeout_seconds: float = 5.0
    ) -> None:
        self._address = address
        self._timeout = timeout_seconds
        self._channel = open_channel(address, token, tls)
        self._lookups = LookupServiceStub(self._channel)
        self._admin = AdminServiceStub(self._channel)
        self._blocks = BlockServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lookup(
        self, prompt: PromptQuery, *, tiers: Sequence[TierName] = (), max_blocks: int = 0
    ) -> LookupResult:
        """How much of a prompt is cached, and where; no ``tiers`` asks all, no ``max_blocks`` means all."""
        request = _lookup_request(prompt, tiers, max_blocks)
        return lookup_of(self._call(self._lookups.Lookup, request))

    def lookup_all(
        self, prompts: Sequence[PromptQuery], *, tiers: Sequence[TierName] = (), max_blocks: int = 0
    ) -> list[LookupResult]:
        """``lookup`` of many prompts in one call, answers in order."""
        requests = [_lookup_request(prompt, tiers, max_blocks) for prompt in prompts]
        request = lookup_pb2.BatchLookupRequest(requests=requests)
        return [lookup_of(one) for one in self._call(self._lookups.BatchLookup, request).responses]

    def explain(self, prompt: PromptQuery, shard: Shard | None = None) -> Explanation:
        """Block by block where a prompt is, on ``shard`` or on the first rank."""
        request = lookup_pb2.ExplainRequest(prompt=_prompt(prompt))
        if shard is not None:
            request.shard.CopyFrom(shard_message(shard))
        answer = self._call(self._lookups.Explain, request)
        return Explanation(answer.block_size, tuple(map(_block_report, answer.blocks)), answer.tail_tokens)

    def status(self) -> ServerStatus:
        return _server_status(self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest()))

    def namespaces(self) -> list[NamespaceReport]:
        answer = self._call(self._admin.ListNamespaces, admin_pb2.ListNamespacesRequest())
        return list(map(_namespace_report, answer.namespaces))

    def clear(self, *, namespace: bytes = b"", tiers: Sequence[TierName] = ()) -> Cleared:
        """Forget blocks that nobody holds: of one namespace, or of all when empty; likewise tiers."""
        request = admin_pb2.ClearRequest(namespace=namespace, tiers=[TIERS[tier] for tier in tiers])
        answer = self._call(self._admin.Clear, request)
        return Cleared(answer.blocks, answer.held_blocks)

    def pin(self, name: str, prompt: PromptQuery) -> int:
        """Keep the resident part of a prompt under ``name``; tokens that are kept."""
        request = admin_pb2.PinRequest(name=name, prompt=_prompt(prompt))
        tokens: int = self._call(self._admin.Pin, request).tokens
        return tokens

    def unpin(self, name: str) -> bool:
        """Let go of what ``pin`` keeps; whether there was such a pin."""
        found: bool = self._call(self._admin.Unpin, admin_pb2.UnpinRequest(name=name)).found
        return found

    def prefetch(self, prompt: PromptQuery, *, wait_seconds: float = 0.0) -> PrefetchResult:
        """Bring a prompt's blocks from redis into memory, waiting at most ``wait_seconds`` for them."""
        request = block_pb2.PrefetchRequest(prompt=_prompt(prompt), wait_seconds=wait_seconds)
        answer = self._call(self._blocks.Prefetch, request, extra_seconds=wait_seconds)
        return PrefetchResult(Outcome.OK, answer.resident_tokens, answer.pending)

    def set_quota(self, tenant: str, share_bytes: int) -> None:
        """Guarantee a tenant ``share_bytes`` of the pools; 0 is nothing."""
        self._call(self._admin.SetQuota, admin_pb2.SetQuotaRequest(tenant=tenant, share_bytes=share_bytes))

    def events(self, *, epoch: int = 0, sequence: int = 0) -> Iterator[EventBatch]:
        """What happens in the store after the cursor, without end; from now on where it is 0."""
        request = admin_pb2.WatchEventsRequest(epoch=epoch, sequence=sequence)
        stream = self._admin.WatchEvents(request)
        try:
            for batch in stream:
                yield EventBatch(
                    batch.epoch, batch.sequence, batch.lost, tuple(map(_block_event, batch.events))
                )
        except grpc.RpcError as error:
            raise self._explained(error) from error
        finally:
            stream.cancel()

    def _call(self, method: Callable[..., Answer], request: Message, *, extra_seconds: float = 0.0) -> Answer:
        size = request.ByteSize()
        if size > MESSAGE_BYTES:
            raise RequestError(
                f"the request has {size} bytes, at most {MESSAGE_BYTES} are taken; ask for fewer or "
                "shorter prompts at a time (a token is 4 bytes)"
            )
        try:
            return method(request, timeout=self._timeout + extra_seconds)
        except grpc.RpcError as error:
            raise self._explained(error) from error

    def _explained(self, error: grpc.RpcError) -> KVStoreError:
        code, details = error.code(), error.details() or "it does not say why"
        if code is grpc.StatusCode.UNAVAILABLE:
            return CallError(
                Outcome.UNREACHABLE,
                f"no server answers at {self._address} ({details}); start one with `kvstore serve`, or give "
                "the address that it listens on",
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallError(
                Outcome.UNREACHABLE,
                f"the server at {self._address} did not answer within {self._timeout:g} s; see whether it is "
                "stopped or overloaded, or wait longer",
            )
        if code in _OUTCOMES:
            return CallError(_OUTCOMES[code], details)
        return RequestError(f"{details} ({code.name} from {self._address})")


def _prompt(prompt: PromptQuery) -> types_pb2.Prompt:
    message = types_pb2.Prompt(
        namespace=prompt.namespace,
        model=prompt.model,
        token_ids=prompt.token_ids,
        prompt_tokens=prompt.tokens,
    )
    if prompt.parallelism is not None:
        message.parallelism.CopyFrom(types_pb2.Parallelism(**prompt.parallelism._asdict()))
    if prompt.extras is not None:
        message.extras.CopyFrom(extras_message(prompt.extras))
    return message


def _lookup_request(
    prompt: PromptQuery, tiers: Sequence[TierName], max_blocks: int
) -> lookup_pb2.LookupRequest:
    mask = [TIERS[tier] for tier in tiers]
    return lookup_pb2.LookupRequest(prompt=_prompt(prompt), tiers=mask, max_blocks=max_blocks)


def _report(report: type[Report], message: Message, **other: object) -> Report:
    """A report from the message that has the same fields, but for those in ``other``."""
    same = {field.name for field in fields(report)} - other.keys()  # type: ignore[arg-type]
    return report(**{name: getattr(message, name) for name in same}, **other)


def _optional(message: Message, name: str) -> object:
    return getattr(message, name) if message.HasField(name) else None


def _block_report(message: lookup_pb2.BlockReport) -> BlockReport:
    return _report(
        BlockReport,
        message,
        tiers=tuple(_TIER_NAMES[tier] for tier in message.tiers),
        age_seconds=_optional(message, "age_seconds"),
        idle_seconds=_optional(message, "idle_seconds"),
    )


def _tier_report(message: admin_pb2.TierReport) -> TierReport:
    pool = _report(PoolReport, message.pool) if message.HasField("pool") else None
    return _report(TierReport, message, tier=_TIER_NAMES[message.tier], pool=pool)


def _server_status(message: admin_pb2.GetStatusResponse) -> ServerStatus:
    return _report(
        ServerStatus,
        message,
        tiers=tuple(map(_tier_report, message.tiers)),
        hit_tokens=dict(message.hit_tokens),
        miss_tokens=dict(message.miss_tokens),
        tenants=tuple(_report(TenantReport, tenant) for tenant in message.tenants),
    )


def _namespace_report(message: admin_pb2.NamespaceReport) -> NamespaceReport:
    return NamespaceReport(
        root=message.namespace,
        spec=spec_of(message.spec, None),
        tenant=message.tenant,
        blocks={_TIER_NAMES[tier.tier]: tier.blocks for tier in message.tiers},
        payload_bytes=message.payload_bytes,
    )


def _block_event(message: admin_pb2.BlockEvent) -> BlockEvent:
    return _report(BlockEvent, message, tier=_TIER_NAMES[message.tier], shard=shard_of(message.shard))
