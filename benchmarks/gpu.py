"""How near to a GPU's own limits blocks move, and what a cached prefix is worth there.

Each path stands beside a plain copy of the same bytes on the same machine in the same run: gather and
scatter beside a device-to-device copy, transfers beside pinned ones. A rate counts each byte once.
Bytes are compared before they are timed. What was measured is printed also when a later part fails.

    PYTHONPATH=. python benchmarks/gpu.py --json

``--device cpu`` goes through all of it at tiny sizes, where the figures mean nothing.
"""

import mmap
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Report, parser
from transformers import AutoConfig, AutoModelForCausalLM

from kvstore.config import Config
from kvstore.tiers.device_copy import Integers, PagedBlocks
from kvstore.tiers.device_mover import mover_for
from kvstore.tiers.device_pin import pinned_pool
from kvstore.tiers.device_transfer import Fence, Transfers
from prefill.assemble import Worker, build_worker
from prefill.engine import EngineOptions
from prefill.model import load_model
from prefill.request import Request

GROUPS = 8
CACHED = 0.95
TURNS = 4
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Sizes:
    """``moved`` of ``blocks`` are moved, whose bytes are ``width`` in each of ``layers``."""

    layers: int
    width: int
    blocks: int
    moved: int
    staging_bytes: int
    rounds: int
    matrix: int
    """Side of the square product that stands for compute."""
    prompts: tuple[int, ...]
    pool_bytes: int
    step_tokens: int
    model: dict[str, int]


