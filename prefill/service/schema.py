"""Bodies of the OpenAI-compatible API as requests; what does not fit is refused with the field's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from prefill.request import Sampling
from prefill.service.errors import Refusal, ServiceError

FIELDS_MAX = 64
STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1024
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
COMPLETION_TOKENS = 16
"""What a completion has where the request does not say, as OpenAI's."""

_Body = TypeVar("_Body", bound="Body")

# What this worker cannot do, and the values that ask for nothing: clients send them unasked.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}

# About the caller, not about the answer.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

# Fields of several types, behind which pydantic names the type that it tried.
_UNIONS = ("prompt", "content")

# What would fit, by pydantic's kind of problem, in words of JSON.
_EXPECTED: Mapping[str, str] = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "an object",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "a length of at least {min_length}",
    "too_long": "a length of at most {max_length}",
    "string_too_short": "a length of at least {min_length}",
    "string_too_long": "a length of at most {max_length}",
}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else [] if value is None else value


# Of much that does not fit the errors would be seconds of work, and one of them is told: so lists fail at
# the first, and objects have few fields.
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS_MAX)]],
    Field(max_length=STOPS_MAX, fail_fast=True),
    BeforeValidator(_as_list),
]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_Item = TypeVar("_Item")
Listed = Annotated[list[_Item], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """What a stream tells beside the answer."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class _Object(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _require_few_fields(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > FIELDS_MAX:
            raise ValueError(f"at most {FIELDS_MAX} fields")
        return given


class Body(_Object):
    """What completions and chats have in common."""

    prompt_field: ClassVar[str]

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=SEED_MIN, le=SEED_MAX)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: Stops = []
    stop_token_ids: list[TokenId] = Field(default=[], max_length=STOPS_MAX)
    ignore_eos: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, given: object) -> object:
        if not isinstance(given, dict):
            raise ValueError("a JSON object")
        kept = {}
        for name, value in given.items():
            if value is None or name in _IGNORED:
                continue
            if name in _NEUTRAL and name not in cls.model_fields:
                if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
                    raise ServiceError(
                        Refusal.UNSUPPORTED, f"{name} = {_short(value)} is not supported; leave it out", name
                    )
                continue
            kept[name] = value
        return kept

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ServiceError(
                Refusal.MALFORMED,
                "stream_options is given and stream is false; set stream, or leave it out",
                "stream_options",
            )
        return self

    @property
    def answer_tokens(self) -> tuple[str, int | None]:
        """The field with the most tokens to answer, and its value where the request says."""
        return "max_tokens", self.max_tokens

    def sampling(self) -> Sampling:
        top_k = max(self.top_k, 0)
        if self.top_p == 0:
            # As in OpenAI's: no share of the mass leaves the most likely token.
            return Sampling(0.0, 1.0, top_k, self.seed)
        return Sampling(self.temperature, self.top_p, top_k, self.seed)


class CompletionBody(Body):
    """/v1/completions."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: str | Listed[TokenId] | Listed[str] | Listed[Listed[TokenId]]

    @property
    def only_prompt(self) -> str | list[int]:
        """The prompt, as text or as token ids; ServiceError where there are several."""
        prompt = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return prompt  # type: ignore[return-value]  # one prompt: text, or ids
        if len(prompt) > 1:
            raise ServiceError(
                Refusal.UNSUPPORTED,
                f"{len(prompt)} prompts were given, and one at a time is answered; send a request for each",
                "prompt",
            )
        return prompt[0]


class TextPart(_Object):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Object):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Listed[TextPart] = Field(union_mode="left_to_right")
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know messages."""
        content = (
            self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(Body):
    """/v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def answer_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().answer_tokens
        return "max_completion_tokens", self.max_completion_tokens


def read_body(kind: type[_Body], body: bytes | bytearray) -> _Body:
    """ServiceError where ``body`` is no JSON, or has a field that is unknown or does not fit."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error
    except RecursionError as error:
        raise ServiceError(Refusal.MALFORMED, "the body is nested too deeply; send plain fields") from error


def _refusal(error: ValidationError) -> ServiceError:
    """The problem that lies deepest: of the alternatives of a field, the one that was meant."""
    problems = error.errors(include_url=False)
    paths = [_path(problem) for problem in problems]
    path = max(paths, key=len)
    found = [problem for problem, place in zip(problems, paths, strict=True) if place == path]
    problem, name = found[0], ".".join(map(str, path))
    reason = " or ".join(dict.fromkeys(map(_reason, found)))
    if problem["type"] == "json_invalid":
        return ServiceError(
            Refusal.MALFORMED, f"the body is not JSON ({reason}); send one JSON object with its Content-Type"
        )
    if not path:
        return ServiceError(Refusal.MALFORMED, f"the body does not fit: expected {reason}")
    if problem["type"] == "extra_forbidden":
        return ServiceError(Refusal.MALFORMED, f"{name} is unknown; leave it out", name)
    if problem["type"] == "missing":
        return ServiceError(Refusal.MALFORMED, f"{name} is missing; send it", name)
    value = _short(problem["input"])
    return ServiceError(Refusal.MALFORMED, f"{name} = {value}: expected {reason}", name)


def _path(problem: ErrorDetails) -> tuple[str | int, ...]:
    """Where it is in the body, without the alternatives that pydantic names after types."""
    loc = problem["loc"]
    return tuple(place for number, place in enumerate(loc) if not number or loc[number - 1] not in _UNIONS)


def _reason(problem: ErrorDetails) -> str:
    """What would fit, in words of JSON."""
    known = _EXPECTED.get(problem["type"])
    if known is not None:
        return known.format_map({name: _plain(value) for name, value in problem.get("ctx", {}).items()})
    told = problem["msg"]
    for opening in ("Value error, ", "Input should be ", "Invalid JSON: "):
        told = told.removeprefix(opening)
    return told


def _plain(bound: object) -> object:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _same(value: object, neutral: object) -> bool:
    """Equality in which true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
