"""The messages of prefill.v1 as requests, and answers as messages."""

from __future__ import annotations

import uuid

import numpy as np

from hashing import Extras
from kvstore.block import Uint32Array
from prefill.request import GREEDY, REQUEST_ID_MAX, STOP_IDS_MAX, FinishReason, Request, Sampling
from prefill.service.errors import Refusal, ServiceError
from prefill.service.front import Part
from prefill.v1 import prefill_pb2

MESSAGE_BYTES = 64 * 2**20
"""Most bytes of a message: a handoff holds the unfinished tail block of all layers."""

_TOKEN_BYTES = 4
_REASONS = {
    FinishReason.STOP: prefill_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: prefill_pb2.FINISH_REASON_LENGTH,
}


def read_ask(ask: prefill_pb2.Ask, model: str, now: float) -> Request:
    """The request, arriving now. ServiceError and PromptError name the field that does not fit."""
    require_model(ask.model, model)
    _require_few("request_id", len(ask.request_id), REQUEST_ID_MAX)
    _require_few("stop_ids", len(ask.stop_ids) // _TOKEN_BYTES, STOP_IDS_MAX)
    return Request(
        ask.request_id or f"rpc-{uuid.uuid4().hex}",
        unpack(ask.token_ids, "token_ids"),
        ask.max_new_tokens,
        now,
        Extras(request_salt=ask.request_salt) if ask.request_salt else None,
        sampling=_read_sampling(ask.sampling) if ask.HasField("sampling") else GREEDY,
        stop_ids=tuple(unpack(ask.stop_ids, "stop_ids").tolist()),
        ignore_eos=ask.ignore_eos,
    )


def write_ask(request: Request, request_id: str, model: str) -> prefill_pb2.Ask:
    """What ``read_ask`` reads, for another worker."""
    sampling = request.sampling
    return prefill_pb2.Ask(
        request_id=request_id,
        model=model,
        token_ids=np.asarray(request.tokens, dtype="<u4").tobytes(),
        max_new_tokens=request.max_new_tokens,
        sampling=prefill_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=None if sampling.seed is None else sampling.seed % 2**64,
        ),
        stop_ids=np.array(request.stop_ids, dtype="<u4").tobytes(),
        ignore_eos=request.ignore_eos,
        request_salt=request.extras.request_salt if request.extras else None,
    )


def write_progress(part: Part) -> prefill_pb2.Progress:
    usage = part.usage
    return prefill_pb2.Progress(
        token_ids=np.array(part.tokens, dtype="<u4").tobytes(),
        finish_reason=_REASONS[part.finished] if part.finished else None,
        usage=None
        if usage is None
        else prefill_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            queue_seconds=usage.queue_seconds,
            execution_seconds=usage.execution_seconds,
        ),
    )


def unpack(data: bytes, field: str) -> Uint32Array:
    """Token ids of a packed field."""
    if len(data) % _TOKEN_BYTES:
        raise ServiceError(
            Refusal.MALFORMED,
            f"{field} has {len(data)} bytes, expected a multiple of {_TOKEN_BYTES}; "
            "pack token ids as uint32, little-endian",
            field,
        )
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def require_model(asked: str, served: str) -> None:
    """ServiceError where a request names another model than the one that is served; empty names none."""
    if asked and asked != served:
        raise ServiceError(
            Refusal.MODEL,
            f"the model {asked!r} does not exist here; this worker serves {served!r}",
            "model",
        )


def _require_few(field: str, count: int, most: int) -> None:
    if count > most:
        raise ServiceError(
            Refusal.MALFORMED, f"{field} has a length of {count}, expected at most {most}; send fewer", field
        )


def _read_sampling(sampling: prefill_pb2.Sampling) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else None,
    )
