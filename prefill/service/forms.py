"""What the OpenAI-compatible API answers with: completions and chats, whole and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from prefill.request import FinishReason
from prefill.service.front import Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of one answer begin with. ``created`` is in seconds since 1970."""

    answer_id: str
    created: int
    model: str

    def of(self, kind: str) -> dict[str, object]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


class Form(Protocol):
    """How one API says things. ``api`` is its name in metrics, ``id_prefix`` begins its answers' ids."""

    api: ClassVar[str]
    id_prefix: ClassVar[str]

    def whole(self, head: Head, text: str, finished: FinishReason, usage: Usage | None) -> dict[str, object]:
        """The answer in one."""

    def opening(self, head: Head) -> list[dict[str, object]]:
        """Chunks before the first text."""

    def chunk(self, head: Head, text: str, finished: FinishReason | None) -> dict[str, object]:
        """A part of the answer."""

    def closing(self, head: Head, usage: Usage | None) -> dict[str, object]:
        """The chunk that only tells the usage."""


class CompletionForm:
    """/v1/completions."""

    api: ClassVar[str] = "completions"
    id_prefix: ClassVar[str] = "cmpl"

    def whole(self, head: Head, text: str, finished: FinishReason, usage: Usage | None) -> dict[str, object]:
        return {**self.chunk(head, text, finished), "usage": usage_object(usage)}

    def opening(self, head: Head) -> list[dict[str, object]]:
        return []

    def chunk(self, head: Head, text: str, finished: FinishReason | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finished}
        return {**head.of("text_completion"), "choices": [choice]}

    def closing(self, head: Head, usage: Usage | None) -> dict[str, object]:
        return {**head.of("text_completion"), "choices": [], "usage": usage_object(usage)}


class ChatForm:
    """/v1/chat/completions."""

    api: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "chatcmpl"

    def whole(self, head: Head, text: str, finished: FinishReason, usage: Usage | None) -> dict[str, object]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finished}
        return {**head.of("chat.completion"), "choices": [choice], "usage": usage_object(usage)}

    def opening(self, head: Head) -> list[dict[str, object]]:
        return [self._delta(head, {"role": "assistant", "content": ""}, None)]

    def chunk(self, head: Head, text: str, finished: FinishReason | None) -> dict[str, object]:
        return self._delta(head, {"content": text} if text else {}, finished)

    def closing(self, head: Head, usage: Usage | None) -> dict[str, object]:
        return {**head.of("chat.completion.chunk"), "choices": [], "usage": usage_object(usage)}

    def _delta(self, head: Head, delta: dict[str, str], finished: FinishReason | None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finished}
        return {**head.of("chat.completion.chunk"), "choices": [choice]}


def usage_object(usage: Usage | None) -> dict[str, object] | None:
    """None where the worker lost the request before it could say."""
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
