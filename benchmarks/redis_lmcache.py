"""LMCache's native client of Redis (``resp://``): a program of its own, for an interpreter that has LMCache.

Written for lmcache 0.5.6, whose client has eight connections by default, each with a thread in C++, and
checks nothing. Of its dependencies it needs torch alone. Reads a line ``get`` or ``set``, the size of a value
and their number; answers with the seconds that it took. An empty line ends it.
"""

from __future__ import annotations

import importlib
import select
import sys
import time

WORKERS = 8


def main(port: int) -> None:
    """Serve the other end of the pipes."""
    client = importlib.import_module("lmcache.lmcache_redis").LMCacheRedisClient("127.0.0.1", port, WORKERS)
    poller = select.poll()
    poller.register(client.event_fd(), select.POLLIN)
    buffers: dict[tuple[int, int], list[memoryview]] = {}
    answer("ready")
    for line in sys.stdin:
        if not line.strip():
            break
        name, size, blocks = line.split()
        work = int(size), int(blocks)
        held = buffers.setdefault(work, [memoryview(bytearray(work[0])) for _ in range(work[1])])
        keys = [f"lmcache:{size}:{block}" for block in range(work[1])]
        submit = client.submit_batch_set if name == "set" else client.submit_batch_get
        started = time.perf_counter()
        number = submit(keys, held)
        done: list[tuple[int, bool, str, object]] = []
        while not any(each[0] == number for each in done):
            poller.poll()
            done += client.drain_completions()
        seconds = time.perf_counter() - started
        assert all(each[1] for each in done), done
        answer(repr(seconds))
    client.close()


def answer(text: str) -> None:
    """One line to whoever asked."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
