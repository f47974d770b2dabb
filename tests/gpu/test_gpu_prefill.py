"""The prefill engine on a GPU: a cached prefix gives the tokens that computing it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvstore.block import TierName
from prefill.model import load_model
from tests.support.models import save_tiny_model, tiny_config
from tests.support.workers import (
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    empty,
    make_worker,
    prompt_of,
    request_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tier", [TierName.DEVICE, TierName.HOST])
def test_a_hit_equals_a_miss(tmp_path: Path, dtype: torch.dtype, tier: TierName) -> None:
    folder = save_tiny_model(tiny_config("llama", eos_token_id=None), tmp_path / "model")
    loaded = load_model(str(folder), dtype=dtype, device="cuda", cache_dir=tmp_path)
    prompt = prompt_of(100)
    with make_worker(loaded, WorkerOptions(device="cuda")) as worker:
        cold = answer(worker.engine, request_of("cold", prompt, 6))
        assert worker.store.drain(10.0)
        if tier is TierName.HOST:
            empty(device_of(worker))
        warm = answer(worker.engine, request_of("warm", prompt, 6))
        assert warm.cached == {tier: 96}
        assert warm.tokens == cold.tokens
        assert_quiet(worker)
