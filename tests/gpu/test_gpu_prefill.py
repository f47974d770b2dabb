"""The prefill engine on a GPU: a cached prefix gives the tokens that computing it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvstore.block import TierName
from prefill.model import load_model
from prefill.varlen import Way, varlen_on
from tests.support.models import save_tiny_model, tiny_config
from tests.support.varlen import packed_batch, shape_of
from tests.support.workers import (
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    empty,
    make_worker,
    prompt_of,
    request_of,
    run_in_pieces,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

PARTS = {
    "fresh": [(0, 40), (0, 1), (0, 300)],
    "decode": [(300, 1), (5, 1), (255, 1), (512, 1)],
    "mixed": [(0, 70), (513, 30), (255, 1), (256, 200), (100, 3)],
    # One mask for both, 536 wide: the second span's part of it begins at no multiple of 16 bytes.
    "uneven": [(488, 24), (100, 5)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tier", [TierName.DEVICE, TierName.HOST])
def test_a_hit_equals_a_miss(tmp_path: Path, dtype: torch.dtype, tier: TierName) -> None:
    """Cut where the cache ends, which is what decides how bfloat16 rounds."""
    folder = save_tiny_model(tiny_config("llama", eos_token_id=None), tmp_path / "model")
    loaded = load_model(str(folder), dtype=dtype, device="cuda", cache_dir=tmp_path)
    prompt, cut = prompt_of(100), 96
    expected = run_in_pieces(loaded, prompt, cut, 6)
    with make_worker(loaded, WorkerOptions(device="cuda")) as worker:
        answer(worker.engine, request_of("filler", prompt[:cut], 1))
        assert worker.store.drain(10.0)
        if tier is TierName.HOST:
            empty(device_of(worker))
        warm = answer(worker.engine, request_of("warm", prompt, 6))
        assert warm.cached == {tier: cut}
        assert warm.tokens == expected
        assert_quiet(worker)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("block_size", "way"), [(16, Way.GATHERED), (256, Way.PAGED)], ids=str)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("heads", [(2, 1, 64), (2, 4, 128)], ids=["plain", "grouped"])
def test_torchs_kernel_attends_as_calls_for_each_span_do(
    heads: tuple[int, int, int],
    parts: list[tuple[int, int]],
    block_size: int,
    way: Way,
    dtype: torch.dtype,
) -> None:
    """What is in no span's blocks is NaN."""
    batch = packed_batch(shape_of(*heads, dtype), block_size, parts, device="cuda")
    varlen = varlen_on(batch.memory)
    assert varlen is not None, "this torch or this GPU has no variable-length attention over pages"
    assert varlen.way is way
    torch.testing.assert_close(batch.attend(varlen), batch.attend(None), atol=0.02, rtol=0.02)
