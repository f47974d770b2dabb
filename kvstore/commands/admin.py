"""``namespaces``, ``clear``, ``pin``, ``unpin``, ``quota`` and ``prefetch``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvstore.block import TierName
from kvstore.commands.lookup import parse_tiers
from kvstore.commands.output import (
    Answer,
    Grid,
    Part,
    counted,
    format_bytes,
    format_count,
    format_share,
)
from kvstore.errors import ConfigError
from kvstore.quantity import parse_bytes
from kvstore.service.operator import Operator, PromptQuery
from kvstore.service.reports import NamespaceReport

_IN_REDIS = "what Redis has, if there is one, stays: it forgets a block redis_ttl_seconds after its last use"


def list_namespaces(operator: Operator) -> Answer:
    reports = operator.namespaces()
    if not reports:
        return Answer({"namespaces": []}, ["no namespace is known yet: no client has registered one"])
    tenants = any(report.tenant for report in reports)
    headings = ["model", "weights", "dtype", "layout", "block", "adapter", "blocks", "bytes", "namespace"]
    rows = [_row(report) for report in reports]
    if tenants:
        headings.insert(0, "tenant")
        rows = [[report.tenant, *row] for report, row in zip(reports, rows, strict=True)]
    facts = {"namespaces": [_facts(report) for report in reports]}
    return Answer(facts, [Grid(headings, rows)])


def tiers_to_clear(names: Sequence[str] | None) -> list[TierName]:
    """The tiers in memory that ``--tier`` names."""
    if TierName.REDIS in (names or ()):
        raise ConfigError(
            "--tier is 'redis', which is not cleared: it forgets by its time to live; name device or host, "
            "or leave it out for both"
        )
    return parse_tiers(names, (TierName.DEVICE, TierName.HOST))


def clear(operator: Operator, namespace: bytes, tiers: Sequence[TierName]) -> Answer:
    cleared = operator.clear(namespace=namespace, tiers=tiers)
    parts: list[Part] = [f"forgot {counted(cleared.blocks, 'block')}"]
    if not tiers:
        parts.append(_IN_REDIS)
    if cleared.held_blocks:
        parts.append(f"{counted(cleared.held_blocks, 'block')} stayed, since leases or pins hold them")
    return Answer({"blocks": cleared.blocks, "held_blocks": cleared.held_blocks}, parts)


def pin(operator: Operator, name: str, prompt: PromptQuery) -> tuple[int, Answer]:
    """Tokens that are kept, too."""
    tokens = operator.pin(name, prompt)
    share = format_share(tokens, prompt.tokens)
    text = f"{name} keeps {format_count(tokens)} of {counted(prompt.tokens, 'token')} ({share})"
    return tokens, Answer({"name": name, "tokens": tokens, "prompt_tokens": prompt.tokens}, [text])


def unpin(operator: Operator, name: str) -> tuple[bool, Answer]:
    """Whether there was such a pin, too."""
    found = operator.unpin(name)
    text = f"{name} keeps nothing any more" if found else f"there is no pin {name}"
    return found, Answer({"name": name, "found": found}, [text])


def list_quotas(operator: Operator) -> Answer:
    """What each tenant is guaranteed and has."""
    tenants = operator.status().tenants
    facts = {"tenants": [asdict(tenant) for tenant in tenants]}
    if not tenants:
        return Answer(facts, ["the server has no tenants; tenants_file names them"])
    rows = [(each.name, format_bytes(each.share_bytes), format_bytes(each.ready_bytes)) for each in tenants]
    return Answer(facts, [Grid(("tenant", "guaranteed", "has"), rows)])


def set_quota(operator: Operator, tenant: str, share: str) -> Answer:
    """Guarantee a tenant a share of the pool, until the server ends."""
    share_bytes = _parse_share(share)
    operator.set_quota(tenant, share_bytes)
    text = (
        f"{tenant} is guaranteed {format_bytes(share_bytes)} until the server ends or reads its tenants_file "
        "again; share_bytes in that file is for longer"
    )
    return Answer({"tenant": tenant, "share_bytes": share_bytes}, [text])


def is_agreed(what: str) -> bool:
    """Whether the person at the terminal wants ``what`` cleared; ConfigError where there is none."""
    if not sys.stdin.isatty():
        raise ConfigError(f"clearing {what} needs --yes where nobody can be asked; add it")
    # Not typer.confirm: it leaves a space on stdout, where --json promises one object and nothing else.
    sys.stderr.write(f"Forget all blocks of {what} in memory that nobody holds? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def prefetch(operator: Operator, prompt: PromptQuery, wait_seconds: float) -> Answer:
    done = operator.prefetch(prompt, wait_seconds=wait_seconds)
    text = (
        f"{format_count(done.resident_tokens)} of {counted(prompt.tokens, 'token')} "
        f"({format_share(done.resident_tokens, prompt.tokens)}) are in memory"
    )
    parts: list[Part] = [text]
    if done.pending:
        parts.append("more may be on its way from redis; ask again, or wait with --wait SECONDS")
    facts = {
        "prompt_tokens": prompt.tokens,
        "resident_tokens": done.resident_tokens,
        "pending": done.pending,
    }
    return Answer(facts, parts)


def _parse_share(text: str) -> int:
    if text == "0":
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"SIZE is {text!r}, {error}; 0 takes the guarantee back") from error


def _row(report: NamespaceReport) -> list[str]:
    namespace = report.spec.namespace
    blocks = ", ".join(f"{format_count(count)} {tier}" for tier, count in report.blocks.items() if count)
    return [
        namespace.model,
        namespace.weights_id,
        namespace.kv_dtype,
        namespace.layout,
        str(namespace.block_size),
        namespace.adapter or "",
        blocks or "0",
        format_bytes(report.payload_bytes),
        report.root.hex(),
    ]


def _facts(report: NamespaceReport) -> dict[str, Any]:
    namespace, shape = report.spec.namespace, report.spec.namespace.kv_shape
    return {
        "namespace": report.root.hex(),
        "tenant": report.tenant,
        "model": namespace.model,
        "weights_id": namespace.weights_id,
        "kv_dtype": namespace.kv_dtype,
        "layout": namespace.layout,
        "block_size": namespace.block_size,
        "layers": shape.layers,
        "planes": shape.planes,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "adapter": namespace.adapter,
        "algorithm": namespace.algorithm,
        "format_version": namespace.format_version,
        "blocks": {tier.value: count for tier, count in report.blocks.items()},
        "payload_bytes": report.payload_bytes,
    }
