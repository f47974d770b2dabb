"""Prefill workers over tiny models, and a look at what goes through the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hashing import Extras
from kvstore.block import Chain, TierName
from kvstore.config import Config
from kvstore.events import Listener
from kvstore.spec import slot_bytes_for
from kvstore.table import SlotState
from kvstore.tiers.memory import MemoryTier
from prefill.assemble import Worker, build_worker
from prefill.engine import Engine, EngineOptions
from prefill.handoff import Handoff
from prefill.model import LoadedModel, load_model
from prefill.output import StepOutput
from prefill.paged import BlockTable, KVMemory
from prefill.plan import blocks_for
from prefill.request import FinishReason, Request, Result
from prefill.runner import Runner, Span
from tests.support.models import VOCAB_SIZE, save_tiny_model, tiny_config
from tests.support.stores import pool_folder

BLOCK_SIZE = 16
FIRST_TEXT_TOKEN = 2
"""Ids below are the models' begin and end tokens."""

Tokens = NDArray[np.uint32]


def prompt_of(length: int, seed: int = 0) -> Tokens:
    """Random tokens, the same for the same arguments; prompts of two seeds share no block."""
    random = np.random.default_rng([seed, length])
    return random.integers(FIRST_TEXT_TOKEN, VOCAB_SIZE, length).astype(np.uint32)


def load_tiny(
    architecture: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 2026
) -> LoadedModel:
    """A tiny model from a folder that is made at first use."""
    place = folder / f"{architecture}-{seed}"
    if not place.exists():
        # Nothing ends an answer but its length, so that answers can be compared token for token.
        save_tiny_model(tiny_config(architecture, eos_token_id=None), place, seed)
    return load_model(str(place), dtype=dtype, device="cpu", cache_dir=folder)


@dataclass(frozen=True)
class WorkerOptions:
    """Sizes are blocks of the worker's model; ``device_blocks`` is exact."""

    device_blocks: int = 64
    host_extents: int = 4
    extent_bytes: int = 2 << 20
    redis_url: str | None = None
    lease_seconds: float = 30.0
    device: str = "cpu"
    listeners: tuple[Listener, ...] = ()
    engine: EngineOptions = field(default_factory=EngineOptions)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, which wait for each other where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def make_worker(
    loaded: LoadedModel,
    options: WorkerOptions | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Worker]:
    """A worker with memory tiers of its own, closed at the end."""
    made = options or WorkerOptions()
    with one_thread(), pool_folder() as folder:
        config = Config(
            pool_path=folder / "pool",
            pool_bytes=made.host_extents * made.extent_bytes,
            extent_bytes=made.extent_bytes,
            device=made.device,
            device_bytes=made.device_blocks * slot_bytes_for(loaded.spec.block_bytes(BLOCK_SIZE)),
            block_size=BLOCK_SIZE,
            redis_url=made.redis_url,
            redis_probe_seconds=5.0,
            redis_acquire_seconds=10.0,
            lease_seconds=made.lease_seconds,
        )
        worker = build_worker(loaded, config, clock=clock, listeners=made.listeners, options=made.engine)
        try:
            yield worker
        finally:
            worker.close()


def request_of(
    request_id: str,
    tokens: Tokens,
    new: int = 6,
    *,
    extras: Extras | None = None,
    reuse: bool = True,
) -> Request:
    return Request(request_id, tokens, new, 0.0, extras, reuse)


def run_in_pieces(loaded: LoadedModel, prompt: Tokens, cut: int, new: int) -> list[int]:
    """Greedy tokens after [0, cut) and [cut, …) of a prompt, without a store."""
    blocks, slot = blocks_for(len(prompt) + new, BLOCK_SIZE), loaded.spec.block_bytes(BLOCK_SIZE)
    flat = torch.zeros(blocks * slot, dtype=torch.uint8, device=loaded.model.device)
    runner = Runner(loaded.model, KVMemory(flat, loaded.spec, BLOCK_SIZE))
    table = BlockTable(range(0, blocks * slot, slot))
    runner.step([Span(table, 0, prompt[:cut])])
    tokens, start = prompt, cut
    for _ in range(new):
        logits = runner.step([Span(table, start, tokens[start:])])
        start = len(tokens)
        tokens = np.append(tokens, np.uint32(logits.argmax().item()))
    return [int(token) for token in tokens[len(prompt) :]]


