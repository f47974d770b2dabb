"""prefill.v1 over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc

from prefill.config import Role
from prefill.handoff import Handoff
from prefill.request import Request
from prefill.service.asks import read_ask, unpack, write_progress
from prefill.service.driver import Driver
from prefill.service.errors import Refusal, ServiceError, answer_to, message_of, retry_after_seconds
from prefill.service.front import Front
from prefill.service.gate import Gate
from prefill.service.peers import ERROR_CODE, RETRY_AFTER
from prefill.v1 import prefill_pb2, prefill_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_MESSAGE_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class RpcParts:
    """What the calls are served with. ``stall_seconds`` is how long a reader may take no message."""

    gate: Gate
    driver: Driver
    front: Front
    role: Role
    model: str
    stall_seconds: float


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """The calls of one worker."""

    def __init__(self, parts: RpcParts) -> None:
        self._parts = parts

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: prefill_pb2.GenerateRequest, context: Context
    ) -> None:
        async with self._call("Generate", context):
            self._require_role("Generate", Role.BOTH, Role.DECODE)
            asked = self._read(request.ask)
            async with self._parts.front.generate(asked) as answer:
                async for part in answer:
                    await self._write(context, prefill_pb2.GenerateResponse(progress=write_progress(part)))

    async def Prefill(  # noqa: N802 - the name in the proto
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> prefill_pb2.PrefillResponse:
        async with self._call("Prefill", context):
            self._require_role("Prefill", Role.BOTH, Role.PREFILL)
            asked = self._read(request.ask)
            async with await self._parts.driver.submit_prefill(asked) as stream:
                try:
                    output = await anext(stream)
                except asyncio.CancelledError:
                    self._parts.driver.acknowledge(asked.request_id)  # nobody else would
                    raise
            assert output.handoff is not None, "the one output of a prefill"
            return prefill_pb2.PrefillResponse(request_id=asked.request_id, handoff=output.handoff.to_bytes())
        raise AssertionError("the context ends with an answer or an error")

    async def Resume(  # noqa: N802 - the name in the proto
        self, request: prefill_pb2.ResumeRequest, context: Context
    ) -> None:
        async with self._call("Resume", context):
            self._require_role("Resume", Role.BOTH, Role.DECODE)
            handoff = Handoff.from_bytes(request.handoff)
            delivered = unpack(request.delivered_token_ids, "delivered_token_ids").tolist()
            handoff = replace(handoff, output=[*handoff.output, *delivered])
            async with self._parts.front.resume(handoff) as answer:
                async for part in answer:
                    await self._write(
                        context,
                        prefill_pb2.ResumeResponse(admitted=part.admitted, progress=write_progress(part)),
                    )

    async def Acknowledge(  # noqa: N802 - the name in the proto
        self, request: prefill_pb2.AcknowledgeRequest, context: Context
    ) -> prefill_pb2.AcknowledgeResponse:
        # Served while the worker drains too: it ends something.
        try:
            self._parts.gate.require_key(_authorization(context))
        except ServiceError as error:
            await _abort(context, error)
        self._parts.driver.acknowledge(request.request_id)
        return prefill_pb2.AcknowledgeResponse()

    @asynccontextmanager
    async def _call(self, rpc: str, context: Context) -> AsyncIterator[None]:
        """A call is served inside; what leaves it becomes its status."""
        try:
            with self._parts.gate.request(rpc, _authorization(context)):
                yield
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - one bad call must not end the server
            await _abort(context, error)

    def _require_role(self, rpc: str, *roles: Role) -> None:
        if self._parts.role not in roles:
            raise ServiceError(
                Refusal.ROLE,
                f"{rpc} is for workers of role {' and '.join(roles)}, and this one's is {self._parts.role}; "
                "ask one of those",
            )

    def _read(self, ask: prefill_pb2.Ask) -> Request:
        return read_ask(ask, self._parts.model, self._parts.driver.clock())

    async def _write(self, context: Context, message: object) -> None:
        """Hand a message to the transport, which waits while the reader takes none."""
        try:
            await asyncio.wait_for(context.write(message), self._parts.stall_seconds)
        except TimeoutError as error:
            raise ServiceError(
                Refusal.READER,
                f"no message was taken in {self._parts.stall_seconds:g} s and the request was cancelled; "
                "read faster, or raise stall_seconds",
            ) from error
        except grpc.aio.InternalError as error:
            # The call was over by then, which cancels this too: what the transport says is what comes out.
            raise ServiceError(Refusal.CANCELLED, "the caller hung up") from error


def _authorization(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return ""


async def _abort(context: Context, error: Exception) -> None:
    answer, seconds = answer_to(error), retry_after_seconds(error)
    told = {ERROR_CODE: answer.code, RETRY_AFTER: None if seconds is None else f"{seconds:g}"}
    trailing = tuple((name, value) for name, value in told.items() if value is not None)
    message = message_of(error)
    if len(message) > _MESSAGE_CHARACTERS:
        message = f"{message[:_MESSAGE_CHARACTERS]} …"
    await context.abort(answer.rpc, message, trailing)
