"""One client process of the soak: reads, writes, gives up half-way, and compares every byte that it gets."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.block import Chain
from kvstore.service.client import Client, ClientOptions, Outcome
from tests.soak.tally import Count, Tally
from tests.support.crash_blocks import SPEC, chain, payloads_of

PROMPTS = 300
BLOCKS_MAX = 16
SHARED_BLOCKS = 4
_PARKED_SECONDS = 0.02
_AWAY_SECONDS = 0.05
_HOLD_SECONDS_MAX = 0.3
_OVERSLEEP_SECONDS = 1.3
"""More than a write has."""
_NOBODYS_BYTE = 0xAA


class Worker:
    """Does random things with random prompts, the first ones most often."""

    def __init__(self, address: str, tally: Tally, place: int, seed: int) -> None:
        self._random = random.Random(seed)
        # Every fourth one streams, as a client does that cannot map the pool file.
        options = ClientOptions(rpc_seconds=0.5, reconnect_seconds=0.05, map_pool=place % 4 != 3)
        self._client = Client(address, options=options)
        self._namespace = self._client.namespace(SPEC)
        self._tally = tally
        self._place = place

    def run(self) -> None:
        """Until the director says that it is over."""
        tasks: dict[Callable[[Chain], object], int] = {
            self.read: 400,
            self.write: 200,
            self.extend: 250,
            self.give_up: 50,
            self.oversleep: 3,
            self.look_up: 50,
            self.lose_a_lease: 50,
        }
        while not self._tally.ending:
            if self._tally.pausing:
                self._tally.park(self._place, parked=True)
                time.sleep(_PARKED_SECONDS)
                continue
            self._tally.park(self._place, parked=False)
            task = self._random.choices(list(tasks), list(tasks.values()))[0]
            task(self._prompt())
            self._count(Count.OPERATIONS)
        self._client.close()

    def read(self, hashed: Chain) -> int:
        """Copy what is there and compare it; how much of it was right."""
        meant = payloads_of(hashed)
        copies = [np.zeros_like(payload) for payload in meant]
        with self._namespace.acquire(hashed, wait_seconds=self._random.choice((0.0, 0.3))) as lease:
            promised = lease.blocks
            self._dawdle()
            valid = lease.copy_out(copies)
        self._count_outcome(lease.outcome)
        for at in range(promised):
            if not np.array_equal(copies[at], meant[at]):
                self._count(Count.WRONG_BLOCKS if at < valid else Count.STALE_BLOCKS)
        self._count(Count.READ_BLOCKS, valid)
        self._count(Count.SHORTENED, int(valid < promised))
        return valid

    def write(self, hashed: Chain, first_block: int = 0) -> None:
        with self._namespace.write(hashed, first_block=first_block) as staged:
            meant = payloads_of(hashed)[first_block:]
            yours = [
                payload for payload, is_ in zip(meant, staged.status, strict=True) if str(is_) == "yours"
            ]
            for place, payload in zip(staged.payloads, yours, strict=True):
                half = len(payload) // 2
                place[:half] = payload[:half]
                self._dawdle()
                place[half:] = payload[half:]
        self._count_outcome(staged.outcome)
        self._count(Count.WRITTEN_BLOCKS, staged.committed_blocks)

    def extend(self, hashed: Chain) -> None:
        """As an engine: what is there is read, what follows it is computed and written."""
        self.write(hashed, self.read(hashed))

    def give_up(self, hashed: Chain) -> None:
        """Fill the slots with what is no block's payload, and think better of it."""
        staged = self._namespace.write(hashed)
        for place in staged.payloads:
            place[:] = _NOBODYS_BYTE
        staged.abort()
        self._count_outcome(staged.outcome)

    def oversleep(self, hashed: Chain) -> None:
        """Go on writing after the deadline, before looking at the clock."""
        with self._namespace.write(hashed) as staged:
            time.sleep(_OVERSLEEP_SECONDS)
            for place in staged.payloads:
                place[:] = _NOBODYS_BYTE
        self._count(Count.OVERSLEPT, int(staged.outcome is Outcome.LOST))

    def look_up(self, hashed: Chain) -> None:
        self._count_outcome(self._namespace.lookup(hashed).outcome)

    def lose_a_lease(self, hashed: Chain) -> None:
        """Acquire, and forget about it: the lease runs out by itself."""
        self._count_outcome(self._namespace.acquire(hashed).outcome)

    def _prompt(self) -> Chain:
        number = int(PROMPTS * self._random.random() ** 3)
        return chain(number, self._random.randint(1, BLOCKS_MAX), SHARED_BLOCKS)

    def _dawdle(self) -> None:
        if self._random.random() < 0.02:
            time.sleep(self._random.uniform(0.0, _HOLD_SECONDS_MAX))

    def _count_outcome(self, outcome: Outcome) -> None:
        if outcome is not Outcome.OK:
            self._count(Count.TURNED_AWAY)
            if outcome is Outcome.UNREACHABLE:
                time.sleep(_AWAY_SECONDS)  # calls fail at once meanwhile

    def _count(self, count: Count, amount: int = 1) -> None:
        self._tally.add(self._place, count, amount)


def main() -> None:
    address, path, workers, place, seed = sys.argv[1:]
    Worker(address, Tally(Path(path), int(workers)), int(place), int(seed)).run()


if __name__ == "__main__":
    main()
