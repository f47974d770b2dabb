"""The server as operators and routers ask it: blocking, typed, one call a question.

Engines use ``kvstore.service.client``, which holds leases and moves bytes; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from hashing import Extras
from hashing.tokens import TOKEN_BYTES
from kvstore.block import Shard, TierName
from kvstore.errors import KVStoreError
from kvstore.service.client.channel import explain, open_channel
from kvstore.service.client.messages import (
    LookupResult,
    PrefetchResult,
    extras_message,
    lookup_of,
    shard_message,
)
from kvstore.service.client.options import TLS, CallError, Outcome, Silence
from kvstore.service.codec import MESSAGE_BYTES, TIERS, Parallelism
from kvstore.service.reports import (
    Cleared,
    EventBatch,
    Explanation,
    NamespaceReport,
    ServerStatus,
    block_event_of,
    block_report_of,
    namespace_report_of,
    status_of,
)
from kvstore.v1 import admin_pb2, block_pb2, lookup_pb2, types_pb2
from kvstore.v1.admin_pb2_grpc import AdminServiceStub
from kvstore.v1.block_pb2_grpc import BlockServiceStub
from kvstore.v1.lookup_pb2_grpc import LookupServiceStub

Answer = TypeVar("Answer")


class RequestError(KVStoreError):
    """The server cannot do what it was asked, whoever asks; the message is its own."""


class UnknownError(RequestError):
    """What the request names is not known to the server, or not to the tenant who asks."""


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
        return len(self.token_ids) // TOKEN_BYTES


class Operator:
    """One server, asked over one connection, from any thread.

    Methods raise RequestError for what the server cannot do, and CallError when it does not answer
    within ``timeout_seconds`` or fails (its outcome is UNREACHABLE), is at a limit (REFUSED) or does
    not accept the token (REJECTED).
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: TLS | None = None, timeout_seconds: float = 5.0
    ) -> None:
        self._address = address
        self._has_token = token is not None
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
        return lookup_of(self._ask(self._lookups.Lookup, request))

    def lookup_all(
        self, prompts: Sequence[PromptQuery], *, tiers: Sequence[TierName] = (), max_blocks: int = 0
    ) -> list[LookupResult]:
        """``lookup`` of many prompts in one call, answers in order."""
        requests = [_lookup_request(prompt, tiers, max_blocks) for prompt in prompts]
        request = lookup_pb2.BatchLookupRequest(requests=requests)
        return [lookup_of(one) for one in self._ask(self._lookups.BatchLookup, request).responses]

    def explain(self, prompt: PromptQuery, shard: Shard | None = None) -> Explanation:
        """Block by block where a prompt is, on ``shard`` or on the first rank."""
        request = lookup_pb2.ExplainRequest(prompt=_prompt(prompt))
        if shard is not None:
            request.shard.CopyFrom(shard_message(shard))
        answer = self._ask(self._lookups.Explain, request)
        return Explanation(answer.block_size, tuple(map(block_report_of, answer.blocks)), answer.tail_tokens)

    def status(self) -> ServerStatus:
        return status_of(self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest()))

    def namespaces(self) -> list[NamespaceReport]:
        answer = self._call(self._admin.ListNamespaces, admin_pb2.ListNamespacesRequest())
        return list(map(namespace_report_of, answer.namespaces))

    def clear(self, *, namespace: bytes = b"", tiers: Sequence[TierName] = ()) -> Cleared:
        """Forget blocks that nobody holds: of one namespace, or of all when empty; likewise tiers."""
        request = admin_pb2.ClearRequest(namespace=namespace, tiers=[TIERS[tier] for tier in tiers])
        answer = self._call(self._admin.Clear, request)
        return Cleared(answer.blocks, answer.held_blocks)

    def pin(self, name: str, prompt: PromptQuery) -> int:
        """Keep the resident part of a prompt under ``name``; tokens that are kept."""
        request = admin_pb2.PinRequest(name=name, prompt=_prompt(prompt))
        tokens: int = self._ask(self._admin.Pin, request).tokens
        return tokens

    def unpin(self, name: str) -> bool:
        """Let go of what ``pin`` keeps; whether there was such a pin."""
        found: bool = self._call(self._admin.Unpin, admin_pb2.UnpinRequest(name=name)).found
        return found

    def prefetch(self, prompt: PromptQuery, *, wait_seconds: float = 0.0) -> PrefetchResult:
        """Bring a prompt's blocks from redis into memory, waiting at most ``wait_seconds`` for them."""
        request = block_pb2.PrefetchRequest(prompt=_prompt(prompt), wait_seconds=wait_seconds)
        answer = self._ask(self._blocks.Prefetch, request, extra_seconds=wait_seconds)
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
                    batch.epoch, batch.sequence, batch.lost, tuple(map(block_event_of, batch.events))
                )
        except grpc.RpcError as error:
            raise self._explained(error, self._timeout) from error
        finally:
            stream.cancel()

    def _ask(self, method: Callable[..., Answer], request: Message, *, extra_seconds: float = 0.0) -> Answer:
        """``_call`` about prompts, which are those of one tenant."""
        try:
            return self._call(method, request, extra_seconds=extra_seconds)
        except UnknownError as error:
            if not self._has_token:
                raise
            raise UnknownError(
                f"{error}; a prompt is looked for in the namespaces of the token's own tenant, an admin's too"
            ) from error

    def _call(self, method: Callable[..., Answer], request: Message, *, extra_seconds: float = 0.0) -> Answer:
        size = request.ByteSize()
        if size > MESSAGE_BYTES:
            raise RequestError(
                f"the request has {size} bytes, at most {MESSAGE_BYTES} are taken; ask for fewer or "
                "shorter prompts at a time (a token is 4 bytes)"
            )
        seconds = self._timeout + extra_seconds
        try:
            return method(request, timeout=seconds)
        except grpc.RpcError as error:
            raise self._explained(error, seconds) from error

    def _explained(self, error: grpc.RpcError, seconds: float) -> KVStoreError:
        code, details = error.code(), error.details() or "it does not say why"
        if code is grpc.StatusCode.UNAVAILABLE:
            return CallError(
                Outcome.UNREACHABLE,
                f"no server answers at {self._address} ({details}); start one with `kvstore serve`, or give "
                "the address that it listens on",
                Silence.AWAY,
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallError(
                Outcome.UNREACHABLE,
                f"the server at {self._address} did not answer within {seconds:g} s; see whether it is "
                "stopped or overloaded, or wait longer",
                Silence.LATE,
            )
        kind = UnknownError if code is grpc.StatusCode.NOT_FOUND else RequestError
        found = explain(error, f"the server at {self._address}", kind)
        return (
            found if isinstance(found, CallError) else kind(f"{details} ({code.name} from {self._address})")
        )


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
