"""Turns away who has no valid token before the message is read: reading it may cost more than serving it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvstore.service.gate import Context, Gate

_OPEN_TO_ALL = ("/grpc.health.v1.", "/grpc.reflection.")


class Doorman(grpc.aio.ServerInterceptor):
    """Asks the gate about a call's metadata. Health and reflection are open to all: they tell no secrets."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler, or one that refuses without having parsed anything."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_OPEN_TO_ALL):
            return handler
        refusal = self._gate.refuse(method, handler_call_details.invocation_metadata)
        if refusal is None:
            return handler

        async def refuse(_request: bytes, context: Context) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

        return grpc.unary_unary_rpc_method_handler(refuse)
