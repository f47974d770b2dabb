"""Runs a sidecar, its Valkey and its clients, kills and stops them at random, and looks at what is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import KVStoreError
from tests.soak.tally import Count, Tally
from tests.support.crash_checks import check
from tests.support.crash_client import await_stopped
from tests.support.sidecars import REPOSITORY, Sidecar, sidecar
from tests.support.valkey import ValkeyServer

WORKERS = 4
_AUDIT_SECONDS = 8.0
_PARK_SECONDS = 15.0
_END_SECONDS = 20.0
_LONGEST_STOP_SECONDS = 2.5
"""Well past the deadlines of leases and writes, which are a second."""
_SETTINGS = {
    "pool_bytes": "8MiB",
    "extent_bytes": "1MiB",
    "lease_seconds": 1,
    "write_seconds": 1,
    "drain_seconds": 2,
    "redis_queue_bytes": "4MiB",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, and from which seed every choice is drawn."""

    seconds: float
    seed: int


@dataclass(slots=True)
class Summary:
    """What was done, and what went wrong; nothing may have."""

    counts: dict[str, int] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        for name, count in (*self.counts.items(), *sorted(self.events.items())):
            yield f"{name:<24}{count:>10,}"
        yield f"{'violations':<24}{len(self.violations):>10,}"
        yield from self.violations


def run(plan: Plan) -> Summary:
    """The soak, which ends by itself soon after ``plan.seconds``, or at the first violation."""
    summary = Summary()
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as name:
        directory, tally = Path(name), Tally(Path(name) / "tally", WORKERS)
        try:
            with _valkey(directory) as below, sidecar(**_SETTINGS, redis_url=below.url) as server:
                director = Director(
                    plan, server, below, Workers(server.address, directory, plan.seed), summary
                )
                try:
                    director.direct(tally)
                finally:
                    director.workers.close()
        except (AssertionError, KVStoreError, OSError, subprocess.SubprocessError) as error:
            summary.violations.append(f"{type(error).__name__}: {error}")
        summary.counts = {count.name.lower(): tally.total(count) for count in Count if count != Count.PARKED}
    if summary.counts["wrong_blocks"]:
        summary.violations.append(
            f"{summary.counts['wrong_blocks']} blocks were wrong that were said to be right"
        )
    return summary


@contextmanager
def _valkey(directory: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(directory / "valkey", {"maxmemory": "32mb"})
    try:
        yield server
    finally:
        server.close()


class Workers:
    """The client processes, each with a row in the tally that its successors inherit."""

    def __init__(self, address: str, directory: Path, seed: int) -> None:
        self._address = address
        self._path = directory / "tally"
        self._seeds = random.Random(seed)
        self._processes = [self._start(place) for place in range(WORKERS)]
        self._asleep: dict[int, float] = {}

    def kill(self, place: int) -> None:
        """End one as a crash does, asleep or not; another takes its place."""
        self._processes[place].kill()
        self._processes[place].wait(_END_SECONDS)
        self._asleep.pop(place, None)
        self._processes[place] = self._start(place)

    def put_to_sleep(self, place: int, seconds: float) -> None:
        """Stop one; ``wake`` has it go on."""
        if place not in self._asleep:
            os.kill(self._processes[place].pid, signal.SIGSTOP)
            await_stopped(self._processes[place].pid)
        self._asleep[place] = time.monotonic() + seconds

    def wake(self, *, everybody: bool = False) -> None:
        """Those who have slept for long enough go on."""
        for place, until in list(self._asleep.items()):
            if everybody or time.monotonic() > until:
                os.kill(self._processes[place].pid, signal.SIGCONT)
                del self._asleep[place]

    def require_alive(self) -> None:
        for process in self._processes:
            assert process.poll() is None, f"a worker ended by itself with status {process.returncode}"

    def join(self) -> None:
        """Wait for their end, which they have been told of."""
        for process in self._processes:
            status = process.wait(_END_SECONDS)
            assert status == 0, f"a worker ended with status {status}"

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait(_END_SECONDS)

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        arguments = [
            self._address,
            str(self._path),
            str(WORKERS),
            str(place),
            str(self._seeds.getrandbits(32)),
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.soak.worker", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "GRPC_VERBOSITY": "NONE"},
        )


class Director:
    """Chooses what happens next, and audits what it has come to."""

    def __init__(
        self, plan: Plan, server: Sidecar, below: ValkeyServer, workers: Workers, summary: Summary
    ) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._server = server
        self._below = below
        self.workers = workers
        self._summary = summary

    def direct(self, tally: Tally) -> None:
        """AssertionError at the first thing that is not as it has to be."""
        events = {
            self._kill_a_client: 6,
            self._stop_a_client: 6,
            self._kill_the_server: 3,
            self._kill_the_server_as_it_starts: 1,
            self._stop_the_server: 2,
            self._end_the_server_in_order: 1,
            self._restart_valkey: 1,
        }
        ends_at = time.monotonic() + self._plan.seconds
        audit_at = time.monotonic() + _AUDIT_SECONDS
        while time.monotonic() < ends_at:
            time.sleep(self._random.uniform(0.1, 1.2))
            self.workers.wake()
            event = self._random.choices(list(events), list(events.values()))[0]
            event()
            self._summary.events[event.__name__.strip("_")] += 1
            self.workers.require_alive()
            assert self._server.process.poll() is None, "the server ended by itself"
            if time.monotonic() > audit_at:
                self._audit(tally)
                audit_at = time.monotonic() + _AUDIT_SECONDS
        self._audit(tally)
        tally.ending = True
        self.workers.join()
        check(self._server)

    def _audit(self, tally: Tally) -> None:
        """Everybody finishes what it does, and then nothing is in use, missing, or wrong."""
        self.workers.wake(everybody=True)
        tally.pausing = True
        deadline = time.monotonic() + _PARK_SECONDS
        while not tally.all_parked:
            self.workers.require_alive()
            assert time.monotonic() < deadline, f"a worker has not finished what it did in {_PARK_SECONDS} s"
            time.sleep(0.02)
        check(self._server)
        tally.pausing = False
        self._summary.events["audits"] += 1

    def _kill_a_client(self) -> None:
        self.workers.kill(self._random.randrange(WORKERS))

    def _stop_a_client(self) -> None:
        self.workers.put_to_sleep(
            self._random.randrange(WORKERS), self._random.uniform(0.1, _LONGEST_STOP_SECONDS)
        )

    def _kill_the_server(self) -> None:
        self._server.restart()
        self._count_adoption()

    def _kill_the_server_as_it_starts(self) -> None:
        self._server.kill()
        self._server.launch()
        time.sleep(self._random.uniform(0.3, 1.2))
        self._server.restart()
        self._count_adoption()

    def _stop_the_server(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)
        self._server.await_stopped()
        time.sleep(self._random.uniform(0.05, 1.5))
        self._server.resume()

    def _end_the_server_in_order(self) -> None:
        status = self._server.stop()
        assert status == 0, f"the server ended with status {status}"
        self._server.start()
        self._count_adoption()

    def _restart_valkey(self) -> None:
        self._below.kill()
        time.sleep(self._random.uniform(0.0, 0.5))
        self._below.restart()

    def _count_adoption(self) -> None:
        adopted = self._server.serving["adopted_blocks"]
        self._summary.events["adoptions"] += bool(adopted)
        self._summary.events["adopted_blocks"] += adopted
