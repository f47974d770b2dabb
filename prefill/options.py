"""The options of ``prefill serve``: one for each setting of the worker, and those of its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from kvstore.commands.groups import OptionGroup
from kvstore.config import Config
from kvstore.settings import load_config
from prefill.config import STORE_SETTINGS, ServeConfig, describe_default

_FILE = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file of the store's settings; KVSTORE_* and options override it"),
]


@dataclass(frozen=True, slots=True)
class ServeOptions(OptionGroup):
    """What was given on the command line, by field name; None where nothing was."""

    file: Path | None
    worker: Mapping[str, str | None]
    store: Mapping[str, str | None]

    @classmethod
    def parameters(cls) -> list[Parameter]:
        shown = {row.field: row.value for row in load_config(environ={}, overrides={}).describe()}
        shown["pool_path"] = "/dev/shm/prefix-kvstore-ROLE.pool"
        worker = [
            _option(name, info.description, describe_default(name), "Worker")
            for name, info in ServeConfig.model_fields.items()
        ]
        store = [
            _option(name, Config.model_fields[name].description, shown[name], "Store")
            for name in STORE_SETTINGS
        ]
        file = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=_FILE)
        return [*worker, file, *store]

    @classmethod
    def gather(cls, given: Mapping[str, Any]) -> Self:
        return cls(
            given["config"],
            {name: given[name] for name in ServeConfig.model_fields},
            {name: given[name] for name in STORE_SETTINGS},
        )


def _option(name: str, description: str | None, default: str, panel: str) -> Parameter:
    described = typer.Option(
        f"--{name.replace('_', '-')}",
        help=description,
        show_default=default,
        metavar="VALUE",
        rich_help_panel=panel,
    )
    annotation = Annotated[str | None, described]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
