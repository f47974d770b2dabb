"""Several caches behind a router, and a tier below them that all of them share."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from kvstore.simulate.expiring import ExpiringInstance
from kvstore.simulate.instance import Instance, MakeEvictor
from kvstore.simulate.workload import Watch, Workload, each_request


class Routing(StrEnum):
    """Who gets a request: all in turn; who had its session before; who has most of its prompt."""

    ROUND_ROBIN = "round_robin"
    SESSION = "session"
    PREFIX = "prefix"


class FleetPlan(NamedTuple):
    """So many instances, how requests find them, and the blocks of a shared tier below (0: none).

    ``idle_ttl_seconds`` is the time to live of blocks in the instances, not in the tier below.
    """

    instances: int = 1
    routing: Routing = Routing.ROUND_ROBIN
    shared_blocks: int = 0
    idle_ttl_seconds: float | None = None

    def instance(self, make_evictor: MakeEvictor, workload: Workload, blocks: int) -> Instance:
        if self.idle_ttl_seconds is None:
            return Instance(make_evictor, workload, blocks)
        return ExpiringInstance(make_evictor, workload, blocks, self.idle_ttl_seconds)


_ALONE = FleetPlan()


class Fleet:
    """Instances of ``blocks`` blocks each, asked for requests in the order of the workload.

    A request is computed by one instance, which keeps its blocks. The shared tier sees every request
    and keeps what is computed too, so a hit is the longer one of the two runs.
    """

    def __init__(self, make_evictor: MakeEvictor, workload: Workload, blocks: int, plan: FleetPlan) -> None:
        self._locals = [plan.instance(make_evictor, workload, blocks) for _ in range(plan.instances)]
        self._shared = Instance(make_evictor, workload, plan.shared_blocks) if plan.shared_blocks else None
        self._routing = plan.routing
        self._workload = workload
        self._served = [0] * plan.instances
        self._dealt = 0
        self._last_served = np.full(workload.distinct_blocks, -1, dtype=np.int64)
        self._lengths: list[int] = []
        self._places: list[int] = []

    def serve(self, number: int) -> tuple[int, int]:
        """(Hit blocks of a request, those of them that its own instance had)."""
        place = self._place(number)
        self._served[place] += 1
        own = self._locals[place].serve(number)
        below = self._shared.serve(number) if self._shared is not None else 0
        return max(own, below), own

    def _place(self, number: int) -> int:
        if len(self._locals) == 1:
            return 0
        if self._routing is Routing.PREFIX:
            return self._by_prefix(number)
        if self._routing is Routing.SESSION:
            return self._by_session(number)
        return self._deal()

    def _deal(self) -> int:
        self._dealt += 1
        return (self._dealt - 1) % len(self._locals)

    def _by_prefix(self, number: int) -> int:
        """Who has more than half of the prompt, the most first; else who served the fewest requests."""
        runs = [instance.resident_run(number) for instance in self._locals]
        most = max(runs)
        if 2 * most > len(self._workload.blocks[number]):
            return runs.index(most)
        return self._served.index(min(self._served))

    def _by_session(self, number: int) -> int:
        """A prompt with more than half of an earlier one in it goes on from that, and goes to the same place.

        A router knows this by a session's name; a trace has none.
        """
        ids = self._workload.blocks[number]
        before = self._last_served[ids]
        depth = int(np.count_nonzero(before >= 0))
        earlier = int(before[depth - 1]) if depth else -1
        follows = earlier >= 0 and 2 * depth > self._lengths[earlier]
        place = self._places[earlier] if follows else self._deal()
        self._last_served[ids] = len(self._places)
        self._places.append(place)
        self._lengths.append(len(ids))
        return place


class FleetHits(NamedTuple):
    """Hit blocks by request: in all, and of those the ones that the request's own instance had."""

    hit: list[int]
    own: list[int]


def replay_fleet(
    workload: Workload,
    make_evictor: MakeEvictor,
    blocks: int | None,
    plan: FleetPlan = _ALONE,
    watch: Watch = each_request,
) -> FleetHits:
    """Ask cold instances of ``blocks`` blocks each (None: unlimited) for every request, in order."""
    most = workload.distinct_blocks
    fleet = Fleet(make_evictor, workload, most if blocks is None else min(blocks, most), plan)
    served = [fleet.serve(number) for number in watch(workload)]
    return FleetHits([hit for hit, _ in served], [own for _, own in served])
