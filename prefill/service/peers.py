"""Other workers that prefill: which one to ask, and what to do when it is busy, slow or dead."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvstore.address import Address
from prefill.errors import BusyError, HandoffError, PrefillError, PromptError
from prefill.handoff import Handoff
from prefill.request import Request
from prefill.service.asks import MESSAGE_BYTES, write_ask
from prefill.service.errors import Refusal, ServiceError
from prefill.v1 import prefill_pb2, prefill_pb2_grpc

RETRY_AFTER = "retry-after"
ERROR_CODE = "error-code"
"""Trailing metadata with the ``code`` that OpenAI's error object would have: statuses tell less apart."""
_AVOID_SECONDS = 1.0
"""A worker that failed is not asked for this long; it may have been started again by then."""
_AVOID_SLOW_SECONDS = 30.0
_ACKNOWLEDGE_SECONDS = 5.0
_RETRY_SECONDS_MAX = 600.0
_ID_CHARACTERS = 128
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # A worker that is started again is found again soon, and a machine that is gone is noticed.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
)
_PASSED_ON = {each.value.code: each for each in (Refusal.MEMORY, Refusal.TOO_LONG)}
_log = logging.getLogger(__name__)
_Stub = Any
"""The generated stub of PrefillService, whose methods have no annotations."""


@dataclass(slots=True)
class _Peer:
    address: str
    channel: grpc.aio.Channel
    stub: _Stub
    asked: int = 0
    """Calls that run."""
    avoid_until: float = field(default=float("-inf"))


class HandedOver:
    """A handoff, and the worker that holds its blocks until it is told."""

    def __init__(self, peers: Peers, peer: _Peer, request_id: str, handoff: Handoff) -> None:
        self.handoff = handoff
        self._peers = peers
        self._peer = peer
        self._request_id = request_id
        self._is_told = False

    def acknowledge(self) -> None:
        """Tell that worker, in the background. Idempotent."""
        if not self._is_told:
            self._is_told = True
            self._peers.tell(self._peer, self._request_id)

    def reject(self, reason: str) -> None:
        """Ask that worker no more for a while: it runs another model, or another release."""
        self._peers.avoid(self._peer, _AVOID_SLOW_SECONDS, reason)


class Peers:
    """Sends prompts to the worker with the fewest of ours that is not avoided. Used on one event loop."""

    def __init__(
        self,
        addresses: tuple[Address, ...],
        model: str,
        *,
        key: str | None,
        seconds: float,
        clock: Callable[[], float],
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """``key`` goes along as bearer token; each worker has ``seconds`` for a prompt.

        ``credentials`` are for TCP; on unix sockets nothing is encrypted.
        """
        self._model = model
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self._seconds = seconds
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = []
        for address in addresses:
            if credentials is None or address.path is not None:
                channel = grpc.aio.insecure_channel(str(address), options=_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(str(address), credentials, options=_OPTIONS)
            self._peers.append(_Peer(str(address), channel, prefill_pb2_grpc.PrefillServiceStub(channel)))

    async def prefill(self, request: Request) -> HandedOver | None:
        """Ask one worker after the other until one hands the prompt over; None where none can.

        Nothing of the answer has been told to anybody by then, so that a worker that dies costs time
        and no token. Raises what is wrong with the prompt, and where workers are there and have no place
        BusyError, or a ServiceError of the memory that they lack.
        """
        full: BusyError | ServiceError | None = None
        for peer in sorted(self._peers, key=lambda each: each.asked):
            if peer.avoid_until > self._clock():
                continue
            try:
                return await self._ask(peer, request)
            except BusyError as error:
                full = error
            except ServiceError as error:
                if error.refusal is not Refusal.MEMORY:
                    raise
                full = error
            except HandoffError as error:
                self.avoid(peer, _AVOID_SLOW_SECONDS, str(error))
            except grpc.aio.AioRpcError as error:
                late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                reason = f"{error.code().name.lower()}: {error.details()}"
                self.avoid(peer, _AVOID_SLOW_SECONDS if late else _AVOID_SECONDS, reason)
        if full is not None:
            raise full
        _log.warning("no worker of prefill_at hands over: %s is prefilled here", request.request_id)
        return None

    def avoid(self, peer: _Peer, seconds: float, reason: str) -> None:
        """Ask a worker no more for a while."""
        peer.avoid_until = self._clock() + seconds
        _log.warning("%s does not prefill (%s); it is left alone for %g s", peer.address, reason, seconds)

    def tell(self, peer: _Peer, request_id: str) -> None:
        """Acknowledge in the background. Where it fails, the other side's lease lapses by itself."""
        task = asyncio.create_task(self._acknowledge(peer, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Tell what is left to tell, and hang up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ACKNOWLEDGE_SECONDS)
        for peer in self._peers:
            await peer.channel.close()

    async def _ask(self, peer: _Peer, request: Request) -> HandedOver:
        """One worker's handoff: HandoffError, what it refused, or AioRpcError where it could not say."""
        # Each try has a name of its own: a worker that was slow may still be at an earlier one.
        request_id = f"{request.request_id[:_ID_CHARACTERS]}-{uuid.uuid4().hex[:8]}"
        ask = prefill_pb2.PrefillRequest(ask=write_ask(request, request_id, self._model))
        peer.asked += 1
        try:
            answer = await peer.stub.Prefill(ask, timeout=self._seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            refusal = _refusal_of(error)
            if refusal is None:
                raise
            raise refusal from error
        finally:
            peer.asked -= 1
        try:
            handoff = Handoff.from_bytes(answer.handoff)
            if not handoff.answers(request):
                raise HandoffError("the handoff is of another request; run the same release on both sides")
        except HandoffError:
            self.tell(peer, request_id)  # it holds the blocks for nobody
            raise
        return HandedOver(self, peer, request_id, handoff)

    async def _acknowledge(self, peer: _Peer, request_id: str) -> None:
        message = prefill_pb2.AcknowledgeRequest(request_id=request_id)
        try:
            await peer.stub.Acknowledge(message, timeout=_ACKNOWLEDGE_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            _log.warning("%s was not told of a handoff (%s)", peer.address, error.code().name.lower())


def _refusal_of(error: grpc.aio.AioRpcError) -> PrefillError | None:
    """What a worker refused, for this worker's own client; None where it is the worker that failed."""
    told = dict(error.trailing_metadata() or ())
    code, details = error.code(), error.details() or "a prefill worker refused the prompt"
    passed_on = _PASSED_ON.get(told.get(ERROR_CODE))
    if passed_on is not None:
        return ServiceError(passed_on, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return BusyError(details, _retry_after(told.get(RETRY_AFTER)))
    return PromptError(details) if code is grpc.StatusCode.INVALID_ARGUMENT else None


def _retry_after(told: str | bytes | None) -> float:
    try:
        # In this order a NaN is the lower bound.
        return min(max(1.0, float(told or 1.0)), _RETRY_SECONDS_MAX)
    except ValueError:
        return 1.0
