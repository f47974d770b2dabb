"""What a client does, step by step, apart from how it waits.

An operation is a generator: it yields the steps that take time (calls, streams, work on payloads)
and is sent their results. The blocking and the asyncio client run the same generators.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from kvstore.errors import KVStoreError, LeaseError, NamespaceError, WriteError
from kvstore.v1 import block_pb2, lookup_pb2

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Answer]):
    """One rpc, typed, which the generated stubs are not; ``error`` is raised for a request that is wrong."""

    path: str
    request: type[Request]
    answer: type[Answer]
    error: type[KVStoreError]


@dataclass(frozen=True, slots=True)
class Unary:
    """One request, one answer, in at most ``seconds``."""

    method: Method[Any, Any]
    request: Message
    seconds: float


@dataclass(frozen=True, slots=True)
class Receive:
    """One request, many answers: each is given to ``take``. The step's result is None."""

    method: Method[Any, Any]
    request: Message
    take: Callable[[Any], None]
    seconds: float


@dataclass(frozen=True, slots=True)
class Send:
    """Many requests, one answer."""

    method: Method[Any, Any]
    requests: Iterator[Message]
    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Reads or copies payloads: too long for an event loop, and without the interpreter's lock."""

    run: Callable[[], Any]


Step: TypeAlias = Unary | Receive | Send | Work
Steps: TypeAlias = Generator[Step, Any, Result]
"""A call that comes to nothing is thrown in as CallError, StaleError, or the method's own error."""


def ask(method: Method[Request, Answer], request: Request, seconds: float) -> Steps[Answer]:
    answer: Answer = yield Unary(method, request, seconds)
    return answer


def receive(
    method: Method[Request, Answer], request: Request, take: Callable[[Answer], None], seconds: float
) -> Steps[None]:
    yield Receive(method, request, take, seconds)


def send(method: Method[Request, Answer], requests: Iterator[Request], seconds: float) -> Steps[Answer]:
    answer: Answer = yield Send(method, requests, seconds)
    return answer


def work(run: Callable[[], Result]) -> Steps[Result]:
    result: Result = yield Work(run)
    return result


_BLOCKS = "/kvstore.v1.BlockService/"

REGISTER = Method(
    _BLOCKS + "RegisterNamespace",
    block_pb2.RegisterNamespaceRequest,
    block_pb2.RegisterNamespaceResponse,
    NamespaceError,
)
ACQUIRE = Method(_BLOCKS + "Acquire", block_pb2.AcquireRequest, block_pb2.AcquireResponse, LeaseError)
RENEW = Method(_BLOCKS + "Renew", block_pb2.RenewRequest, block_pb2.RenewResponse, LeaseError)
RELEASE = Method(_BLOCKS + "Release", block_pb2.ReleaseRequest, block_pb2.ReleaseResponse, LeaseError)
BEGIN_WRITE = Method(
    _BLOCKS + "BeginWrite", block_pb2.BeginWriteRequest, block_pb2.BeginWriteResponse, WriteError
)
COMMIT_WRITE = Method(
    _BLOCKS + "CommitWrite", block_pb2.CommitWriteRequest, block_pb2.CommitWriteResponse, WriteError
)
ABORT_WRITE = Method(
    _BLOCKS + "AbortWrite", block_pb2.AbortWriteRequest, block_pb2.AbortWriteResponse, WriteError
)
READ_BLOCKS = Method(
    _BLOCKS + "ReadBlocks", block_pb2.ReadBlocksRequest, block_pb2.ReadBlocksResponse, LeaseError
)
WRITE_BLOCKS = Method(
    _BLOCKS + "WriteBlocks", block_pb2.WriteBlocksRequest, block_pb2.WriteBlocksResponse, WriteError
)
PREFETCH = Method(_BLOCKS + "Prefetch", block_pb2.PrefetchRequest, block_pb2.PrefetchResponse, NamespaceError)
LOOKUP = Method(
    "/kvstore.v1.LookupService/Lookup",
    lookup_pb2.LookupRequest,
    lookup_pb2.LookupResponse,
    NamespaceError,
)