def answer(engine: Engine, request: Request) -> Result:
    [result] = engine.run([request])
    return result


def results_of(outputs: list[StepOutput]) -> dict[str, Result]:
    """Results by request id; an error is raised."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return {each.request_id: each.result for each in outputs if each.result is not None}


def work_off(engine: Engine) -> dict[str, Result]:
    """Step until nothing is left; results by request id. Every token must come once, and in order."""
    results: dict[str, Result] = {}
    tokens: dict[str, list[int]] = {}
    while not engine.idle:
        outputs = engine.step()
        results.update(results_of(outputs))
        for output in outputs:
            if output.token is not None:
                tokens.setdefault(output.request_id, []).append(output.token)
    for name, said in tokens.items():
        assert results[name].tokens[-len(said) :] == said
    return results


def hand_over(engine: Engine, request: Request) -> Handoff:
    """Prefill one request for another engine; what else runs goes on meanwhile, unheard."""
    engine.submit_prefill(request)
    while True:
        for output in engine.step():
            if output.request_id == request.request_id:
                assert (output.token, output.finished) == (
                    None,
                    None,
                ) or output.finished is FinishReason.ERROR
                if output.error is not None:
                    raise output.error
                assert output.handoff is not None
                return output.handoff


def empty(tier: MemoryTier) -> None:
    """Evict whatever a tier may evict."""
    for slot_class in tier.pool.extents.classes():
        tier.pool.evict(slot_class, tier.pool.extents.slots)


def evict_blocks(tier: MemoryTier, count: int) -> None:
    """Evict the least recently used leaves: of a single chain, its last blocks."""
    [slot_class] = tier.pool.extents.classes()
    assert tier.pool.evict(slot_class, count) == count


def ready_blocks(tier: MemoryTier) -> int:
    return int(np.count_nonzero(tier.pool.extents.state == SlotState.READY))


def device_of(worker: Worker) -> MemoryTier:
    device = worker.tiers.device
    assert device is not None
    return device


def resident(worker: Worker, tokens: Tokens, extras: Extras | None = None) -> dict[TierName, int]:
    """Blocks of a prompt's leading run in each tier alone."""
    chain = Chain.of(worker.spec.root, tokens, extras)
    alone = worker.store.lookup(chain, tiers=set(TierName)).alone
    return {tier: tokens // BLOCK_SIZE for tier, tokens in alone.items()}


def assert_quiet(worker: Worker) -> None:
    """Nothing is leased, staged or on its way, and the books of every pool balance."""
    assert worker.store.drain(10.0), "what was queued for redis did not get there"
    assert worker.engine.idle
    assert worker.store.leases == 0
    for usage in worker.store.usage().values():
        assert (usage.staged, usage.quarantined, usage.leased) == (0, 0, 0)
    worker.store.check()


@dataclass
class ModelWatch:
    """Every step of a model: tokens that went in, logits (spans, vocab) that came out."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def clear(self) -> None:
        self.tokens.clear()
        self.logits.clear()

    def rows(self, span: int = 0) -> torch.Tensor:
        """Logits of one span in every step: (steps, vocab)."""
        return torch.stack([each[span] for each in self.logits])


@contextmanager
def watch(model: PreTrainedModel) -> Iterator[ModelWatch]:
    """Look at a model's steps while the real ones run."""
    seen = ModelWatch()

    def after(_module: object, _arguments: Sequence[Any], named: dict[str, Any], output: Any) -> None:
        seen.tokens.append(int(named["input_ids"].numel()))
        seen.logits.append(output.logits[0].float().clone())

    handle = model.register_forward_hook(after, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
