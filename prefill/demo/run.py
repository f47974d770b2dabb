"""The demo: conversations, a second process, a damaged block, and all of it again without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvstore.block import WHOLE, Chain
from kvstore.config import Config, mask_url
from kvstore.errors import TierError
from kvstore.spec import slot_bytes_for
from prefill.assemble import Worker, build_worker, namespace_of
from prefill.demo.job import ANSWER_TOKENS_MAX, Counts, Job, Prompt, run_batch, run_elsewhere
from prefill.demo.sabotage import flip_last_byte
from prefill.demo.workload import FIRST_TURNS, Conversation, start_conversations
from prefill.model import LoadedModel
from prefill.plan import blocks_for, usable_blocks
from prefill.request import Result

ONE_PROCESS, NEW_PROCESS, BYTE_FLIPPED = PHASES = ("one process", "new process", "byte flipped")
DRAIN_SECONDS_MAX = 30.0
SPARE_BLOCKS = 16
"""Device room beside the first prompt: less than three conversations, so that some go to the host."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request, run with the cache and without."""

    phase: str
    warm: Result
    cold: Result

    @property
    def identical(self) -> bool:
        return self.warm.tokens == self.cold.tokens


@dataclass(slots=True)
class Outcome:
    """Everything that the demo saw."""

    rows: list[Row] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demo runs: a model, a folder, settings with a Redis, a clock and a place to tell progress.

    ``device_bytes`` None means that the demo chooses them.
    """

    model: LoadedModel
    model_name: str | None
    pools: Path
    config: Config
    device_bytes: int | None
    clock: Callable[[], float]
    tell: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that arrive together, and what the cached run answered."""

    phase: str
    prompts: list[Prompt]
    results: list[Result]


def run_demo(stage: Stage) -> Outcome:
    """Run all parts. Raises what the parts raise; nothing of it is made up."""
    outcome = Outcome()
    conversations = start_conversations(stage.model.tokenizer)
    batches = _converse(stage, conversations, outcome.counts)
    batches += _continue_elsewhere(stage, conversations, outcome.counts)
    for batch, cold in zip(batches, _without_cache(stage, batches), strict=True):
        outcome.rows += [
            Row(batch.phase, warm, without) for warm, without in zip(batch.results, cold, strict=True)
        ]
    return outcome


def _converse(stage: Stage, conversations: list[Conversation], counts: Counts) -> list[Batch]:
    first = [_prompt(conversation, 0) for conversation in conversations]
    config = _settings(stage, "first.pool", first, redis=True)
    batches: list[Batch] = []
    worker = build_worker(stage.model, config, clock=stage.clock, listeners=(counts,))
    try:
        for turn in range(FIRST_TURNS):
            stage.tell(f"turn {turn + 1}")
            prompts = first if turn == 0 else [_prompt(each, turn) for each in conversations]
            results = run_batch(worker, prompts, stage.clock, reuse=True)
            for conversation, result in zip(conversations, results, strict=True):
                conversation.answer(result.tokens)
            batches.append(Batch(ONE_PROCESS, prompts, results))
        if not worker.store.drain(DRAIN_SECONDS_MAX):
            place = mask_url(str(config.redis_url))
            raise TierError(
                f"Redis at {place} has not taken all blocks after {DRAIN_SECONDS_MAX:g} s, expected all "
                "within a few; use a server that is nearer or less busy"
            )
    finally:
        worker.close(remove_pool=True)
    return batches


def _continue_elsewhere(stage: Stage, conversations: list[Conversation], counts: Counts) -> list[Batch]:
    prompts = [_prompt(conversation, FIRST_TURNS) for conversation in conversations]
    stage.tell("a new process, empty memory")
    fresh = run_elsewhere(_job(stage, "second.pool", prompts))
    counts.add(fresh.counts)
    batches = [Batch(NEW_PROCESS, prompts, fresh.results)]
    damaged = replace(prompts[0], request_id=f"{prompts[0].request_id}-again")
    if not _damage(stage, damaged):
        stage.tell("no block in Redis to damage: that part is left out")
        return batches
    stage.tell("one byte flipped in Redis")
    again = run_elsewhere(_job(stage, "third.pool", [damaged]))
    counts.add(again.counts)
    return [*batches, Batch(BYTE_FLIPPED, [damaged], again.results)]


def _without_cache(stage: Stage, batches: list[Batch]) -> list[list[Result]]:
    every = [prompt for batch in batches for prompt in batch.prompts]
    config = _settings(stage, "cold.pool", every, redis=False)
    worker = build_worker(stage.model, config, clock=stage.clock)
    try:
        return [_run_cold(stage, worker, batch) for batch in batches]
    finally:
        worker.close(remove_pool=True)


def _run_cold(stage: Stage, worker: Worker, batch: Batch) -> list[Result]:
    stage.tell(f"without cache: {batch.phase}")
    return run_batch(worker, batch.prompts, stage.clock, reuse=False)


def _damage(stage: Stage, prompt: Prompt) -> bool:
    """Flip a byte half-way, so that a shorter prefix is still good; False where Redis has no block."""
    if stage.config.redis_url is None:
        return False
    root = namespace_of(stage.model.spec, stage.config).root()
    chain = Chain.of(root, np.array(prompt.tokens, dtype=np.uint32))
    middle = usable_blocks(len(prompt.tokens), root.block_size) // 2
    row, prefix = chain.rows(WHOLE, middle, middle + 1), stage.config.redis_prefix
    return flip_last_byte(stage.config.redis_url, prefix, row, stage.clock)


def _job(stage: Stage, pool: str, prompts: list[Prompt]) -> Job:
    config = _settings(stage, pool, prompts, redis=True)
    # All of it: the other process must not find a setting of its own.
    settings = {**config.model_dump(mode="json"), "redis_url": config.redis_url or "none"}
    return Job(stage.model_name, settings, prompts)


def _settings(stage: Stage, pool: str, prompts: list[Prompt], *, redis: bool) -> Config:
    size = stage.config.block_size
    longest = max(len(prompt.tokens) for prompt in prompts) + ANSWER_TOKENS_MAX
    blocks = blocks_for(longest, size) + SPARE_BLOCKS
    return stage.config.model_copy(
        update={
            "pool_path": stage.pools / pool,
            "redis_url": stage.config.redis_url if redis else None,
            "device_bytes": stage.device_bytes or blocks * slot_bytes_for(stage.model.spec.block_bytes(size)),
        }
    )


def _prompt(conversation: Conversation, turn: int) -> Prompt:
    return Prompt(f"{conversation.user}-{turn + 1}", conversation.ask(turn).tolist())
