"""A prefill worker over the packaged model, with enough memory, for the benchmarks of the engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.settings import load_config
from prefill.assemble import Worker, build_worker
from prefill.engine import Engine, EngineOptions
from prefill.model import LoadedModel, load_model
from prefill.plan import blocks_for
from prefill.request import Request

BLOCK_SIZE = 16
_HOST_BYTES = 512 << 20


def load_packaged(dtype: str = "float32") -> LoadedModel:
    cache = Path.home() / ".cache" / "prefix-kvstore"
    return load_model(None, dtype=getattr(torch, dtype), device="cpu", cache_dir=cache)


@contextmanager
def open_worker(loaded: LoadedModel, tokens: int) -> Iterator[Worker]:
    """A worker whose device memory holds ``tokens`` tokens, without redis."""
    room = blocks_for(tokens, BLOCK_SIZE) * loaded.spec.block_bytes(BLOCK_SIZE)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        overrides = {
            "pool_path": str(Path(folder) / "pool"),
            "pool_bytes": _HOST_BYTES,
            "device_bytes": room,
            "redis_url": "none",
        }
        config = load_config(environ={}, overrides=overrides).config
        worker = build_worker(loaded, config, clock=time.perf_counter)
        try:
            yield worker
        finally:
            worker.close()


def engine_of(worker: Worker, options: EngineOptions) -> Engine:
    """Another engine over the worker's model and store."""
    parts = (worker.runner, worker.memory, worker.store, worker.spec.root)
    return Engine(*parts, clock=time.perf_counter, options=options)


class Prompts:
    """Random tokens and requests for them, the same for the same seed."""

    def __init__(self, loaded: LoadedModel, *seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab = loaded.spec.vocab_size

    def tokens(self, length: int) -> NDArray[np.uint32]:
        return self._random.integers(0, self._vocab, length).astype(np.uint32)

    def request(self, name: str, tokens: NDArray[np.uint32], new: int, *, reuse: bool = False) -> Request:
        """It arrives now, and its answer has ``new`` tokens whatever they are."""
        return Request(name, tokens, new, time.perf_counter(), reuse=reuse, ignore_eos=True)
