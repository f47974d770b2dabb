"""What every call passes: who calls, what went wrong in terms of gRPC, how long it took."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message

from hashing import HashingError
from kvstore.errors import KVStoreError, LeaseError, NamespaceError, PoolError, WriteError
from kvstore.service.codec import MESSAGE_BYTES
from kvstore.service.errors import (
    DrainingError,
    ForbiddenError,
    InvalidRequestError,
    LateError,
    Limit,
    LimitError,
    NotPossibleError,
    UnauthenticatedError,
    UnknownNamespaceError,
    WrongEpochError,
)
from kvstore.service.tenants import Refusal, Tenant, Tenants

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

_log = logging.getLogger(__name__)
_BEARER = "bearer "
_MESSAGE_CHARACTERS = 1500
_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (HashingError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownNamespaceError, grpc.StatusCode.NOT_FOUND),
    (WrongEpochError, grpc.StatusCode.FAILED_PRECONDITION),
    (NotPossibleError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DrainingError, grpc.StatusCode.UNAVAILABLE),
    (NamespaceError, grpc.StatusCode.FAILED_PRECONDITION),
    (LeaseError, grpc.StatusCode.NOT_FOUND),
    (WriteError, grpc.StatusCode.FAILED_PRECONDITION),
    (PoolError, grpc.StatusCode.FAILED_PRECONDITION),
    (LateError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (KVStoreError, grpc.StatusCode.INTERNAL),
)


class Caller(NamedTuple):
    """Who makes a call."""

    tenant: Tenant
    admin: bool


class Observer(Protocol):
    """Where calls are counted."""

    def rpc(self, rpc: str, outcome: str, seconds: float) -> None:
        """A call ended; ``outcome`` is the name of its status in lower case."""

    def refused(self, limit: str) -> None:
        """A request ran into a limit."""


class Gate:
    """Authenticates callers and turns errors into statuses. One a server."""

    def __init__(
        self,
        tenants: Tenants | None,
        observer: Observer,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Without ``tenants`` the unix socket's permissions decide: whoever may open it is the admin."""
        self.tenants = tenants
        """Who may call; None: everybody."""
        self._observer = observer
        self._clock = clock
        self._wall_clock = wall_clock
        self.draining = False
        """Calls that begin something are turned away."""
        self.running = 0
        """Calls that are being served."""

    @asynccontextmanager
    async def call(
        self, rpc: str, context: Context, request: Message | None, *, ends: bool = False
    ) -> AsyncIterator[Caller]:
        """The caller, inside of which the call is served; errors that leave it become statuses.

        A call that ``ends`` something, or is about what has begun, is served while the server drains.
        """
        began, outcome = self._clock(), "ok"
        self.running += 1
        try:
            if self.draining and not ends:
                raise DrainingError("the server is shutting down; go on without it, and connect again later")
            _require_size(request)
            yield self._admit(context)
        except (KVStoreError, HashingError) as error:
            code = _code_of(error)
            outcome = code.name.lower()
            self._count_refusal(error)
            await context.abort(code, _shortened(str(error)))
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except Exception:  # noqa: BLE001 - one bad call must not end the server
            outcome = "internal"
            _log.exception("%s failed", rpc)
            await context.abort(grpc.StatusCode.INTERNAL, f"{rpc} failed in the server; its log says why")
        finally:
            self.running -= 1
            self._observer.rpc(rpc, outcome, self._clock() - began)

    def refuse(self, method: str, metadata: Metadata) -> str | None:
        """Why a call is turned away whatever it says; None where its token is valid. Counts refusals."""
        if self.tenants is None:
            return None
        try:
            _tenant_of(self.tenants, metadata, self._wall_clock())
        except UnauthenticatedError as error:
            self._count_refusal(error)
            self._observer.rpc(method.rpartition("/")[2], "unauthenticated", 0.0)
            return str(error)
        return None

    def check(self, context: Context) -> None:
        """UnauthenticatedError where a call that goes on for long has outlived its token."""
        self._admit(context)

    def _admit(self, context: Context) -> Caller:
        if self.tenants is None:
            # Whoever reaches a loopback port may be any user of this machine.
            return Caller(NOBODY, context.peer().startswith("unix:"))
        tenant = _tenant_of(self.tenants, context.invocation_metadata() or (), self._wall_clock())
        return Caller(tenant, tenant.admin)

    def _count_refusal(self, error: Exception) -> None:
        if isinstance(error, LimitError):
            self._observer.refused(error.limit)
        elif isinstance(error, DrainingError):
            self._observer.refused(Limit.DRAINING)
        elif isinstance(error, UnauthenticatedError | ForbiddenError):
            self._observer.refused(Limit.CREDENTIALS)


NOBODY = Tenant(name="", salt=None, admin=False, share_bytes=0, maps_pool=True)
"""Everybody, where there are no tenants."""


def require_admin(caller: Caller) -> None:
    """ForbiddenError for all but admins."""
    if not caller.admin:
        raise ForbiddenError(
            "this call is for admins; use a token of a tenant with admin = true, or the unix socket of a "
            "server that has no tenants"
        )


def _require_size(request: Message | None) -> None:
    """LimitError; the transport lets somewhat more pass, so that who sends too much is told, and counted."""
    size = 0 if request is None else request.ByteSize()
    if size > MESSAGE_BYTES:
        raise LimitError(
            Limit.MESSAGE,
            f"the message has {size} bytes, at most {MESSAGE_BYTES} are taken; send a "
            "shorter prompt, or a part of it",
        )


def _shortened(message: str) -> str:
    """What fits gRPC's limit for a status, whatever value it repeats."""
    if len(message) <= _MESSAGE_CHARACTERS:
        return message
    return f"{message[: _MESSAGE_CHARACTERS // 2]} … {message[-_MESSAGE_CHARACTERS // 2 :]}"


def _tenant_of(tenants: Tenants, metadata: Metadata, now: float) -> Tenant:
    found = tenants.authenticate(_token_in(metadata), now)
    if isinstance(found, Refusal):
        raise UnauthenticatedError(f"the token is {found}; use one that the tenants file of the server names")
    return found


def _token_in(metadata: Metadata) -> str:
    for key, value in metadata:
        if key == "authorization":
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if text[: len(_BEARER)].lower() == _BEARER:
                return text[len(_BEARER) :].strip()
            raise UnauthenticatedError(
                "authorization is no bearer token; send 'authorization: Bearer <token>'"
            )
    raise UnauthenticatedError("the call has no token; send 'authorization: Bearer <token>' as metadata")


def _code_of(error: Exception) -> grpc.StatusCode:
    return next(code for kind, code in _CODES if isinstance(error, kind))
