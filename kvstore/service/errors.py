"""What a request may be refused for, beyond what the store itself refuses."""

from __future__ import annotations

from enum import StrEnum

from kvstore.errors import KVStoreError


class Limit(StrEnum):
    """A bound that a request ran into; label values of ``kvstore_refused_requests_total``."""

    LEASES = "leases"
    STAGED_BYTES = "staged_bytes"
    STREAMS = "streams"
    CLIENTS = "clients"
    NAMESPACES = "namespaces"
    MESSAGE = "message"
    BATCH = "batch"
    ROWS = "rows"
    DRAINING = "draining"
    CREDENTIALS = "credentials"


class InvalidRequestError(KVStoreError):
    """A field of a request is malformed: INVALID_ARGUMENT."""


class UnknownNamespaceError(KVStoreError):
    """No namespace of the caller's tenant fits: NOT_FOUND."""


class WrongEpochError(KVStoreError):
    """The caller registered with the server before this one: FAILED_PRECONDITION."""


class NotPossibleError(KVStoreError):
    """The request does not fit the state of what it names: FAILED_PRECONDITION."""


class UnauthenticatedError(KVStoreError):
    """The caller's token is missing, unknown or expired: UNAUTHENTICATED."""


class ForbiddenError(KVStoreError):
    """The caller is known and may not do that: PERMISSION_DENIED."""


class LimitError(KVStoreError):
    """The caller is at a limit: RESOURCE_EXHAUSTED."""

    def __init__(self, limit: Limit, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class LateError(KVStoreError):
    """The caller's deadline has passed, so it cannot learn of the answer: DEADLINE_EXCEEDED."""


class DrainingError(KVStoreError):
    """The server is about to end: UNAVAILABLE."""
