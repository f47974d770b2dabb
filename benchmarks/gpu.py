"""How near to a GPU's own limits blocks move, and what a cached prefix is worth there.

Each path stands beside a plain copy of the same bytes on the same machine in the same run: gather and
scatter beside a device-to-device copy, transfers beside pinned ones. A rate counts each byte once.
Bytes are compared before they are timed.

    PYTHONPATH=. python benchmarks/gpu.py --json
"""

import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Report, parser
from transformers import AutoConfig, AutoModelForCausalLM

from kvstore.config import Config
from kvstore.tiers.device_copy import PagedBlocks
from kvstore.tiers.device_mover import mover_for
from kvstore.tiers.device_pin import pinned_pool
from kvstore.tiers.device_transfer import Transfers
from prefill.assemble import Worker, build_worker
from prefill.model import load_model
from prefill.request import Request

ROUNDS = 15
LAYERS, TOKENS, ROW_BYTES, BLOCKS = 32, 16, 4096, 2048
"""The cache of an 8 B model with 8 KV heads of 128 in bfloat16: 2 MiB a block, 4 GiB in all."""
MOVED = 1024
STAGING_BYTES = 256 * 2**20
LENGTHS = (8192, 32768)
CACHED = 0.95


def seconds(run: Callable[[], object]) -> float:
    """Median of ``run`` and of what it has asked of the device, after warming up."""
    samples = []
    for _ in range(ROUNDS + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[3:])


def copies(report: Report) -> None:
    rows = [
        torch.randint(0, 256, (BLOCKS, TOKENS * ROW_BYTES), dtype=torch.uint8, device="cuda")
        for _ in range(LAYERS)
    ]
    paged = PagedBlocks(rows)
    block_ids = np.random.default_rng(1).permutation(BLOCKS)[:MOVED].astype(np.int64)
    total = MOVED * paged.payload_bytes
    flat = torch.empty(total, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(flat)
    everything = mover_for(paged, staging_bytes=total)
    report.result(mover=type(everything).__name__)
    layers = (0, paged.layers)
    plain = seconds(lambda: other.copy_(flat))
    gather = seconds(lambda: everything.gather(layers, block_ids, everything.staging[:MOVED]))
    scatter = seconds(lambda: everything.scatter(layers, block_ids, everything.staging[:MOVED]))
    for name, taken in (("device copy", plain), ("gather", gather), ("scatter", scatter)):
        report.result(path=name, gib_a_second=total / taken / 2**30, of_plain=plain / taken)
    report.goal("gather over a device copy", plain / gather, at_least=0.85)
    report.goal("scatter over a device copy", plain / scatter, at_least=0.85)
    transfers_of(report, paged, block_ids, flat)


def transfers_of(report: Report, paged: PagedBlocks, block_ids: np.ndarray, flat: torch.Tensor) -> None:
    total = MOVED * paged.payload_bytes
    memory = np.frombuffer(mmap.mmap(-1, total), dtype=np.uint8)
    with pinned_pool(memory, paged.device) as is_pinned:
        assert is_pinned, "the pool cannot be pinned: raise ulimit -l"
        host = torch.from_numpy(memory)
        order = np.random.default_rng(2).permutation(MOVED).astype(np.int64)
        slots = memory.ctypes.data + order * paged.payload_bytes
        moves = Transfers(paged, mover_for(paged, staging_bytes=STAGING_BYTES))
        moves.wait(moves.save(block_ids, slots))
        first = memory[int(order[0]) * paged.payload_bytes :][: paged.payload_bytes]
        expected = torch.cat([rows[int(block_ids[0])] for rows in paged.rows]).cpu().numpy()
        assert (first == expected).all(), "the bytes differ"
        plain_down = seconds(lambda: host.copy_(flat, non_blocking=True))
        plain_up = seconds(lambda: flat.copy_(host, non_blocking=True))
        down = seconds(lambda: moves.wait(moves.save(block_ids, slots)))
        up = seconds(lambda: moves.wait(moves.load(slots, block_ids)[-1][1]))
        grouped = seconds(lambda: moves.wait(moves.load(slots, block_ids, groups=8)[-1][1]))
    table = (
        ("pinned copy down", plain_down, plain_down),
        ("save", down, plain_down),
        ("pinned copy up", plain_up, plain_up),
        ("load", up, plain_up),
        ("load in 8 groups of layers", grouped, plain_up),
    )
    for name, taken, plain in table:
        report.result(path=name, gib_a_second=total / taken / 2**30, of_plain=plain / taken)
    report.goal("save over a plain pinned copy", plain_down / down, at_least=0.9)
    report.goal("load over a plain pinned copy", plain_up / up, at_least=0.9)


def save_model(folder: Path) -> Path:
    """About 1.1 B parameters of random weights, with a long context."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=40960,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    untyped: Any = AutoModelForCausalLM
    untyped.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def ttft(report: Report) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        loaded = load_model(
            str(save_model(folder / "model")), dtype=torch.bfloat16, device="cuda", cache_dir=folder
        )
        config = Config(
            pool_path=folder / "pool",
            pool_bytes=4 * 2**30,
            device="cuda",
            device_bytes=4 * 2**30,
            redis_url=None,
        )
        worker = build_worker(loaded, config, clock=time.monotonic)
        try:
            for length in LENGTHS:
                _ttft_of(report, worker, length)
        finally:
            worker.close(remove_pool=True)


def _ttft_of(report: Report, worker: Worker, length: int) -> None:
    random = np.random.default_rng(length)
    cold: list[float] = []
    warm: list[float] = []
    cached = 0
    for turn in range(4):
        prompt = random.integers(2, 32000, length).astype(np.uint32)
        asked = prompt.copy()
        asked[int(length * CACHED) :] = random.integers(2, 32000, length - int(length * CACHED))
        for name, tokens, samples in (("cold", prompt, cold), ("warm", asked, warm)):
            [result] = worker.engine.run([Request(f"{length}-{turn}-{name}", tokens, 1, time.monotonic())])
            samples.append(result.ttft_seconds)
            assert worker.store.drain(60.0)
            device = worker.tiers.device
            assert device is not None
            for slot_class in device.pool.extents.classes():
                device.pool.evict(slot_class, device.pool.extents.slots)
        cached = result.cached_tokens
    report.result(
        path=f"TTFT of {length} tokens, {CACHED:.0%} in the host pool",
        cold_seconds=statistics.median(cold[1:]),
        warm_seconds=statistics.median(warm[1:]),
        cached_tokens=cached,
    )


def main() -> None:
    """Run and print."""
    arguments = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; run this where there is one")
    report = Report("gpu", ("torch", "cupy-cuda13x"))
    properties = torch.cuda.get_device_properties(0)
    report.result(device=properties.name, memory_gib=properties.total_memory / 2**30)
    copies(report)
    torch.cuda.empty_cache()
    ttft(report)
    report.finish(json=arguments.json)


if __name__ == "__main__":
    main()