FULL = Sizes(
    # The cache of an 8 B model with 8 KV heads of 128 in bfloat16, blocks of 16: 2 MiB a block, 4 GiB in all.
    layers=32,
    width=16 * 4096,
    blocks=2048,
    moved=1024,
    staging_bytes=256 * 2**20,
    rounds=15,
    matrix=4096,
    prompts=(8192, 32768),
    pool_bytes=4 * 2**30,
    step_tokens=8192,
    # About 1.1 B parameters.
    model={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 40960,
    },
)
TINY = Sizes(
    layers=4,
    width=512,
    blocks=24,
    moved=10,
    staging_bytes=3 * 2048,
    rounds=2,
    matrix=64,
    prompts=(96,),
    pool_bytes=4 * 2**20,
    step_tokens=64,
    model={
        "vocab_size": 32000,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
)


@dataclass(frozen=True)
class Bench:
    """Where and how much is measured, and who is told."""

    device: torch.device
    sizes: Sizes
    report: Report

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of ``run`` and of what it has asked of the device, after warming up."""
        samples = []
        for _ in range(self.sizes.rounds + 3):
            self.synchronize()
            began = time.perf_counter()
            run()
            self.synchronize()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples[3:])

    def wait_on_device(self, fence: Fence) -> None:
        """What is submitted next happens after a fence of another stream."""
        if fence is not None:
            torch.cuda.current_stream(self.device).wait_event(fence)

    def pinned(self, memory: np.ndarray) -> AbstractContextManager[bool]:
        return pinned_pool(memory, self.device) if self.is_cuda else nullcontext(enter_result=True)


@dataclass(frozen=True)
class Moved:
    """A cache, the blocks of it that are moved, and what is in them."""

    paged: PagedBlocks
    block_ids: Integers
    kept: torch.Tensor
    """(moved, payload bytes) on the device."""

    @property
    def total(self) -> int:
        return self.kept.numel()

    def spoil(self) -> None:
        for rows in self.paged.rows:
            rows.zero_()

    def check(self) -> None:
        """The blocks have their bytes."""
        ids = torch.from_numpy(self.block_ids).to(self.kept.device)
        for rows, (start, stop) in zip(self.paged.rows, self.paged.spans, strict=True):
            assert torch.equal(rows[ids], self.kept[:, start:stop]), "the bytes differ"


def cache_of(bench: Bench) -> Moved:
    """Random bytes."""
    sizes = bench.sizes
    rows = [
        torch.randint(0, 256, (sizes.blocks, sizes.width), dtype=torch.uint8, device=bench.device)
        for _ in range(sizes.layers)
    ]
    block_ids = np.random.default_rng(1).permutation(sizes.blocks)[: sizes.moved].astype(np.int64)
    ids = torch.from_numpy(block_ids).to(bench.device)
    return Moved(PagedBlocks(rows), block_ids, torch.cat([each[ids] for each in rows], dim=1))


def on_the_device(bench: Bench, moved: Moved) -> None:
    """Gather and scatter beside a plain copy."""
    report, total, layers = bench.report, moved.total, (0, moved.paged.layers)
    mover = mover_for(moved.paged, staging_bytes=total + 64 * bench.sizes.moved)
    report.result(mover=type(mover).__name__)
    slots = mover.staging[: bench.sizes.moved]
    mover.gather(layers, moved.block_ids, slots)
    mover.wait(mover.fence())
    moved.spoil()
    bench.synchronize()
    mover.scatter(layers, moved.block_ids, slots)
    mover.wait(mover.fence())
    moved.check()
    other = torch.empty_like(moved.kept)
    plain = bench.seconds(lambda: other.copy_(moved.kept))
    gather = bench.seconds(lambda: mover.gather(layers, moved.block_ids, slots))
    scatter = bench.seconds(lambda: mover.scatter(layers, moved.block_ids, slots))
    for name, taken in (("device copy", plain), ("gather", gather), ("scatter", scatter)):
        report.result(path=name, gib_a_second=total / taken / 2**30, of_plain=plain / taken)
    report.goal("gather over a device copy", plain / gather, at_least=0.85)
    report.goal("scatter over a device copy", plain / scatter, at_least=0.85)


def over_the_bus(bench: Bench, moved: Moved) -> None:
    """Saves and loads beside plain pinned copies, and loads behind compute."""
    report, total, payload = bench.report, moved.total, moved.paged.payload_bytes
    memory = np.frombuffer(mmap.mmap(-1, total), dtype=np.uint8)
    with bench.pinned(memory) as is_pinned:
        assert is_pinned, "the pool cannot be pinned: raise ulimit -l"
        host, flat = torch.from_numpy(memory), torch.empty_like(moved.kept).view(-1)
        order = np.random.default_rng(2).permutation(bench.sizes.moved).astype(np.int64)
        slots: Integers = memory.ctypes.data + order * payload
        moves = Transfers(moved.paged, mover_for(moved.paged, staging_bytes=bench.sizes.staging_bytes))
        bench.synchronize()
        moves.wait(moves.save(moved.block_ids, slots))
        assert (memory.reshape(-1, payload)[order] == moved.kept.cpu().numpy()).all(), "the bytes differ"
        moved.spoil()
        bench.synchronize()
        moves.wait(moves.load(slots, moved.block_ids, groups=GROUPS)[-1][1])
        moved.check()
        down = bench.seconds(lambda: moves.wait(moves.save(moved.block_ids, slots)))
        up = bench.seconds(lambda: moves.wait(moves.load(slots, moved.block_ids)[-1][1]))
        in_groups = bench.seconds(
            lambda: moves.wait(moves.load(slots, moved.block_ids, groups=GROUPS)[-1][1])
        )
        behind_compute(
            bench, moved, lambda: moves.load_in_turn(slots, moved.block_ids, groups=GROUPS), in_groups
        )
        # Last: these overwrite the pool.
        plain_down = bench.seconds(lambda: host.copy_(flat, non_blocking=True))
        plain_up = bench.seconds(lambda: flat.copy_(host, non_blocking=True))
    table = (
        ("pinned copy down", plain_down, plain_down),
        ("save", down, plain_down),
        ("pinned copy up", plain_up, plain_up),
        ("load", up, plain_up),
        (f"load in {GROUPS} groups of layers", in_groups, plain_up),
    )
    for name, taken, plain in table:
        report.result(path=name, gib_a_second=total / taken / 2**30, of_plain=plain / taken)
    report.goal("save over a plain pinned copy", plain_down / down, at_least=0.9)
    report.goal("load over a plain pinned copy", plain_up / up, at_least=0.9)


def behind_compute(
    bench: Bench, moved: Moved, load: Callable[[], Iterator[tuple[int, Fence]]], copy_seconds: float
) -> None:
    """Layers that take about as long as their copies, each begun when its group is there."""
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    left = torch.ones(bench.sizes.matrix, bench.sizes.matrix, dtype=dtype, device=bench.device)
    product = torch.empty_like(left)
    once = bench.seconds(lambda: torch.mm(left, left, out=product))
    times = max(1, round(copy_seconds / moved.paged.layers / once))

    def compute(layers: int) -> None:
        for _ in range(layers * times):
            torch.mm(left, left, out=product)

    def together() -> None:
        done = 0
        for layer, fence in load():
            bench.wait_on_device(fence)
            compute(layer - done)
            done = layer

    moved.spoil()
    bench.synchronize()  # the load is on a stream of its own
    together()
    bench.synchronize()
    moved.check()
    compute_seconds = bench.seconds(lambda: compute(moved.paged.layers))
    both_seconds = bench.seconds(together)
    bench.report.result(
        path=f"load in {GROUPS} groups of layers, and compute",
        copy_seconds=copy_seconds,
        compute_seconds=compute_seconds,
        together_seconds=both_seconds,
        hidden_share=(copy_seconds + compute_seconds - both_seconds) / copy_seconds,
        # Nothing hides the first group's copy.
        hidden_share_at_best=min(1 - 1 / GROUPS, compute_seconds / copy_seconds),
    )


def save_model(sizes: Sizes, folder: Path) -> Path:
    """Random weights."""
    config = AutoConfig.for_model("llama", **sizes.model, eos_token_id=None)
    torch.manual_seed(1)
    untyped: Any = AutoModelForCausalLM
    untyped.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def ttft(bench: Bench) -> None:
    """Time to first token with most of a prompt in the host pool, and with none."""
    sizes = bench.sizes
    free = shutil.disk_usage(SHM).free
    if free < sizes.pool_bytes:
        missing = f"not measured: {SHM} has {free >> 20} MiB free, and needs {sizes.pool_bytes >> 20} MiB"
        bench.report.result(path="TTFT", note=missing)
        return
    with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory(dir=SHM) as pools:
        folder = save_model(sizes, Path(models) / "model")
        loaded = load_model(str(folder), dtype=torch.bfloat16, device=bench.device, cache_dir=Path(models))
        config = Config(
            pool_path=Path(pools) / "pool",
            pool_bytes=sizes.pool_bytes,
            extent_bytes=min(sizes.pool_bytes // 4, 256 * 2**20),
            device=str(bench.device),
            device_bytes=sizes.pool_bytes,
            redis_url=None,
        )
        options = EngineOptions(step_tokens=sizes.step_tokens)
        worker = build_worker(loaded, config, clock=time.monotonic, options=options)
        try:
            for length in sizes.prompts:
                _ttft_of(bench, worker, length)
        finally:
            worker.close(remove_pool=True)


def _ttft_of(bench: Bench, worker: Worker, length: int) -> None:
    random, most = np.random.default_rng(length), int(length * CACHED)
    samples: dict[str, list[float]] = {"cold": [], "warm": []}
    cached = 0
    for turn in range(TURNS):
        prompt = random.integers(2, 32000, length).astype(np.uint32)
        asked = prompt.copy()
        asked[most:] = random.integers(2, 32000, length - most)
        for name, tokens in (("cold", prompt), ("warm", asked)):
            [result] = worker.engine.run([Request(f"{length}-{turn}-{name}", tokens, 1, time.monotonic())])
            samples[name].append(result.ttft_seconds)
            assert worker.store.drain(60.0)
            device = worker.tiers.device
            assert device is not None
            for slot_class in device.pool.extents.classes():
                device.pool.evict(slot_class, device.pool.extents.slots)
        cached = result.cached_tokens
    assert cached > most - 2 * worker.spec.block_size, f"{cached} tokens cached, of about {most}"
    bench.report.result(
        path=f"TTFT of {length} tokens, {CACHED:.0%} in the host pool",
        cold_seconds=statistics.median(samples["cold"][1:]),
        warm_seconds=statistics.median(samples["warm"][1:]),
        cached_tokens=cached,
    )


def main() -> None:
    """Run and print."""
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = arguments_parser.parse_args()
    is_cuda = arguments.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; run this where there is one")
    report = Report("gpu", ("torch", "cupy-cuda13x"))
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    bench = Bench(device, FULL if is_cuda else TINY, report)
    if is_cuda:
        properties = torch.cuda.get_device_properties(device)
        report.result(device=properties.name, memory_gib=properties.total_memory / 2**30)
    try:
        moved = cache_of(bench)
        on_the_device(bench, moved)
        over_the_bus(bench, moved)
        del moved
        if is_cuda:
            torch.cuda.empty_cache()
        ttft(bench)
    finally:
        report.finish(json=arguments.json)


if __name__ == "__main__":
    main()
