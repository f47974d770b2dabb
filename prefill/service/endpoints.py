"""/v1/completions and /v1/chat/completions: from a body to an answer."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from hashing import Extras
from kvstore.block import Uint32Array
from prefill.config import Role
from prefill.request import FinishReason, Request
from prefill.service.asks import require_model
from prefill.service.bodies import Bodies, BodyLimits
from prefill.service.errors import Refusal, ServiceError
from prefill.service.forms import ChatForm, CompletionForm, Form, Head
from prefill.service.front import Front
from prefill.service.gate import Gate
from prefill.service.pieces import Piece, pieces_of
from prefill.service.reply import Reply, unless_gone
from prefill.service.schema import COMPLETION_TOKENS, Body, ChatBody, CompletionBody, read_body
from prefill.text import Detokenizer, StopStrings, Text

_BODY_BYTES = 2**20
_BODY_BYTES_A_TOKEN = 64
_BODIES_BYTES = 2**25
_BODIES_MAX = 1024
_Kind = TypeVar("_Kind", bound=Body)


@dataclass(frozen=True, slots=True)
class Serving:
    """What requests are served with.

    Prompt and answer have at most ``context_tokens``, which is the model's limit, and
    ``pool_tokens``, what device memory holds. ``text`` is None where the model has no tokenizer;
    ``tokenizing`` is one thread.
    """

    gate: Gate
    front: Front
    role: Role
    model: str
    text: Text | None
    tokenizing: Executor
    context_tokens: int
    pool_tokens: int
    default_max_tokens: int
    stall_seconds: float
    clock: Callable[[], float]
    wall_clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A body and the request that it became."""

    body: Body
    request: Request
    text: Text
    head: Head


