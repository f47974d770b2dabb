"""How a client behaves, and what its calls come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstore.errors import KVStoreError

Clock = Callable[[], float]
"""Seconds that only go forward."""


class Outcome(StrEnum):
    """What became of a call. All but OK mean: go on without the cache."""

    OK = "ok"
    UNREACHABLE = "unreachable"
    """No server answered in time, or it failed."""
    REFUSED = "refused"
    """The server is at a limit."""
    REJECTED = "rejected"
    """The token is missing or wrong, or does not allow this."""
    LOST = "lost"
    """The lease or the write is over: its time ran out, or the server is another."""


class CallError(KVStoreError):
    """A call that came to nothing although the request was well-formed; ``outcome`` says why."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class TLS:
    """PEM files. Without ``ca`` the system's authorities are trusted; ``cert`` and ``key`` go together."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times are seconds."""

    rpc_seconds: float = 1.0
    """The longest that a call waits for an answer, beside what it asks the server to wait."""
    transfer_seconds: float = 30.0
    """The longest that a stream of payloads may take."""
    reconnect_seconds: float = 0.5
    """A server that did not answer is left alone for so long; calls fail at once meanwhile."""
    map_pool: bool = True
    """Read and write the server's pool file where it can be mapped; False streams always."""
