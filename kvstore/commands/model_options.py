"""The options of ``size``: a model, or the shape of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvstore.commands.groups import FieldGroup


@dataclass(frozen=True, slots=True)
class ModelOptions(FieldGroup):
    """How much of which model's KV cache."""

    tokens: Annotated[int, typer.Option(min=1, help="Tokens to keep")] = 1_000_000
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="Folder with a config.json, or the name of a model in the local Hugging Face cache",
        ),
    ] = None
    replicas: Annotated[int, typer.Option(min=1, help="Servers that keep them, each in a pool")] = 1
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block")] = 16
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of the KV values; default: the model's, or bfloat16")
    ] = None
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of --model")] = None
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Instead of --model")] = None
    head_size: Annotated[int | None, typer.Option(min=1, help="Instead of --model")] = None
    planes: Annotated[
        int, typer.Option(min=1, max=2, help="With --layers: 1 where keys and values share a latent")
    ] = 2
