"""``lookup`` and ``explain``: what is cached of a prompt, and why the rest is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvstore.block import Shard, TierName
from kvstore.commands.causes import BEING_WRITTEN, words_of
from kvstore.commands.output import (
    Answer,
    Grid,
    Part,
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
)
from kvstore.errors import ConfigError
from kvstore.service.client.messages import LookupResult
from kvstore.service.codec import TIERS
from kvstore.service.operator import Operator, PromptQuery
from kvstore.service.reports import BlockReport, Explanation


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks [first, last] that are in the same tiers, or missing for the same cause."""

    first: int
    last: int
    tiers: tuple[TierName, ...]
    cause: str
    being_written: bool
    payload_bytes: int
    oldest_seconds: float | None
    idlest_seconds: float | None

    @property
    def where(self) -> str:
        if self.tiers:
            return ", ".join(self.tiers)
        return "being written" if self.being_written else "missing"

    @property
    def why(self) -> str:
        """The cause in words; empty where a tier has the blocks."""
        if not self.cause:
            return ""
        words = words_of(self.cause)
        return f"{self.cause}: {words.why}" if words else self.cause


def parse_tiers(names: Sequence[str] | None, among: Sequence[TierName] = tuple(TIERS)) -> list[TierName]:
    """The tiers that ``--tier`` names; ConfigError for one that is not ``among`` those that can be named."""
    for name in names or ():
        if name not in set(among):
            raise ConfigError(
                f"--tier is {name!r}, expected {', '.join(among)}; correct it, or leave it out for all"
            )
    return list(map(TierName, names or ()))


def parse_shard(text: str | None) -> Shard | None:
    """A shard as it is written in keys: tp rank, tp size, pp rank, pp size with dots between."""
    if text is None:
        return None
    parts = text.split(".")
    if len(parts) == len(Shard._fields) and all(part.isascii() and part.isdigit() for part in parts):
        shard = Shard(*map(int, parts))
        if shard.tp_rank < shard.tp_size and shard.pp_rank < shard.pp_size:
            return shard
    raise ConfigError(
        f"--shard is {text!r}, expected tp rank, tp size, pp rank and pp size, such as 0.2.0.1 for the "
        "first of two tensor-parallel ranks; ranks count from 0"
    )


def look_up(
    operator: Operator, prompt: PromptQuery, tiers: Sequence[TierName], max_blocks: int
) -> tuple[int, Answer]:
    """Tokens that are cached, too."""
    report = operator.lookup(prompt, tiers=tiers, max_blocks=max_blocks)
    return report.matched_tokens, Answer(_lookup_facts(prompt, report), _lookup_parts(prompt, report))


def explain(operator: Operator, prompt: PromptQuery, shard: Shard | None) -> Answer:
    explanation = operator.explain(prompt, shard)
    runs = list(runs_of(explanation.blocks))
    return Answer(_explain_facts(prompt, explanation, runs), _explain_parts(prompt, explanation, runs))


def runs_of(blocks: Sequence[BlockReport]) -> Iterator[Run]:
    """The blocks in as few runs as say the same."""
    for (tiers, cause, being_written), group in groupby(
        blocks, key=lambda block: (block.tiers, block.cause, block.being_written)
    ):
        members = list(group)
        yield Run(
            members[0].index,
            members[-1].index,
            tiers,
            cause,
            being_written,
            sum(block.payload_bytes for block in members),
            max((block.age_seconds for block in members if block.age_seconds is not None), default=None),
            max((block.idle_seconds for block in members if block.idle_seconds is not None), default=None),
        )


def _lookup_facts(prompt: PromptQuery, report: LookupResult) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt.tokens,
        "block_size": report.block_size,
        "prompt_blocks": report.prompt_blocks,
        "blocks_read": report.blocks_read,
        "matched_tokens": report.matched_tokens,
        "verified_tokens": report.verified_tokens,
        "tiers": [
            {
                "tier": tier.tier,
                "served_tokens": tier.served_tokens,
                "leading_tokens": tier.leading_tokens,
            }
            for tier in report.tiers
        ],
    }


