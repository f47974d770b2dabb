"""Whether a server takes requests, and what each of its tiers says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvstore.block import TierName
from kvstore.tiers.base import TierStatus


class State(StrEnum):
    """What a server is doing; it takes requests while it is SERVING."""

    LOADING = "loading"
    SERVING = "serving"
    FAILING = "failing"
    """A background task died and is about to be started again."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests are welcome.

    A tier that is down is shown with its reason and changes nothing: it costs hits, never a request;
    to take the whole server out of service for it would cost all hits.
    """

    state: State
    tiers: Mapping[TierName, TierStatus]

    def as_json(self) -> dict[str, object]:
        """What /readyz says."""
        tiers = {
            str(tier): {"healthy": status.healthy, "reason": status.reason}
            for tier, status in self.tiers.items()
        }
        return {"ready": self.state is State.SERVING, "state": self.state, "tiers": tiers}
