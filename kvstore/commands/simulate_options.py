"""The options of ``simulate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstore.commands.groups import FieldGroup

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE",
        help="JSON lines with hash_ids (Mooncake) or token_ids, or a server's recording, plain or gzipped; "
        "several are one trace",
    ),
]


@dataclass(frozen=True, slots=True)
class SimulateOptions(FieldGroup):
    """Which policies and capacities, on how many instances, and what is to be told."""

    policy: Annotated[
        str, typer.Option(help="Comma-separated eviction policies, such as lru,reuse; or all")
    ] = "lru"
    capacity: Annotated[
        str,
        typer.Option(
            help="Comma-separated capacities of an instance: blocks, such as 500, 30k or unlimited; or "
            "sizes, such as 64GiB, which need --model or --bytes-per-token, or a server's recording"
        ),
    ] = "1k,3k,10k,30k,100k,unlimited"
    recommend: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Instead of --capacity: the least that hits this share of what an unlimited cache hits",
        ),
    ] = None
    idle_ttl: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="After which a block that nobody used leaves, such as 30m, as idle_ttl_seconds of a server; "
            "default: none",
        ),
    ] = None
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block, where a trace has token_ids")] = (
        16
    )
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="Whose KV cache fills the sizes: a folder with a config.json, or a name in the local "
            "Hugging Face cache",
        ),
    ] = None
    bytes_per_token: Annotated[int | None, typer.Option(min=1, help="Of KV cache; instead of --model")] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw hit share against capacity into this .png or .svg; needs the extra plot",
        ),
    ] = None
    instances: Annotated[
        int, typer.Option(min=1, help="Caches of that capacity each", rich_help_panel="Instances")
    ] = 1
    routing: Annotated[
        str,
        typer.Option(
            help="Who gets a request: round_robin, all in turn; session, who had its session before; prefix, "
            "who has most of its prompt",
            rich_help_panel="Instances",
        ),
    ] = "round_robin"
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="CAPACITY",
            help="Of one tier below all instances; default: none",
            rich_help_panel="Instances",
        ),
    ] = None
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=0, help="Tell times to first token at this rate", rich_help_panel="Time to first token"
        ),
    ] = None
    prefill_seconds_per_pair: Annotated[
        float,
        typer.Option(
            min=0,
            help="What a token takes more for each token before it, in attention",
            rich_help_panel="Time to first token",
        ),
    ] = 0.0
    load_bytes_per_second: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="At which hits are loaded, such as 20GB; needs --model or --bytes-per-token; default: "
            "at once",
            rich_help_panel="Time to first token",
        ),
    ] = None