def _lookup_parts(prompt: PromptQuery, report: LookupResult) -> list[Part]:
    matched, tokens = report.matched_tokens, prompt.tokens
    asked = f"prompt: {_size_of(prompt, report.prompt_blocks, report.block_size)}"
    if report.blocks_read < report.prompt_blocks:
        asked += f", of which {format_count(report.blocks_read)} were looked at"
    cached = f"cached: {counted(matched, 'token')} ({format_share(matched, tokens)})"
    if matched:
        cached += f", {format_count(report.verified_tokens)} of them with their token ids compared"
    elif tokens:
        cached += "; `kvstore explain` with the same arguments says why"
    rows = [
        (
            tier.tier.value,
            format_count(tier.served_tokens),
            "not asked" if tier.leading_tokens is None else format_count(tier.leading_tokens),
        )
        for tier in report.tiers
    ]
    return [asked, cached, Grid(("tier", "tokens served", "leading run in it alone"), rows)]


def _explain_facts(prompt: PromptQuery, explanation: Explanation, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt.tokens,
        "block_size": explanation.block_size,
        "leading_blocks": leading_blocks(runs),
        "tail_tokens": explanation.tail_tokens,
        "advice": advice(runs),
        "runs": [
            {
                "first": run.first,
                "last": run.last,
                "tiers": list(run.tiers),
                "cause": run.cause,
                "being_written": run.being_written,
            }
            for run in runs
        ],
        "blocks": [
            {
                "index": block.index,
                "hash": block.block_hash.hex(),
                "tiers": list(block.tiers),
                "cause": block.cause,
                "being_written": block.being_written,
                "payload_bytes": block.payload_bytes,
                "age_seconds": block.age_seconds,
                "idle_seconds": block.idle_seconds,
            }
            for block in explanation.blocks
        ],
    }


def leading_blocks(runs: Sequence[Run]) -> int:
    """Blocks of the leading run that is in any tier: what a request would hit."""
    count = 0
    for run in runs:
        if not run.tiers:
            break
        count = run.last + 1
    return count


def advice(runs: Sequence[Run]) -> dict[str, str]:
    """What to do about the blocks that no tier has, by cause."""
    told = {}
    for run in runs:
        if run.being_written and not run.tiers:
            told["being written"] = BEING_WRITTEN.remedy
        elif words := words_of(run.cause):
            told[run.cause] = words.remedy
    return told


def _explain_parts(prompt: PromptQuery, explanation: Explanation, runs: Sequence[Run]) -> list[Part]:
    blocks, size = len(explanation.blocks), explanation.block_size
    rows = [
        (
            f"{run.first}-{run.last}" if run.first < run.last else str(run.first),
            run.where,
            run.why,
            format_bytes(run.payload_bytes) if run.tiers else "",
            _age(run.oldest_seconds),
            _age(run.idlest_seconds),
        )
        for run in runs
    ]
    lines: list[Part] = [f"prompt: {_size_of(prompt, blocks, size)}"]
    if rows:
        lines.append(Grid(("blocks", "where", "why not", "bytes", "age", "idle"), rows))
    if explanation.tail_tokens:
        lines.append(
            f"tail: {counted(explanation.tail_tokens, 'token')} past the last whole block, always computed"
        )
    usable = leading_blocks(runs) * size
    lines.append(
        f"usable: {counted(usable, 'token')} ({format_share(usable, prompt.tokens)}), the leading run"
    )
    lines += [f"what to do, {cause}: {remedy}" for cause, remedy in advice(runs).items()]
    return lines


def _size_of(prompt: PromptQuery, blocks: int, block_size: int) -> str:
    return f"{counted(prompt.tokens, 'token')}, {counted(blocks, 'block')} of {block_size}"


def _age(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
