"""How a client behaves, and what its calls come to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError

Clock = Callable[[], float]
"""Seconds that only go forward."""

REDIS_WAIT_SECONDS = 0.5
"""What an acquire waits for redis where its caller does not say; the first blocks take milliseconds."""

AroundMapping = Callable[[NDArray[np.uint8]], AbstractContextManager[object]]
"""Makes a context for the mapped memory: (bytes,) uint8."""


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


class Silence(StrEnum):
    """Why a call is UNREACHABLE, and so what it says of the calls after it."""

    AWAY = "away"
    """There is no connection."""
    LATE = "late"
    """The deadline passed. One slow call says little; several in a row are a server that hangs."""
    FAILED = "failed"
    """This call failed, for a reason of its own."""
    UNSENT = "unsent"
    """It was not made, since the server was given up at the time."""


class CallError(KVStoreError):
    """A call that came to nothing although the request was well-formed; ``outcome`` says why.

    ``silence`` is set where the outcome is UNREACHABLE.
    """

    def __init__(self, outcome: Outcome, message: str, silence: Silence | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.silence = silence

    @property
    def left_nothing(self) -> bool:
        """Whether the server has certainly done nothing: it said no, or was not asked."""
        return self.outcome is not Outcome.UNREACHABLE or self.silence is Silence.UNSENT


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
    around_mapping: AroundMapping | None = None
    """Entered with the memory once it is mapped, and left before it is let go: to pin it for a GPU, say."""
    populate: bool = True
    """Map the pages of what is stored beside the first calls, not when a payload is first read, which would
    take three times as long; for who reads payloads. Nothing is done where there is ``around_mapping``."""
