"""A workload through one cache, and the capacity that reaches a target."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.simulate.counts import HitCounts, count_hits
from kvstore.simulate.instance import Instance, MakeEvictor
from kvstore.simulate.workload import Watch, Workload, each_request


def replay(
    workload: Workload, make_evictor: MakeEvictor, blocks: int | None, watch: Watch = each_request
) -> HitCounts:
    """Ask one cold cache of ``blocks`` blocks (None: unlimited) for every request, in order."""
    most = workload.distinct_blocks
    instance = Instance(make_evictor, workload, most if blocks is None else min(blocks, most))
    return count_hits(workload, [instance.serve(number) for number in watch(workload)])


def least_capacity(reaches: Callable[[int], bool], most: int) -> int:
    """The least capacity that ``reaches`` a target, which ``most`` blocks do.

    By bisection, to within 1 % of the answer; hit rates all but never fall where there is more room.
    """
    low, high = 0, most
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle
    return high
