"""A client as a process of its own: does what it is told, a line of JSON at a time, and says what came of it.

``pause`` names a point between two calls at which the process stops itself with SIGSTOP. It goes on
from there without looking at anything first, as a process that was stopped does.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore.service.client import Client, ClientNamespace, ClientOptions, HeldLease, Outcome, StagedWrite
from kvstore.tiers.base import Payload
from tests.support.crash_blocks import SPEC, chain, payloads_of
from tests.support.crash_points import Point

IMPATIENT = ClientOptions(rpc_seconds=1.0, reconnect_seconds=0.1)
PATIENT = ClientOptions(rpc_seconds=30.0)
THREADS = 8

Answer = dict[str, Any]


class Process:
    """One client and what it has open."""

    def __init__(self, address: str, *, streams: bool) -> None:
        self._address = address
        self._client = Client(address, options=replace(IMPATIENT, map_pool=not streams))
        self._namespace = self._client.namespace(SPEC)
        self._pause: Point | None = None
        self._crowd: list[Client] = []
        self._open: dict[int, HeldLease | StagedWrite] = {}

    def write(self, number: int, blocks: int, shared: int = 0, pause: str | None = None) -> Answer:
        """Write what is missing of a prompt."""
        self._pause = None if pause is None else Point(pause)
        hashed = chain(number, blocks, shared)
        with self._namespace.write(hashed) as staged:
            status = [str(each) for each in staged.status]
            self._reach(Point.WRITE_BEGUN)
            places = staged.payloads  # in a variable, as in any engine: it must not outlive this call
            yours = [
                payload for payload, is_ in zip(payloads_of(hashed), status, strict=True) if is_ == "yours"
            ]
            self._fill(places, yours)
            self._reach(Point.WRITE_FILLED)
        return {"outcome": staged.outcome, "status": status, "committed": staged.committed_blocks}

    def read(
        self, number: int, blocks: int, shared: int = 0, wait: float = 0.0, pause: str | None = None
    ) -> Answer:
        """Read a prompt block by block, as an engine does that copies in place."""
        self._pause = None if pause is None else Point(pause)
        hashed = chain(number, blocks, shared)
        with self._namespace.acquire(hashed, wait_seconds=wait) as lease:
            promised = lease.blocks
            self._reach(Point.READ_ACQUIRED)
            copies = []
            for at, view in enumerate(lease.views()):
                if at == promised // 2:
                    self._reach(Point.READ_COPYING)
                copies.append(view.copy())
            self._reach(Point.READ_COPIED)
            valid = lease.valid()
        return {
            "outcome": lease.outcome,
            "promised": promised,
            "valid": valid,
            "wrong": _different(copies[:valid], payloads_of(hashed)),
            "stale": _different(copies[valid:], payloads_of(hashed)[valid:]),
        }

    def begin(self, number: int, blocks: int) -> Answer:
        """Begin a write, and leave it open under the prompt's number."""
        staged = self._namespace.write(chain(number, blocks))
        self._open[number] = staged
        return {"outcome": staged.outcome, "status": [str(each) for each in staged.status]}

    def finish(self, number: int, blocks: int) -> Answer:
        """Fill and commit what ``begin`` left open."""
        staged = self._open.pop(number)
        assert isinstance(staged, StagedWrite)
        with staged:
            wanted = zip(payloads_of(chain(number, blocks)), staged.status, strict=True)
            self._fill(staged.payloads, [payload for payload, is_ in wanted if str(is_) == "yours"])
        return {"outcome": staged.outcome, "committed": staged.committed_blocks}

    def hold(self, number: int, blocks: int) -> Answer:
        """Acquire, and keep the lease under the prompt's number."""
        lease = self._namespace.acquire(chain(number, blocks))
        self._open[number] = lease
        return {"outcome": lease.outcome, "promised": lease.blocks}

    def forget(self, number: int) -> Answer:
        """Lose what is open, without a word to the server."""
        del self._open[number]
        return {}

    def gather(self, connections: int) -> Answer:
        """Open that many clients more, each with its connection, number and mapping."""
        self._crowd = [Client(self._address, options=PATIENT) for _ in range(connections)]
        with ThreadPoolExecutor(THREADS) as threads:
            outcomes = list(threads.map(lambda client: client.namespace(SPEC).register(), self._crowd))
        return {"connected": outcomes.count(Outcome.OK)}

    def swarm(self, first: int, common: Sequence[int], blocks: int) -> Answer:
        """Each of them writes a prompt of its own, and reads that and the ``common`` ones."""
        with ThreadPoolExecutor(THREADS) as threads:
            results = list(
                threads.map(
                    lambda client, number: _exchange(client.namespace(SPEC), [number, *common], blocks),
                    self._crowd,
                    range(first, first + len(self._crowd)),
                )
            )
        return {"hits": sum(hits for hits, _ in results), "wrong": sum(wrong for _, wrong in results)}

    def close(self) -> None:
        for client in (self._client, *self._crowd):
            client.close()

    def _reach(self, point: Point) -> None:
        if self._pause is point:
            signal.raise_signal(signal.SIGSTOP)

    def _fill(self, places: Sequence[Payload], payloads: Sequence[Payload]) -> None:
        for at, (place, payload) in enumerate(zip(places, payloads, strict=True)):
            half = len(payload) // 2
            place[:half] = payload[:half]
            if at == len(places) // 2:
                self._reach(Point.WRITE_FILLING)
            place[half:] = payload[half:]


def _exchange(namespace: ClientNamespace, numbers: Sequence[int], blocks: int) -> tuple[int, int]:
    """Write what is missing of the first prompt, and read all: (blocks read, blocks that were wrong)."""
    hits = wrong = 0
    own = chain(numbers[0], blocks)
    with namespace.write(own) as staged:
        for place, payload in zip(staged.payloads, payloads_of(own), strict=True):
            np.copyto(place, payload)
    for number in numbers:
        hashed = chain(number, blocks)
        copies = [np.zeros_like(payload) for payload in payloads_of(hashed)]
        with namespace.acquire(hashed) as lease:
            read = lease.copy_out(copies)
        hits += read
        wrong += _different(copies[:read], payloads_of(hashed))
    return hits, wrong


def _different(found: Sequence[Payload], meant: Sequence[Payload]) -> int:
    return sum(not np.array_equal(ours, theirs) for ours, theirs in zip(found, meant, strict=False))


def main() -> None:
    process = Process(sys.argv[1], streams="stream" in sys.argv[2:])
    tasks = {task.__name__: task for task in (
        process.write, process.read, process.begin, process.finish, process.hold, process.forget,
        process.gather, process.swarm,
    )}  # fmt: skip
    for line in sys.stdin:
        asked = json.loads(line)
        answer = tasks[asked.pop("do")](**asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    process.close()


if __name__ == "__main__":
    main()
