"""What the live page asks for: the present and the past, as JSON. The counts are those of /metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.web.history import Past, Values, number
from kvstore.web.readiness import Readiness

NAMESPACES_MAX = 10
"""So many of the largest are shown."""


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """What one namespace has in memory. Of its name only the model is shown: roots are secrets."""

    model: str
    block_size: int
    blocks: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Live:
    """The present. ``instance`` differs after a restart: counters began anew."""

    instance: str
    version: str
    uptime_seconds: float
    readiness: Readiness
    values: Values
    namespaces: Sequence[SpaceUse]
    """The largest ones, the largest first."""


def live_json(live: Live) -> bytes:
    """One object."""
    content = {
        "instance": live.instance,
        "version": live.version,
        "uptime_seconds": round(live.uptime_seconds, 3),
        **live.readiness.as_json(),
        "samples": [{**series.as_json(), "value": number(value)} for series, value in live.values.items()],
        "namespaces": [
            {
                "model": use.model,
                "block_size": use.block_size,
                "blocks": use.blocks,
                "bytes": use.payload_bytes,
            }
            for use in live.namespaces
        ],
    }
    return json.dumps(content).encode() + b"\n"


def past_json(instance: str, past: Past) -> bytes:
    """One object: ages in seconds, the oldest sample first, and the values of each series in this order.

    Written series by series: one call that encodes everything would keep the owner's loop from running.
    """
    ages = [round(age, 3) for age in past.ages_seconds]
    columns = b",\n".join(_columns(past))
    return b'{"instance": %s, "ages_seconds": %s, "series": [\n%s]}\n' % (
        json.dumps(instance).encode(),
        json.dumps(ages).encode(),
        columns,
    )


def _columns(past: Past) -> Iterator[bytes]:
    for at, series in enumerate(past.series):
        yield json.dumps({**series.as_json(), "values": past.column(at)}).encode()
