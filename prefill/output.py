"""What one step of the engine gave one request."""

from __future__ import annotations

from dataclasses import dataclass

from prefill.handoff import Handoff
from prefill.request import FinishReason, Result


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A token, an end, a handoff or an admission; a token may also be the end.

    ``result`` comes with ``finished`` STOP or LENGTH, ``error`` with ERROR. ``handoff`` is the only
    output of a request that was submitted with ``submit_prefill``. ``admitted`` is said once of a
    request that was resumed: its blocks are leased here, so the prefill side may let go of its own.
    """

    request_id: str
    token: int | None = None
    finished: FinishReason | None = None
    result: Result | None = None
    error: Exception | None = None
    handoff: Handoff | None = None
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step of the model did. ``flops`` are the operations that its matrix products take.

    ``outputs`` are those of the step, ``preempted`` requests lost their memory since the one before.
    ``running`` requests have memory after it, ``waiting`` ones have none.
    """

    seconds: float
    prompt_tokens: int
    decode_tokens: int
    flops: int
    preempted: int
    running: int
    waiting: int
    outputs: tuple[StepOutput, ...]
