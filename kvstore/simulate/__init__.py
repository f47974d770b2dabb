"""Replay of a trace through the policies that the server runs: what each would have hit.

No bytes are moved. A hit is a leading run: a block counts only when all blocks before it are there.
"""

from kvstore.simulate.counts import HitCounts, Shares, Traffic, count_hits
from kvstore.simulate.fleet import Fleet, FleetHits, FleetPlan, Routing, replay_fleet
from kvstore.simulate.instance import Instance, MakeEvictor
from kvstore.simulate.policies import ORACLE, POLICIES
from kvstore.simulate.replay import least_capacity, replay
from kvstore.simulate.ttft import PrefillRates, TimesToFirstToken, times_to_first_token
from kvstore.simulate.workload import Watch, Workload, each_request

__all__ = [
    "ORACLE",
    "POLICIES",
    "Fleet",
    "FleetHits",
    "FleetPlan",
    "HitCounts",
    "Instance",
    "MakeEvictor",
    "PrefillRates",
    "Routing",
    "Shares",
    "TimesToFirstToken",
    "Traffic",
    "Watch",
    "Workload",
    "count_hits",
    "each_request",
    "least_capacity",
    "replay",
    "replay_fleet",
    "times_to_first_token",
]
