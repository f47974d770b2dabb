"""``status``: how a server is, once or again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from rich.live import Live

from kvstore.block import TierName
from kvstore.commands.output import (
    Answer,
    Grid,
    Part,
    counted,
    epoch_text,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
    render,
    show,
    stdout_console,
)
from kvstore.service.client.options import CallError, Outcome
from kvstore.service.operator import Operator
from kvstore.service.reports import NamespaceReport, ServerStatus, TierReport

_POOL_STATES = {
    "ready": "ready_bytes",
    "of it leased": "leased_bytes",
    "of it never read": "unread_bytes",
    "staged": "staged_bytes",
    "quarantined": "quarantined_bytes",
    "free": "free_bytes",
    "reserved": "reserved_bytes",
    "limit": "limit_bytes",
}


_BUSIEST_MAX = 5


class Seen(NamedTuple):
    """How a server is, and what it holds."""

    status: ServerStatus
    namespaces: Sequence[NamespaceReport]

    @classmethod
    def of(cls, operator: Operator) -> Seen:
        """Ask a server."""
        return cls(operator.status(), operator.namespaces())


def answer_of(seen: Seen, before: ServerStatus | None = None) -> Answer:
    """What was ``seen`` and, where there is a status ``before``, the hit rate since then."""
    status, busiest = seen.status, _busiest(seen.namespaces)
    parts = [*_head(status), *_tables(status), *_namespaces(busiest), *_what_if(status)]
    return Answer(_facts(status, busiest), [*parts, *_recent(status, before)])


def is_healthy(status: ServerStatus) -> bool:
    return all(tier.healthy for tier in status.tiers)


def watch_status(
    operator: Operator, seconds: float, sleep: Callable[[float], None], *, as_json: bool
) -> None:
    """Show the status every ``seconds`` until interrupted, also while the server is away for a time.

    With ``as_json`` one object a line, ``{"error": ...}`` while it is away.
    """
    before: ServerStatus | None = None
    with _screen(as_json=as_json) as show_next:
        while True:
            try:
                seen = Seen.of(operator)
            except CallError as error:
                if error.outcome is not Outcome.UNREACHABLE:
                    raise
                show_next(Answer({"error": str(error)}, [str(error)]))
            else:
                show_next(answer_of(seen, before))
                before = seen.status
            sleep(seconds)


@contextmanager
def _screen(*, as_json: bool) -> Iterator[Callable[[Answer], None]]:
    """Where answers replace each other on a terminal, and follow each other elsewhere."""
    console = stdout_console()
    if as_json or not console.is_terminal:
        yield partial(show, as_json=as_json)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        yield lambda answer: live.update(render(answer.parts, console), refresh=True)


def _busiest(namespaces: Sequence[NamespaceReport]) -> list[NamespaceReport]:
    """Those with most bytes in memory, of those that have any."""
    resident = [report for report in namespaces if report.payload_bytes]
    return sorted(resident, key=lambda report: report.payload_bytes, reverse=True)[:_BUSIEST_MAX]


def _facts(status: ServerStatus, busiest: Sequence[NamespaceReport]) -> dict[str, Any]:
    return {
        **asdict(status),
        "epoch": epoch_text(status.epoch),
        "healthy": is_healthy(status),
        "busiest_namespaces": [
            {
                "namespace": report.root.hex(),
                "tenant": report.tenant,
                "model": report.spec.namespace.model,
                "blocks": {tier.value: count for tier, count in report.blocks.items()},
                "payload_bytes": report.payload_bytes,
            }
            for report in busiest
        ],
    }


def _head(status: ServerStatus) -> list[str]:
    return [
        f"prefix-kvstore {status.version}, up {format_seconds(status.uptime_seconds)}, epoch {status.epoch}",
        f"pool {status.pool_path}, {counted(status.adopted_blocks, 'block')} adopted",
        f"{counted(status.clients, 'client')} with {counted(status.leases, 'lease')} and "
        f"{counted(status.writes, 'write')}, {counted(status.namespaces, 'namespace')}",
    ]


def _tables(status: ServerStatus) -> list[Part]:
    parts: list[Part] = [*map(_state, status.tiers), _memory(status.tiers)]
    rows = [("asked", format_count(status.asked_tokens), "")]
    hits = [(f"hit in {tier}", status.hit_tokens[tier]) for tier in TierName if tier in status.hit_tokens]
    misses = [(f"missed: {cause}", tokens) for cause, tokens in status.miss_tokens.items() if tokens]
    rows += [
        (what, format_count(tokens), format_share(tokens, status.asked_tokens))
        for what, tokens in (*hits, *sorted(misses, key=itemgetter(1), reverse=True))
    ]
    parts.append(Grid(("since the start", "tokens", "share"), rows))
    if status.tenants:
        tenants = [
            (tenant.name, format_bytes(tenant.share_bytes), format_bytes(tenant.ready_bytes))
            for tenant in status.tenants
        ]
        parts.append(Grid(("tenant", "guaranteed", "has"), tenants))
    if status.pins:
        pins = [
            (pin.name, pin.tenant, format_count(pin.tokens), format_bytes(pin.payload_bytes))
            for pin in status.pins
        ]
        parts.append(Grid(("pin", "tenant", "tokens", "bytes"), pins))
    return parts


def _namespaces(busiest: Sequence[NamespaceReport]) -> list[Part]:
    rows = [
        (
            report.spec.namespace.model,
            report.tenant,
            format_count(sum(report.blocks.values())),
            format_bytes(report.payload_bytes),
        )
        for report in busiest
    ]
    return [Grid(("busiest namespaces", "tenant", "blocks", "bytes"), rows)] if rows else []


def _what_if(status: ServerStatus) -> list[Part]:
    """What memory alone would hit at other sizes, estimated; the present size is there to compare with."""
    rows = [
        (
            f"{each.scale:g} times as large",
            format_bytes(each.capacity_bytes),
            format_share(each.hit_tokens, each.asked_tokens),
        )
        for each in status.what_if
    ]
    return [Grid(("what if the pool were", "bytes", "hit"), rows)] if rows else []


def _state(tier: TierReport) -> str:
    if tier.healthy:
        return f"{tier.tier}: {tier.reason or 'up'}"
    return f"{tier.tier}: down, {tier.reason}" if tier.reason else f"{tier.tier}: down"


def _memory(tiers: Sequence[TierReport]) -> Grid:
    pools = {tier.tier.value: tier.pool for tier in tiers if tier.pool is not None}
    rows = [
        (label, *(format_bytes(getattr(pool, name)) for pool in pools.values()))
        for label, name in _POOL_STATES.items()
    ]
    return Grid(("memory", *pools), rows)


def _recent(status: ServerStatus, before: ServerStatus | None) -> list[str]:
    if before is None or before.epoch != status.epoch:
        return []
    asked = status.asked_tokens - before.asked_tokens
    hit = sum(status.hit_tokens.values()) - sum(before.hit_tokens.values())
    seconds = status.uptime_seconds - before.uptime_seconds
    since = f"in the last {format_seconds(seconds)}: {counted(asked, 'token')} asked"
    return [f"{since}, {format_share(hit, asked)} of them hit" if asked else since]
