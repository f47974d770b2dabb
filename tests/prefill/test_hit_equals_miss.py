"""A cached prefix changes nothing: engine runs from each tier against transformers' own full forward.

Case 10 of what users of such systems run into (tenstorrent/vllm #415, omlx #2255, kvcached #446), and
13: only whole blocks, and a prompt that is cached completely still computes its last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvstore.block import TierName
from prefill.assemble import Worker
from prefill.model import LoadedModel
from prefill.plan import usable_blocks
from tests.support.models import ARCHITECTURES, plain_model
from tests.support.valkey import ValkeyServer, shared_valkey
from tests.support.workers import (
    BLOCK_SIZE,
    ModelWatch,
    Tokens,
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    empty,
    evict_blocks,
    load_tiny,
    make_worker,
    prompt_of,
    ready_blocks,
    request_of,
    resident,
    run_in_pieces,
    watch,
)

__all__ = ["shared_valkey"]

NEW_TOKENS = 6
LOGIT_TOLERANCE = 1e-4
# One token past two blocks, a tail of two, whole blocks, and more blocks than one.
LENGTHS = (33, 34, 48, 100)
TIERS = (TierName.DEVICE, TierName.HOST, TierName.REDIS)


@dataclass
class Bench:
    """One architecture: a worker whose redis outlives its memory, and the model without any cache."""

    worker: Worker
    loaded: LoadedModel
    plain: PreTrainedModel
    seen: ModelWatch

    def fill(self, prefix: Tokens, tier: TierName) -> None:
        """Have whole blocks computed by a request of their own, and leave them in one tier and below."""
        answer(self.worker.engine, request_of("filler", prefix, 1))
        assert self.worker.store.drain(10.0)
        if tier is not TierName.DEVICE:
            empty(device_of(self.worker))
        if tier is TierName.REDIS:
            empty(self.worker.tiers.host)

    @torch.inference_mode()
    def expected(self, prompt: Tokens) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the logits that chose them, with all of the prompt computed each time."""
        tokens = prompt.astype(np.int64)
        rows = []
        for _ in range(NEW_TOKENS):
            output = self.plain(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
            rows.append(output.logits[0, -1])
            tokens = np.append(tokens, int(rows[-1].argmax()))
        return tokens[len(prompt) :].tolist(), torch.stack(rows)

    def check(self, prompt: Tokens, cached: dict[TierName, int]) -> None:
        """Answer with the cache as it is: exactly ``cached`` tokens are hits, and nothing else differs."""
        tokens, logits = self.expected(prompt)
        self.seen.clear()
        result = answer(self.worker.engine, request_of("asked", prompt, NEW_TOKENS))
        assert result.cached == cached
        computed = len(prompt) - sum(cached.values())
        assert result.computed_tokens == computed
        assert self.seen.tokens == [computed] + [1] * (NEW_TOKENS - 1)
        assert result.tokens == tokens
        torch.testing.assert_close(self.seen.rows(), logits, atol=LOGIT_TOLERANCE, rtol=0)
        assert_quiet(self.worker)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bench(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shared_valkey: ValkeyServer,
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("models")
    loaded = load_tiny(request.param, folder)
    plain = plain_model(folder / f"{request.param}-2026")
    with (
        make_worker(loaded, WorkerOptions(redis_url=shared_valkey.url)) as worker,
        watch(loaded.model) as seen,
    ):
        yield Bench(worker, loaded, plain, seen)


@pytest.mark.redis
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cut", ["one block", "all usable blocks"])
def test_a_hit_gives_the_tokens_and_logits_of_a_miss(
    bench: Bench, cut: str, length: int, tier: TierName
) -> None:
    prompt = prompt_of(length, seed=TIERS.index(tier) + 3 * (cut == "one block"))
    blocks = 1 if cut == "one block" else usable_blocks(length, BLOCK_SIZE)
    bench.fill(prompt[: blocks * BLOCK_SIZE], tier)
    bench.check(prompt, {tier: blocks * BLOCK_SIZE})


@pytest.mark.redis
@pytest.mark.parametrize("length", LENGTHS)
def test_a_miss(bench: Bench, length: int) -> None:
    bench.check(prompt_of(length, seed=10), {})


@pytest.mark.redis
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_again(bench: Bench, length: int, tier: TierName) -> None:
    """Of a prompt that is whole blocks the last one is cached too, and yet computed again for its logits."""
    prompt = prompt_of(length, seed=20 + TIERS.index(tier))
    bench.fill(prompt, tier)
    assert resident(bench.worker, prompt)[tier] == length // BLOCK_SIZE
    bench.check(prompt, {tier: usable_blocks(length, BLOCK_SIZE) * BLOCK_SIZE})
    bench.check(prompt, {TierName.DEVICE: usable_blocks(length, BLOCK_SIZE) * BLOCK_SIZE})


@pytest.mark.redis
def test_one_prompt_from_all_tiers(bench: Bench) -> None:
    """Each block comes from the fastest tier that has it."""
    prompt = prompt_of(100, seed=30)
    bench.fill(prompt, TierName.DEVICE)
    for tier, blocks in ((device_of(bench.worker), 4), (bench.worker.tiers.host, 2)):
        others = ready_blocks(tier) - 6
        evict_blocks(tier, others + blocks)
    assert resident(bench.worker, prompt) == {TierName.DEVICE: 2, TierName.HOST: 4, TierName.REDIS: 6}
    thirds = 2 * BLOCK_SIZE
    bench.check(prompt, {TierName.DEVICE: thirds, TierName.HOST: thirds, TierName.REDIS: thirds})


@pytest.mark.redis
@pytest.mark.parametrize("length", LENGTHS)
def test_another_workers_blocks(bench: Bench, shared_valkey: ValkeyServer, length: int) -> None:
    """A new process knows nothing but the tokens: namespace and hashes are the same everywhere."""
    prompt = prompt_of(length, seed=40)
    bench.fill(prompt, TierName.DEVICE)
    with make_worker(bench.loaded, WorkerOptions(redis_url=shared_valkey.url)) as fresh:
        other = Bench(fresh, bench.loaded, bench.plain, bench.seen)
        other.check(prompt, {TierName.REDIS: usable_blocks(length, BLOCK_SIZE) * BLOCK_SIZE})


@pytest.mark.redis
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_against_the_same_cut(
    tmp_path: Path,
    shared_valkey: ValkeyServer,
    architecture: str,
    tier: TierName,
) -> None:
    """A hit gives the bits of a run that has no cache and is cut in the same place.

    bfloat16 sums round differently in batches of another size: a prompt in one piece and the same
    prompt in two pieces differ, with or without a cache. A hit is a run in two pieces.
    """
    loaded = load_tiny(architecture, tmp_path, dtype=torch.bfloat16)
    prompt, cut = prompt_of(100, seed=50 + TIERS.index(tier)), 64
    with (
        make_worker(loaded, WorkerOptions(redis_url=shared_valkey.url)) as worker,
        watch(loaded.model) as seen,
    ):
        tokens = run_in_pieces(loaded, prompt, cut, NEW_TOKENS)
        expected = seen.rows()[1:]
        Bench(worker, loaded, loaded.model, seen).fill(prompt[:cut], tier)
        seen.clear()
        result = answer(worker.engine, request_of("asked", prompt, NEW_TOKENS))
        assert result.cached == {tier: cut}
        assert torch.equal(seen.rows(), expected)
        assert result.tokens == tokens
        assert_quiet(worker)
