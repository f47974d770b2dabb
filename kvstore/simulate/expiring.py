"""An instance whose blocks have a time to live, as a server's with ``idle_ttl_seconds``."""

from __future__ import annotations

import numpy as np

from kvstore.block import SlotArray
from kvstore.evict.expiry import Expiry, FlatAges
from kvstore.simulate.instance import Instance, MakeEvictor
from kvstore.simulate.workload import Workload


class ExpiringInstance(Instance):
    """Lets blocks go that no request has used for ``idle_ttl_seconds``, by the sweeps of the server.

    It sweeps when it is asked, so what it says of a request is what a server would that had swept just then.
    """

    def __init__(
        self, make_evictor: MakeEvictor, workload: Workload, blocks: int, idle_ttl_seconds: float
    ) -> None:
        super().__init__(make_evictor, workload, blocks)
        size = workload.distinct_blocks
        self._ages = FlatAges(self._resident[:size], np.zeros(size))
        self._expiry = Expiry(idle_ttl_seconds, self._occupancy, self._ages)

    def resident_run(self, number: int) -> int:
        now = self._workload.requests[number].time
        while self._expiry.behind(now):
            self._let_go(self._expiry.due(now))
        return super().resident_run(number)

    def serve(self, number: int) -> int:
        hits = super().serve(number)
        self._ages.used_at[self._workload.blocks[number]] = self._workload.requests[number].time
        return hits

    def _let_go(self, idle: SlotArray) -> None:
        self._evictor.forget(idle)
        self._resident[idle] = False
        parents = self._occupancy.parent[idle]
        # What goes with its children needs no count.
        np.subtract.at(self._occupancy.children, parents[self._resident[parents]], 1)
        self._free += len(idle)
