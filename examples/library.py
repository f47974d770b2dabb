"""The store as a library: write the blocks of a prompt, then find them again.

Run it with ``python examples/library.py``.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from hashing import KVShape, Namespace
from kvstore.block import WHOLE, Chain
from kvstore.evict.lru import LRU
from kvstore.spec import NamespaceSpec
from kvstore.store import TieredStore, Tiers
from kvstore.tiers.host import HostTier


def main() -> None:
    shape = KVShape(layers=24, planes=2, kv_heads=8, head_size=64)
    spec = NamespaceSpec(Namespace("my-model", "2026-11", "bfloat16", "LPNHD", 16, shape))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        host = HostTier(
            Path(folder) / "pool",
            pool_bytes=256 << 20,
            extent_bytes=64 << 20,
            make_evictor=LRU,
            clock=time.monotonic,
        )
        store = TieredStore(Tiers(host), clock=time.monotonic)
        store.register(spec)

        prompt = np.arange(1000)
        chain = Chain.of(spec.root, prompt)  # 62 whole blocks; the tail has no hash
        with store.write(chain) as write:  # two phases: visible at the end, or not at all
            for number, payload in enumerate(write.payloads):  # numpy views of shared memory
                payload[:] = number

        longer = Chain.of(spec.root, np.concatenate((prompt[:500], prompt)))
        lease = store.acquire("request-1", longer)  # matched, compared and pinned in one step
        found = [
            int(view[0])
            for segment in lease.segments[WHOLE]  # by shard; WHOLE is a model on one rank
            for view in host.views(segment.slots, spec.payload_bytes_on())
        ]
        print(f"{lease.tokens} of {longer.prompt_tokens} tokens are cached, in blocks {found}")
        store.release(lease)
        store.close()


if __name__ == "__main__":
    main()