class Endpoint(ABC, Generic[_Kind]):
    """An ASGI application: one API that continues prompts."""

    def __init__(self, serving: Serving, bodies: Bodies, kind: type[_Kind], form: Form) -> None:
        self._serving = serving
        self._bodies = bodies
        self._kind = kind
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        reply = Reply(send, self._serving.stall_seconds)
        try:
            with self._serving.gate.request(self._form.api, http.headers.get("authorization", "")):
                asked = await self._read(http)
                await unless_gone(receive, self._answer(asked, reply))
        except Exception as error:  # noqa: BLE001 - one bad request must not end the connection unanswered
            with suppress(ServiceError):  # who takes nothing cannot be told
                await reply.refuse(error)

    @abstractmethod
    def encode(self, body: _Kind, text: Text) -> Uint32Array:
        """The prompt's token ids. Called on a thread."""

    @abstractmethod
    def default_tokens(self) -> int:
        """Most tokens of an answer where the body does not say."""

    async def _read(self, http: HttpRequest) -> _Asked:
        serving = self._serving
        if serving.role is Role.PREFILL:
            raise ServiceError(
                Refusal.ROLE, "this worker's role is prefill; ask one whose role is decode or both"
            )
        if serving.text is None:
            raise ServiceError(
                Refusal.MALFORMED, "the model has no tokenizer, so no text; use the gRPC API with token ids"
            )
        arrived, text = serving.clock(), serving.text
        async with self._bodies.read(http) as sent:
            body = read_body(self._kind, sent)
            require_model(body.model, serving.model)
            # Tokenizers take long for long prompts, and one at a time.
            loop = asyncio.get_running_loop()
            tokens = await loop.run_in_executor(serving.tokenizing, lambda: self.encode(body, text))
        answer_id = f"{self._form.id_prefix}-{uuid.uuid4().hex}"
        request = Request(
            answer_id,
            tokens,
            self._answer_tokens(body, len(tokens)),
            arrived,
            Extras(request_salt=body.cache_salt.encode()) if body.cache_salt else None,
            sampling=body.sampling(),
            stop_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
        )
        return _Asked(body, request, text, Head(answer_id, int(serving.wall_clock()), serving.model))

    def _answer_tokens(self, body: _Kind, prompt_tokens: int) -> int:
        """Most tokens to answer; ServiceError where prompt and answer do not fit the context."""
        context, (field, asked) = self._serving.context_tokens, body.answer_tokens
        # The last token's own KV is never computed, so it needs no place.
        left = context + 1 - prompt_tokens
        if left < 1 or (asked is not None and asked > left):
            wanted = "" if asked is None else f" and {asked} for the answer"
            raise ServiceError(
                Refusal.TOO_LONG,
                f"this model's maximum context length is {context} tokens, and the request has "
                f"{prompt_tokens} in the prompt{wanted}; shorten the prompt or the answer",
                body.prompt_field if left < 1 else field,
            )
        if asked is not None:
            return asked
        return max(1, min(self.default_tokens(), left, self._serving.pool_tokens + 1 - prompt_tokens))

    async def _answer(self, asked: _Asked, reply: Reply) -> None:
        async with self._pieces(asked) as pieces:
            if asked.body.stream:
                await self._stream(asked, pieces, reply)
            else:
                await self._whole(asked, pieces, reply)

    @asynccontextmanager
    async def _pieces(self, asked: _Asked) -> AsyncIterator[AsyncIterator[Piece]]:
        tail = asked.request.tokens[-8:].tolist()
        detokenizer = Detokenizer(asked.text.decode, tail)
        async with self._serving.front.generate(asked.request) as answer:
            yield pieces_of(answer, detokenizer, StopStrings(asked.body.stop))

    async def _whole(self, asked: _Asked, pieces: AsyncIterator[Piece], reply: Reply) -> None:
        text, last = [], Piece("")
        async for last in pieces:
            text.append(last.text)
        finished = last.finished or FinishReason.LENGTH
        await reply.whole(self._form.whole(asked.head, "".join(text), finished, last.usage))

    async def _stream(self, asked: _Asked, pieces: AsyncIterator[Piece], reply: Reply) -> None:
        options, last = asked.body.stream_options, Piece("")
        # The request is queued: a client need not wait for its first token to know that.
        await reply.begin()
        # Clients take the first chunk for the first token.
        opening = self._form.opening(asked.head)
        async for last in pieces:
            for chunk in opening:
                await reply.event(chunk)
            opening = []
            await reply.event(self._form.chunk(asked.head, last.text, last.finished))
        if options is not None and options.include_usage:
            await reply.event(self._form.closing(asked.head, last.usage))
        await reply.done()


class Completions(Endpoint[CompletionBody]):
    """/v1/completions: a prompt as text or token ids."""

    def __init__(self, serving: Serving, bodies: Bodies) -> None:
        super().__init__(serving, bodies, CompletionBody, CompletionForm())

    def encode(self, body: CompletionBody, text: Text) -> Uint32Array:
        prompt = body.only_prompt
        return text.encode(prompt) if isinstance(prompt, str) else np.array(prompt, dtype=np.uint32)

    def default_tokens(self) -> int:
        return COMPLETION_TOKENS


class Chats(Endpoint[ChatBody]):
    """/v1/chat/completions: messages, made a prompt by the model's chat template."""

    def __init__(self, serving: Serving, bodies: Bodies) -> None:
        super().__init__(serving, bodies, ChatBody, ChatForm())

    def encode(self, body: ChatBody, text: Text) -> Uint32Array:
        return text.encode_chat([message.for_template() for message in body.messages])

    def default_tokens(self) -> int:
        return self._serving.default_max_tokens


def open_bodies(context_tokens: int, seconds: float) -> Bodies:
    """For prompts of a model's context; each has ``seconds`` to come."""
    each = _BODY_BYTES + _BODY_BYTES_A_TOKEN * context_tokens
    return Bodies(BodyLimits(each, max(_BODIES_BYTES, 2 * each), _BODIES_MAX, seconds))
