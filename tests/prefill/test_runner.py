"""A cached prefix changes nothing: logits of paged steps against transformers' own full forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from prefill.errors import PromptError
from prefill.model import load_model
from prefill.paged import SLOT_ALIGN_BYTES, BlockTable, KVMemory
from prefill.runner import Runner, Span
from prefill.spans import PackedSpan, SpanBySpan
from prefill.spec import ModelSpec
from prefill.varlen import Varlen, Way
from tests.support.models import (
    ARCHITECTURES,
    MAX_POSITIONS,
    VOCAB_SIZE,
    plain_model,
    save_tiny_model,
    tiny_config,
)
from tests.support.varlen import plain_varlen
from tests.support.workers import one_thread

GREEDY_TOKENS = 16
LOGIT_TOLERANCE = 1e-4
BLOCK_SIZES = (16, 7)
# A prompt that ends inside a block for both block sizes, and one that is whole blocks of both.
PROMPT_LENGTHS = (34, 112)

Tokens = NDArray[np.int64]


def random_tokens(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng([seed, length]).integers(0, VOCAB_SIZE, length)


@dataclass
class Subject:
    """One architecture: the runner's model, and transformers' own as the reference."""

    folder: Path
    model: PreTrainedModel
    plain: PreTrainedModel
    spec: ModelSpec
    greedy: dict[bytes, tuple[list[int], torch.Tensor]] = field(default_factory=dict)

    @torch.inference_mode()
    def plain_logits(self, tokens: Tokens) -> torch.Tensor:
        output = self.plain(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def plain_greedy(self, prompt: Tokens) -> tuple[list[int], torch.Tensor]:
        """Tokens after the prompt and the logits of each step, with everything computed anew each time."""
        if prompt.tobytes() not in self.greedy:
            tokens, rows = prompt, []
            for _ in range(GREEDY_TOKENS):
                rows.append(self.plain_logits(tokens))
                tokens = np.append(tokens, int(rows[-1].argmax()))
            self.greedy[prompt.tobytes()] = tokens[len(prompt) :].tolist(), torch.stack(rows)
        return self.greedy[prompt.tobytes()]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = save_tiny_model(tiny_config(request.param), tmp_path_factory.mktemp(request.param) / "model")
    loaded = load_model(str(folder), dtype=torch.float32, device="cpu", cache_dir=folder)
    with one_thread():
        yield Subject(folder, loaded.model, plain_model(folder), loaded.spec)


class Paged:
    """A runner over a memory whose free slots are shuffled, unevenly spaced, and full of NaN."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        block_size: int,
        blocks: int = 40,
        varlen: Varlen | None = None,
    ) -> None:
        random = np.random.default_rng(blocks)
        slot = -(-spec.block_bytes(block_size) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        gaps = random.integers(0, 5, blocks) * SLOT_ALIGN_BYTES
        offsets = np.cumsum(gaps + slot) - slot
        self.memory_bytes = torch.full((int(offsets[-1]) + slot + 1,), 0xFF, dtype=torch.uint8)
        self.free = random.permutation(offsets).tolist()
        self.memory = KVMemory(self.memory_bytes, spec, block_size)
        self.runner = Runner(model, self.memory, varlen)

    def table(self, tokens: int) -> BlockTable:
        return BlockTable([self.free.pop() for _ in range(-(-tokens // self.memory.block_size))])

    def grow(self, table: BlockTable, tokens: int) -> None:
        missing = -(-tokens // self.memory.block_size) - len(table)
        table.extend([self.free.pop() for _ in range(missing)])

    def run(self, table: BlockTable, tokens: Tokens, start: int, stop: int) -> torch.Tensor:
        return self.runner.step([Span(table, start, tokens[start:stop])])[0]


def cuts_of(length: int, block_size: int) -> list[int]:
    """How much of a prompt is cached: nothing, one block, whole blocks at most, mid-block, all but one."""
    return sorted({0, block_size, (length - 1) // block_size * block_size, block_size + 3, length - 1})


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_any_cached_prefix_gives_the_plain_logits_and_tokens(
    subject: Subject, length: int, block_size: int
) -> None:
    prompt = random_tokens(length)
    expected_tokens, expected_logits = subject.plain_greedy(prompt)
    assert len(set(expected_tokens)) >= GREEDY_TOKENS // 2, "the model repeats itself: a weak test"
    for cut in cuts_of(length, block_size):
        paged = Paged(subject.model, subject.spec, block_size)
        table = paged.table(length)
        if cut:
            paged.run(table, prompt, 0, cut)
        tokens, rows, start = prompt, [], cut
        for _ in range(GREEDY_TOKENS):
            paged.grow(table, len(tokens))
            rows.append(paged.run(table, tokens, start, len(tokens)))
            start = len(tokens)
            tokens = np.append(tokens, int(rows[-1].argmax()))
        torch.testing.assert_close(torch.stack(rows), expected_logits, atol=LOGIT_TOLERANCE, rtol=0)
        assert tokens[length:].tolist() == expected_tokens, cut


@pytest.mark.parametrize("way", Way)
def test_a_mixed_batch_equals_separate_runs(subject: Subject, way: Way) -> None:
    """A fresh prompt, a chunk in the middle of a prompt, two decodes: one packed batch."""
    varlen = None if way is Way.SPANS else Varlen(plain_varlen, way)
    paged = Paged(subject.model, subject.spec, block_size=16, varlen=varlen)
    parts = [(0, 40), (33, 53), (50, 51), (17, 18)]
    prompts = [random_tokens(stop, seed) for seed, (_, stop) in enumerate(parts)]
    tables = [paged.table(stop) for _, stop in parts]
    for table, prompt, (start, _) in zip(tables, prompts, parts, strict=True):
        if start:
            paged.run(table, prompt, 0, start)
    spans = [
        Span(table, part[0], prompt[part[0] :])
        for table, prompt, part in zip(tables, prompts, parts, strict=True)
    ]
    logits = paged.runner.step(spans)
    expected = torch.stack([subject.plain_logits(prompt) for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("way", Way)
def test_a_span_may_build_on_another_one_of_the_same_step(subject: Subject, way: Way) -> None:
    """Two prompts share 20 tokens that nobody has computed; the second reads what the first writes."""
    varlen = None if way is Way.SPANS else Varlen(plain_varlen, way)
    paged = Paged(subject.model, subject.spec, block_size=10, varlen=varlen)
    first = random_tokens(31)
    second = np.concatenate([first[:20], random_tokens(9, seed=1)])
    table = paged.table(len(first))
    other = BlockTable([*table.offsets[:2].tolist(), paged.free.pop()])
    logits = paged.runner.step([Span(table, 0, first), Span(other, 20, second[20:])])
    expected = torch.stack([subject.plain_logits(first), subject.plain_logits(second)])
    torch.testing.assert_close(logits, expected, atol=LOGIT_TOLERANCE, rtol=0)


def test_a_long_chunk_over_history_is_tiled(subject: Subject) -> None:
    paged = Paged(subject.model, subject.spec, block_size=16, blocks=64)
    prompt = random_tokens(MAX_POSITIONS)
    table = paged.table(len(prompt))
    paged.run(table, prompt, 0, 100)
    logits = paged.run(table, prompt, 100, len(prompt))
    torch.testing.assert_close(logits, subject.plain_logits(prompt), atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_copied_elsewhere_give_the_same_bits(subject: Subject, dtype: torch.dtype) -> None:
    """A hit against a run without a cache that is cut the same way; the cut decides bfloat16's rounding."""
    loaded = load_model(str(subject.folder), dtype=dtype, device="cpu", cache_dir=subject.folder)
    prompt, cut = random_tokens(61), 48
    cold, warm = Paged(loaded.model, loaded.spec, 16), Paged(loaded.model, loaded.spec, 16, blocks=7)
    cold_table, warm_table = cold.table(len(prompt)), warm.table(len(prompt))
    cold.run(cold_table, prompt, 0, cut)
    for source, target in list(zip(cold_table.offsets, warm_table.offsets, strict=True))[: cut // 16]:
        warm.memory.block(int(target)).copy_(cold.memory.block(int(source)))
    expected = cold.run(cold_table, prompt, cut, len(prompt))
    assert not expected.isnan().any()
    assert torch.equal(warm.run(warm_table, prompt, cut, len(prompt)), expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_block_is_layer_plane_token_head_dimension(subject: Subject, block_size: int) -> None:
    """The payload that other processes read, against the cache that transformers keeps itself."""
    spec = subject.spec
    prompt = random_tokens(3 * block_size - 2)
    paged = Paged(subject.model, spec, block_size)
    table = paged.table(len(prompt))
    paged.run(table, prompt, 0, block_size + 1)
    paged.run(table, prompt, block_size + 1, len(prompt))
    with torch.inference_mode():
        cache = subject.plain(input_ids=torch.from_numpy(prompt)[None], use_cache=True).past_key_values
    own = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]).transpose(
        2, 3
    )
    shape = (spec.layers, 2, block_size, spec.kv_heads, spec.head_size)
    blocks = [paged.memory.block(int(offset)).view(torch.float32).view(shape) for offset in table.offsets]
    stored = torch.cat(blocks, dim=2)
    torch.testing.assert_close(stored[:, :, : len(prompt)], own, atol=LOGIT_TOLERANCE, rtol=0)
    assert stored[:, :, len(prompt) :].isnan().all(), "positions that were never computed were written"


def test_only_the_spans_own_blocks_are_written(subject: Subject) -> None:
    paged = Paged(subject.model, subject.spec, block_size=7)
    prompt = random_tokens(30)
    table = paged.table(len(prompt))
    paged.run(table, prompt, 0, 13)
    paged.run(table, prompt, 13, len(prompt))
    rest = paged.memory_bytes.clone()
    for offset in table.offsets.tolist():
        rest[offset : offset + paged.memory.block_bytes] = 0xFF
    assert (rest == 0xFF).all()


@pytest.mark.parametrize(
    ("start", "tokens", "value", "expectation"),
    [
        (0, [], "0 tokens", "at least 1"),
        (0, [5, VOCAB_SIZE], f"token id {VOCAB_SIZE}", f"0 to {VOCAB_SIZE - 1}"),
        (0, [5, -1], "token id -1", f"0 to {VOCAB_SIZE - 1}"),
        (MAX_POSITIONS - 1, [5, 6], f"{MAX_POSITIONS + 1} tokens", f"at most {MAX_POSITIONS}"),
    ],
    ids=["none", "id too high", "id negative", "beyond the context"],
)
def test_tokens_that_do_not_fit_the_model_are_refused(
    subject: Subject, start: int, tokens: list[int], value: str, expectation: str
) -> None:
    paged = Paged(subject.model, subject.spec, block_size=16, blocks=80)
    good = Span(paged.table(3), 0, random_tokens(3))
    bad = Span(paged.table(start + 2), start, np.array(tokens, dtype=np.int64))
    with pytest.raises(PromptError) as caught:
        paged.runner.step([good, bad])
    assert value in str(caught.value)
    assert expectation in str(caught.value)
    assert (paged.memory_bytes == 0xFF).all(), "a refused step has written something"


@pytest.mark.parametrize("keys", [5, 700, 20_000])
def test_mask_windows_are_lower_right_triangles(subject: Subject, keys: int) -> None:
    memory = Paged(subject.model, subject.spec, block_size=16, blocks=1).memory
    chunk = min(600, keys - 1)
    span = PackedSpan(0, chunk, keys - chunk, BlockTable([0] * -(-keys // 16)))
    step = SpanBySpan(memory, [span], [memory.rows(span.table, keys)])
    assert step.tile * keys <= 1 << 23
    for queries in {1, min(step.tile, chunk) // 2, min(step.tile, chunk)}:
        allowed = torch.ones(queries, keys).tril(keys - queries).bool()
        expected = torch.zeros(queries, keys).masked_fill(~allowed, float("-inf"))
        assert torch.equal(step.mask(queries, keys), expected)
