"""A prefill worker that answers wrongly: nothing of it is used, and it need not hold anything for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import grpc
import pytest

from hashing import Extras
from kvstore.address import Address
from prefill.errors import BusyError
from prefill.handoff import Handoff
from prefill.request import Request
from prefill.service.errors import ServiceError, answer_to
from prefill.service.peers import HandedOver, Peers
from prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.workers import prompt_of

REQUEST = Request("r" * 512, prompt_of(34), 6, 0.0, Extras(request_salt=b"tenant"), stop_ids=(7,))
RIGHT = Handoff(
    "r",
    bytes(16),
    prompt_of(34).astype("<u4").tobytes(),
    bytes(32),
    b"tail",
    [5],
    max_new_tokens=6,
    extras=REQUEST.extras,
    stop_ids=[7],
)


class Answering(prefill_pb2_grpc.PrefillServiceServicer):
    """Hands over what it was told to, or refuses with this metadata."""

    def __init__(self, handoff: bytes | None, **told: str) -> None:
        self._handoff = handoff
        self._told = tuple((name.replace("_", "-"), value) for name, value in told.items())
        self.asked: list[str] = []
        self.acknowledged: list[str] = []

    async def Prefill(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name in the proto
        self.asked.append(request.ask.request_id)
        if self._handoff is None:
            status = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(status, "full", self._told)
        return prefill_pb2.PrefillResponse(request_id=request.ask.request_id, handoff=self._handoff)

    async def Acknowledge(self, request: Any, _context: Any) -> Any:  # noqa: N802 - the name in the proto
        self.acknowledged.append(request.request_id)
        return prefill_pb2.AcknowledgeResponse()


async def ask(peer: Answering) -> HandedOver | None:
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = Address(host="127.0.0.1", port=port)
    peers = Peers((address,), "m", key=None, seconds=30.0, clock=time.monotonic)
    try:
        return await peers.prefill(REQUEST)
    finally:
        await peers.close()
        await server.stop(1.0)


def test_what_was_asked_for_is_taken() -> None:
    peer = Answering(RIGHT.to_bytes())
    handed = asyncio.run(ask(peer))
    assert handed is not None
    assert handed.handoff == RIGHT
    assert peer.acknowledged == [], "that is for whoever takes it over"


@pytest.mark.parametrize(
    "answer",
    [
        b"no handoff",
        replace(RIGHT, tokens=bytes(4 * 34)).to_bytes(),
        replace(RIGHT, extras=None).to_bytes(),
        replace(RIGHT, max_new_tokens=7).to_bytes(),
        replace(RIGHT, stop_ids=[]).to_bytes(),
    ],
    ids=["garbage", "another prompt", "another tenant", "another length", "another end"],
)
def test_a_handoff_of_something_else_is_let_go(answer: bytes) -> None:
    peer = Answering(answer)
    assert asyncio.run(ask(peer)) is None
    assert peer.acknowledged == peer.asked
    assert len(peer.asked[0]) <= 512


@pytest.mark.parametrize(
    ("said", "seconds"), [("2.5", 2.5), ("nan", 1.0), ("-3", 1.0), ("inf", 600.0), ("soon", 1.0)]
)
def test_how_long_a_busy_worker_is_busy(said: str, seconds: float) -> None:
    with pytest.raises(BusyError, match="full") as raised:
        asyncio.run(ask(Answering(None, retry_after=said)))
    assert raised.value.retry_after_seconds == seconds


@pytest.mark.parametrize(
    ("code", "status"), [("out_of_memory", 503), ("context_length_exceeded", 400)], ids=["now", "ever"]
)
def test_a_lack_of_memory_is_passed_on_as_such(code: str, status: int) -> None:
    """The client would take a full queue for a matter of rate."""
    with pytest.raises(ServiceError, match="full") as raised:
        asyncio.run(ask(Answering(None, error_code=code, retry_after="1")))
    answer = answer_to(raised.value)
    assert (answer.http, answer.code) == (HTTPStatus(status), code)
