"""What a request may be refused for, and what each refusal is called over HTTP and gRPC."""

from __future__ import annotations

from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

import grpc

from hashing import HashingError
from kvstore.errors import KVStoreError, PoolError
from prefill.errors import BusyError, HandoffError, PrefillError, PromptError, RequestError


class Answer(NamedTuple):
    """One kind of refusal. ``kind`` and ``code`` are the ``type`` and ``code`` of OpenAI's error object."""

    http: HTTPStatus
    kind: str
    code: str | None
    rpc: grpc.StatusCode

    @property
    def label(self) -> str:
        """What metrics call it: the code, or the type where it has none."""
        return self.code or self.kind


class Refusal(Enum):
    """Kinds of refusals beyond those that the engine makes."""

    MALFORMED = Answer(
        HTTPStatus.BAD_REQUEST, "invalid_request_error", None, grpc.StatusCode.INVALID_ARGUMENT
    )
    UNSUPPORTED = Answer(
        HTTPStatus.BAD_REQUEST,
        "invalid_request_error",
        "unsupported_parameter",
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    TOO_LONG = Answer(
        HTTPStatus.BAD_REQUEST,
        "invalid_request_error",
        "context_length_exceeded",
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    TOO_LARGE = Answer(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "invalid_request_error",
        "request_too_large",
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    SLOW = Answer(
        HTTPStatus.REQUEST_TIMEOUT, "invalid_request_error", None, grpc.StatusCode.DEADLINE_EXCEEDED
    )
    KEY = Answer(
        HTTPStatus.UNAUTHORIZED,
        "invalid_request_error",
        "invalid_api_key",
        grpc.StatusCode.UNAUTHENTICATED,
    )
    MODEL = Answer(
        HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found", grpc.StatusCode.NOT_FOUND
    )
    ROLE = Answer(
        HTTPStatus.BAD_REQUEST,
        "invalid_request_error",
        "wrong_role",
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    DRAINING = Answer(HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "draining", grpc.StatusCode.UNAVAILABLE)
    MEMORY = Answer(
        HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "out_of_memory", grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    """There is no room at the moment; ``TOO_LONG`` is what will never fit."""
    READER = Answer(
        HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "reader_too_slow", grpc.StatusCode.ABORTED
    )
    CANCELLED = Answer(HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "cancelled", grpc.StatusCode.CANCELLED)
    FAILED = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", None, grpc.StatusCode.INTERNAL)


_IN_USE = Answer(HTTPStatus.CONFLICT, "invalid_request_error", None, grpc.StatusCode.ALREADY_EXISTS)
_BUSY = Answer(
    HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", grpc.StatusCode.RESOURCE_EXHAUSTED
)
_PASSING = (Refusal.MEMORY.value, Refusal.DRAINING.value)
_RETRY_SECONDS = 1.0


class ServiceError(PrefillError):
    """A request that this worker does not serve. ``param`` is the offending field, where there is one."""

    def __init__(self, refusal: Refusal, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.param = param


def answer_to(error: Exception) -> Answer:
    """How to answer to whom this error hit; FAILED for what is a defect of ours."""
    if isinstance(error, ServiceError):
        return error.refusal.value
    kinds: tuple[tuple[type[Exception], Answer], ...] = (
        (BusyError, _BUSY),
        (RequestError, _IN_USE),
        (PromptError, Refusal.MALFORMED.value),
        (HandoffError, Refusal.MALFORMED.value),
        (HashingError, Refusal.MALFORMED.value),
        (PoolError, Refusal.TOO_LONG.value),
    )
    return next((answer for kind, answer in kinds if isinstance(error, kind)), Refusal.FAILED.value)


def retry_after_seconds(error: Exception) -> float | None:
    """When the same request may find what it lacked; None where waiting would not help it here."""
    if isinstance(error, BusyError):
        return error.retry_after_seconds
    return _RETRY_SECONDS if answer_to(error) in _PASSING else None


def message_of(error: Exception) -> str:
    """What to say of it; of a defect only that there is one."""
    if isinstance(error, PrefillError | KVStoreError | HashingError):
        return str(error)
    return "the request failed in the worker; its log says why"
