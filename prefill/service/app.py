"""The HTTP side of a worker: the OpenAI-compatible API, /health and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefill.service.endpoints import Chats, Completions, Serving, open_bodies
from prefill.service.errors import ServiceError, answer_to
from prefill.service.reply import error_object

_OWNER = "prefix-kvstore"
_STATUS_KIND = "invalid_request_error"


def build_app(
    serving: Serving, metrics: Callable[[str], Awaitable[tuple[bytes, str]]], healthy: Callable[[], bool]
) -> Starlette:
    """``metrics`` gives body and content type for an Accept header."""
    created = int(serving.wall_clock())
    model = {
        "id": serving.model,
        "object": "model",
        "created": created,
        "owned_by": _OWNER,
        "max_model_len": serving.context_tokens,
    }

    bodies = open_bodies(serving.context_tokens, serving.stall_seconds)

    def admit(request: Request) -> None:
        serving.gate.require_key(request.headers.get("authorization", ""))

    async def models(request: Request) -> Response:
        admit(request)
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        admit(request)
        name = request.path_params["name"]
        if name != serving.model:
            return _error(HTTPStatus.NOT_FOUND, f"the model {name!r} does not exist here", "model_not_found")
        return JSONResponse(model)

    async def health(_request: Request) -> Response:
        state = "draining" if serving.gate.draining else "serving" if healthy() else "failing"
        status = HTTPStatus.OK if state == "serving" else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": state, "role": serving.role, "model": serving.model}, status)

    async def show_metrics(request: Request) -> Response:
        body, content_type = await metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Starlette(
        routes=[
            Route("/v1/completions", Completions(serving, bodies), methods=["POST"], name="completions"),
            Route("/v1/chat/completions", Chats(serving, bodies), methods=["POST"], name="chats"),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", show_metrics),
        ],
        exception_handlers={HTTPException: _http_error, ServiceError: _service_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or not this method: in the API's own form too."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {status.phrase.lower()}; see /v1/models for what is here"
    return _error(status, message, None, error.headers)


async def _service_error(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": error_object(error)}, answer_to(error).http)


def _error(status: HTTPStatus, message: str, code: str | None, headers: object = None) -> Response:
    content = {"error": {"message": message, "type": _STATUS_KIND, "param": None, "code": code}}
    return JSONResponse(content, status, headers=dict(headers) if isinstance(headers, dict) else None)
