"""One batch of requests for one worker, in this process or in another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

from kvstore.block import TierName
from kvstore.events import BlocksRemoved, Event, RemovalCause, RequestSettled
from prefill.assemble import Worker
from prefill.errors import PrefillError
from prefill.request import Request, Result

ANSWER_TOKENS_MAX = 20
WORKER_SECONDS_MAX = 150.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of the demo: its id and token ids."""

    request_id: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Job:
    """What another process is to do: settings of its store, and prompts that arrive together."""

    model: str | None
    settings: dict[str, object]
    prompts: list[Prompt]

    @classmethod
    def read(cls, text: str) -> Job:
        fields = json.loads(text)
        prompts = [Prompt(**prompt) for prompt in fields.pop("prompts")]
        return cls(prompts=prompts, **fields)


@dataclass(slots=True)
class Counts:
    """A listener that keeps the sums of the demo. ``corrupt`` counts blocks."""

    asked: int = 0
    hit: dict[str, int] = field(default_factory=dict)
    corrupt: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSettled):
            self.asked += event.asked_tokens
            for tier, tokens in event.hit_tokens.items():
                self.hit[tier.value] = self.hit.get(tier.value, 0) + tokens
        elif isinstance(event, BlocksRemoved) and event.cause is RemovalCause.CORRUPT:
            self.corrupt += len(event.hashes) // 16

    def add(self, other: Counts) -> None:
        self.asked += other.asked
        for tier, tokens in other.hit.items():
            self.hit[tier] = self.hit.get(tier, 0) + tokens
        self.corrupt += other.corrupt


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch gave."""

    results: list[Result]
    counts: Counts


def run_batch(
    worker: Worker, prompts: list[Prompt], clock: Callable[[], float], *, reuse: bool
) -> list[Result]:
    """Run prompts that arrive at one moment; results in their order."""
    now = clock()
    return worker.engine.run(
        [
            Request(
                prompt.request_id,
                np.array(prompt.tokens, dtype=np.uint32),
                ANSWER_TOKENS_MAX,
                now,
                reuse=reuse,
            )
            for prompt in prompts
        ]
    )


def run_elsewhere(job: Job) -> Outcome:
    """Run a job in a new process, which has nothing in its own memory tiers."""
    command = [sys.executable, "-m", "prefill", "demo-worker"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asdict(job)),
            stdout=subprocess.PIPE,
            text=True,
            timeout=WORKER_SECONDS_MAX,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise PrefillError(
            f"the second worker ended with status {error.returncode}; its message is above"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PrefillError(
            f"the second worker has not ended after {WORKER_SECONDS_MAX:g} s; run the demo on a machine with "
            "less other work, or with a smaller model"
        ) from error
    return read_outcome(done.stdout)


def write_outcome(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome))


def read_outcome(text: str) -> Outcome:
    fields = json.loads(text)
    results = []
    for each in fields["results"]:
        cached = {TierName(tier): tokens for tier, tokens in each.pop("cached").items()}
        results.append(Result(**each, cached=cached))
    counts = fields["counts"]
    return Outcome(results, Counts(**counts))
