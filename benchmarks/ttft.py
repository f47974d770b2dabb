"""What does a cached prefix do to the time to first token, by the tier that it comes from?

A prompt of n tokens is in the cache; a request for it and 64 more is timed. *Floor* is the model step
over those 64 tokens alone, with the history in place already: nothing looked up, leased or copied.
*Cold* is the same request without the cache. Every request's first token is compared with the cold
one's. `--stock` also times transformers' own forward over a DynamicCache that holds the history.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from report import Report, parser
from transformers import DynamicCache

from kvstore.block import WHOLE, Chain, SlotArray, TierName
from kvstore.settings import load_config
from kvstore.tiers.redis_embedded import EmbeddedRedis
from prefill.assemble import Worker, build_worker
from prefill.model import LoadedModel, load_model
from prefill.paged import BlockTable
from prefill.plan import blocks_for
from prefill.request import Request, Result
from prefill.runner import Span

PROMPTS = (512, 2048, 6144)
SUFFIX = 64
GOALS = {TierName.DEVICE: 1.25, TierName.HOST: 1.25, TierName.REDIS: 1.5}


@dataclass(frozen=True)
class Bench:
    """A worker with one cached prompt, and what is asked of it."""

    worker: Worker
    loaded: LoadedModel
    prefix: np.ndarray

    def run(self, name: str, suffix: np.ndarray, *, reuse: bool) -> Result:
        tokens = np.concatenate((self.prefix, suffix))
        [result] = self.worker.engine.run([Request(name, tokens, 1, time.monotonic(), reuse=reuse)])
        return result


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    arguments.add_argument("--stock", action="store_true", help="time transformers' own forward too")
    options = arguments.parse_args()
    report = Report("ttft", ("torch", "transformers", "redis"))
    cache = Path.home() / ".cache" / "prefix-kvstore"
    loaded = load_model(None, dtype=getattr(torch, options.dtype), device="cpu", cache_dir=cache)
    server = EmbeddedRedis.start()
    try:
        for length in options.prompts:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                worker = open_worker(loaded, Path(folder) / "pool", server.url, length)
                try:
                    measure(report, worker, loaded, length, options.rounds, stock=options.stock)
                finally:
                    worker.close()
    finally:
        server.close()
    report.finish(json=options.json)


def open_worker(loaded: LoadedModel, pool: Path, url: str, length: int) -> Worker:
    block = loaded.spec.block_bytes(16)
    room = (blocks_for(length + SUFFIX, 16) + 16) * block
    config = load_config(
        environ={},
        overrides={
            "pool_path": str(pool),
            "pool_bytes": max(128 << 20, -(-room // (64 << 20)) * (64 << 20) + (64 << 20)),
            "device_bytes": room,
            "redis_url": url,
            "redis_queue_bytes": 1 << 30,
            "redis_acquire_seconds": 30.0,
        },
    )
    return build_worker(loaded, config.config, clock=time.monotonic)


def measure(
    report: Report, worker: Worker, loaded: LoadedModel, length: int, rounds: int, *, stock: bool
) -> None:
    """Time one prompt length in every case, taking turns."""
    rng = np.random.default_rng(length)
    prefix = rng.integers(0, loaded.spec.vocab_size, length).astype(np.uint32)
    suffixes = [rng.integers(0, loaded.spec.vocab_size, SUFFIX).astype(np.uint32) for _ in range(rounds + 1)]
    bench = Bench(worker, loaded, prefix)
    bench.run("fill", prefix[:1], reuse=True)
    assert worker.store.drain(60.0), "Redis did not take the blocks"
    cold = bench.run("cold", suffixes[0], reuse=False)
    # The cold run took device memory: bring the prefix back.
    bench.run("return", prefix[:1], reuse=True)
    seconds: dict[str, list[float]] = {"floor": [], **{tier: [] for tier in GOALS}}
    cache = stock_cache(loaded, prefix) if stock else None
    for number, suffix in enumerate(suffixes):
        first_tokens = set()
        if cache is not None:
            seconds.setdefault("stock", []).append(stock_seconds(loaded, cache, length, suffix))
        for tier in GOALS:
            empty_above(worker, tier)
            result = bench.run(f"{tier}-{number}", suffix, reuse=True)
            assert result.cached.get(tier, 0) == length, (tier, result.cached)
            seconds[tier].append(result.ttft_seconds)
            first_tokens.add(result.tokens[0])
            forget_suffix(worker, bench, suffix)
        took, token = floor_step(bench, suffix)
        seconds["floor"].append(took)
        first_tokens.add(token)
        if number == 0:
            first_tokens.add(cold.tokens[0])
        assert len(first_tokens) == 1, f"first tokens differ: {first_tokens}"
    medians = {case: statistics.median(samples[1:]) for case, samples in seconds.items()}
    report.result(
        prompt_tokens=length,
        suffix_tokens=SUFFIX,
        dtype=loaded.spec.kv_dtype,
        cached_mib=round(length * loaded.spec.block_bytes(16) / 16 / 2**20, 1),
        cold_ms=cold.ttft_seconds * 1e3,
        **{f"{case}_ms": value * 1e3 for case, value in medians.items()},
    )
    for tier, limit in GOALS.items():
        ratio = medians[tier] / medians["floor"]
        report.goal(f"{tier} over floor at {length} tokens", ratio, at_most=limit)


def empty_above(worker: Worker, tier: TierName) -> None:
    """Evict everything from the tiers that are faster than ``tier``."""
    for faster in worker.tiers.memory:
        if faster.name is tier:
            return
        for slot_class in faster.pool.extents.classes():
            faster.pool.evict(slot_class, 1 << 40)


def forget_suffix(worker: Worker, bench: Bench, suffix: np.ndarray) -> None:
    """Drop the blocks that the last request added, so that the next tier starts from the same prefix."""
    assert worker.store.drain(60.0)
    chain = Chain.of(worker.spec.root, np.concatenate((bench.prefix, suffix)))
    rows = chain.rows(WHOLE, len(bench.prefix) // worker.spec.block_size)
    for tier in (*worker.tiers.memory, worker.tiers.remote):
        tier.discard(rows, time.monotonic() + 10.0)


def floor_step(bench: Bench, suffix: np.ndarray) -> tuple[float, int]:
    """Seconds of the model step over the suffix, its history in place, and the first token."""
    worker = bench.worker
    store = worker.store
    lease = store.acquire("floor", Chain.of(worker.spec.root, bench.prefix))
    store.wait(lease, 30.0)
    assert store.promote(lease) * worker.spec.block_size == len(bench.prefix)
    own = store.reserve(worker.spec.root.digest, blocks_for(SUFFIX, worker.spec.block_size))
    held: list[SlotArray] = [segment.slots for segment in lease.segments[WHOLE]]
    table = BlockTable(store.offsets(np.concatenate([*held, own])).tolist())
    span = Span(table, len(bench.prefix), suffix)
    started = time.perf_counter()
    token = int(worker.runner.step([span]).argmax())
    took = time.perf_counter() - started
    store.unreserve(own)
    store.release(lease)
    return took, token


@torch.inference_mode()
def stock_cache(loaded: LoadedModel, prefix: np.ndarray) -> DynamicCache:
    """The cache of transformers itself, filled with the prefix."""
    loaded.model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=loaded.model.config)
    loaded.model(input_ids=as_batch(prefix), past_key_values=cache, logits_to_keep=1)
    loaded.model.set_attn_implementation("prefix_kv_paged")
    return cache


@torch.inference_mode()
def stock_seconds(loaded: LoadedModel, cache: DynamicCache, length: int, suffix: np.ndarray) -> float:
    """Seconds of transformers' own forward over the suffix."""
    loaded.model.set_attn_implementation("sdpa")
    started = time.perf_counter()
    loaded.model(input_ids=as_batch(suffix), past_key_values=cache, logits_to_keep=1)
    took = time.perf_counter() - started
    cache.crop(length - cache.get_seq_length())
    loaded.model.set_attn_implementation("prefix_kv_paged")
    return took


def as_batch(tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0)


if __name__ == "__main__":
    main()
