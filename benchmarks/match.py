"""What does it cost to match, verify and lease a prompt that is fully resident, in one process?

Prompts are drawn at random and never repeated, so that nothing is warm but what a server keeps warm.
The yardstick is a bare loop of look-ups in a dictionary of the same size, over other prompts of the
same store, with the keys split beforehand.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Report, parser

from hashing import KVShape, Namespace
from kvstore.block import WHOLE, Chain
from kvstore.evict.lru import LRU
from kvstore.index import split_hashes
from kvstore.spec import NamespaceSpec
from kvstore.store import TieredStore, Tiers
from kvstore.tiers.host import HostTier

BLOCK_SIZE = 16
PAYLOAD_BYTES = 64
PROMPT_BLOCKS = 2048
LONG_BLOCKS = 8192
RESIDENT = (1_000_000, 100_000)
ROUNDS_MAX = 60
EXTENT_BYTES = 64 << 20
BYTES_A_BLOCK = 300
PIECE_BLOCKS = 16


@dataclass(frozen=True)
class Filled:
    """A store with nothing but resident prompts."""

    store: TieredStore
    spec: NamespaceSpec
    host: HostTier
    chains: list[Chain]
    process_bytes_a_block: float


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("match", ("numpy", "xxhash"))
    for resident in RESIDENT:
        filled = fill(resident, PROMPT_BLOCKS, pieces=False)
        measure(report, filled, f"{resident:,} resident")
        if resident == RESIDENT[0]:
            # Only the first: memory that it gave back may serve the others.
            value = filled.process_bytes_a_block
            report.goal(
                f"process bytes a block beyond the pool file, {resident:,} resident", value, at_most=250
            )
        filled.store.close()
    filled = fill(16 * LONG_BLOCKS, LONG_BLOCKS, pieces=False)
    measure(report, filled, f"{LONG_BLOCKS}-block prompts")
    filled.store.close()
    filled = fill(RESIDENT[0], PROMPT_BLOCKS, pieces=True)
    measure(report, filled, "written in scattered pieces", goal=False)
    filled.store.close()
    report.finish(json=options.json)


def fill(resident: int, prompt_blocks: int, *, pieces: bool) -> Filled:
    """Write prompts until ``resident`` blocks are there; in ``pieces``, they lie scattered."""
    gc.collect()
    before = anonymous_bytes()
    folder = tempfile.TemporaryDirectory(dir="/dev/shm")
    # Room for everything, in whole extents.
    extents = -(-resident * BYTES_A_BLOCK // EXTENT_BYTES) + 1
    host = HostTier(
        Path(folder.name) / "pool",
        pool_bytes=extents * EXTENT_BYTES,
        extent_bytes=EXTENT_BYTES,
        make_evictor=LRU,
        clock=time.monotonic,
    )
    store = TieredStore(Tiers(host), clock=time.monotonic)
    shape = KVShape(layers=1, planes=2, kv_heads=1, head_size=1)
    fields = Namespace("benchmark", "0", "uint8", "none", BLOCK_SIZE, shape)
    spec = NamespaceSpec(fields, payload_bytes=PAYLOAD_BYTES)
    store.register(spec)
    rng = np.random.default_rng(7)
    prompts = [
        rng.integers(0, 2**17, prompt_blocks * BLOCK_SIZE).astype(np.uint32)
        for _ in range(resident // prompt_blocks + 1)
    ]
    step = PIECE_BLOCKS if pieces else prompt_blocks
    for stop in range(step, prompt_blocks + 1, step):
        for tokens in prompts:
            with store.write(Chain.of(spec.root, tokens, max_blocks=stop), first_block=stop - step):
                pass
    folder.cleanup()
    gc.collect()
    used = anonymous_bytes() - before - sum(tokens.nbytes for tokens in prompts)
    blocks = len(prompts) * prompt_blocks
    order = rng.permutation(len(prompts))
    chains = [Chain.of(spec.root, prompts[at]) for at in order[: 2 * ROUNDS_MAX]]
    return Filled(store, spec, host, chains, used / blocks)


def measure(report: Report, filled: Filled, name: str, *, goal: bool = True) -> None:
    """Alternate between our acquire and the bare loop, each on prompts of its own."""
    space = filled.host.pool.space(filled.spec.root.digest, WHOLE)
    assert space is not None
    ours: list[float] = []
    bare: list[float] = []
    released: list[float] = []
    for number, chain in enumerate(filled.chains):
        if number % 2:
            bare.append(seconds(bare_loop(space.ready, split_hashes(chain.hashes))))
        else:
            acquired, gone = lease_once(filled.store, chain, str(number))
            ours.append(acquired)
            released.append(gone)
    ratio = statistics.median(ours[1:]) / statistics.median(bare[1:])
    report.result(
        case=name,
        blocks=len(filled.chains[0]),
        acquire_ms=statistics.median(ours[1:]) * 1e3,
        bare_loop_ms=statistics.median(bare[1:]) * 1e3,
        ratio=ratio,
        release_ms=statistics.median(released[1:]) * 1e3,
    )
    if goal:
        report.goal(f"acquire over bare look-ups, {name}", ratio, at_most=2.0)


def lease_once(store: TieredStore, chain: Chain, request: str) -> tuple[float, float]:
    """Seconds to acquire a whole chain, and to release it."""
    started = time.perf_counter()
    lease = store.acquire(request, chain)
    acquired = time.perf_counter() - started
    assert lease.blocks == len(chain), (lease.blocks, len(chain), lease.cause)
    return acquired, seconds(lambda: store.release(lease))


def bare_loop(slots: dict[bytes, int], keys: list[bytes]) -> Callable[[], None]:
    def run() -> None:
        for key in keys:
            slots[key]

    return run


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: the pool file does not count."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; expected Linux 4.5 or newer")


if __name__ == "__main__":
    main()
