"""The options that commands share, with what each says of itself in ``--help``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from kvstore.commands.groups import FieldGroup, OptionGroup
from kvstore.config import PREFILL_ONLY, Config
from kvstore.settings import load_config

_ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file of settings; KVSTORE_* and options override it"),
]
Tiers = Annotated[
    list[str] | None,
    typer.Option(metavar="TIER", help="device, host or redis; may be given again; default: all"),
]
MemoryTiers = Annotated[
    list[str] | None,
    typer.Option("--tier", metavar="TIER", help="device or host; may be given again; default: both"),
]
Rank = Annotated[
    str | None,
    typer.Option(
        metavar="TP.TP_SIZE.PP.PP_SIZE", help="Rank to look at, such as 0.2.0.1; default: the first one"
    ),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="EPOCH:SEQUENCE", help="Go on from an event that was printed; default: now"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else, on stdout")]

_ALSO = {"record_path": ("--record",)}
"""Shorter names that settings have as options, too."""
_SETTINGS = tuple(name for name in Config.model_fields if name not in PREFILL_ONLY)


@dataclass(frozen=True, slots=True)
class ConfigOptions(OptionGroup):
    """A file of settings, and an option for every field of ``Config`` that a server uses."""

    file: Path | None
    overrides: Mapping[str, str | None]

    @classmethod
    def parameters(cls) -> list[Parameter]:
        defaults = {row.field: row.value for row in load_config(environ={}, overrides={}).describe()}
        return [_option("config", _ConfigFile), *(_setting(name, defaults[name]) for name in _SETTINGS)]

    @classmethod
    def gather(cls, given: Mapping[str, Any]) -> Self:
        return cls(given["config"], {name: given[name] for name in _SETTINGS})


def flags_of(name: str) -> tuple[str, ...]:
    """The options of a setting, its own name first."""
    return (f"--{name.replace('_', '-')}", *_ALSO.get(name, ()))


def _option(name: str, annotation: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _setting(name: str, default: str) -> Parameter:
    described = typer.Option(
        *flags_of(name),
        help=Config.model_fields[name].description,
        show_default=default,
        metavar="VALUE",
        rich_help_panel="Settings",
    )
    return _option(name, Annotated[str | None, described])


@dataclass(frozen=True, slots=True)
class ServerOptions(FieldGroup):
    """Which server to ask, and how."""

    address: Annotated[
        str | None,
        typer.Option(
            help="unix:/path or host:port of the server; default: the first address that it is configured "
            "to listen on",
            rich_help_panel="Server",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File whose first line is the token to send, for a server with tenants; a prompt is "
            "then one of the token's own tenant, an admin's too",
            rich_help_panel="Server",
        ),
    ] = None
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Speak TLS; by itself where an option or the settings name a certificate",
            rich_help_panel="Server",
        ),
    ] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authorities to trust instead of the system's", rich_help_panel="Server"
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of this client's certificate", rich_help_panel="Server")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key", rich_help_panel="Server")] = None
    timeout: Annotated[
        str,
        typer.Option(help="How long to wait for an answer, such as 5s", rich_help_panel="Server"),
    ] = "5s"
    config: _ConfigFile = None


@dataclass(frozen=True, slots=True)
class PromptOptions(FieldGroup):
    """A prompt in one namespace, as it was given."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="File with the prompt's token ids, as a JSON list, as numbers between spaces, or packed "
            "uint32 little-endian when its name ends in .bin; - is stdin; with --tokenizer it is text",
            show_default=False,
        ),
    ] = None
    text: Annotated[
        str | None,
        typer.Option(help="The prompt itself; needs --tokenizer", rich_help_panel="Prompt"),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face id or local folder of the tokenizer; special tokens are added as it does "
            "by itself, a chat template is not applied",
            rich_help_panel="Prompt",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model whose namespace to ask", rich_help_panel="Prompt"),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="HEX",
            help="Root of the namespace, where a model has several",
            rich_help_panel="Prompt",
        ),
    ] = None
    request_salt: Annotated[
        str | None,
        typer.Option(help="Salt that the request carries, if any", rich_help_panel="Prompt"),
    ] = None
    tp_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tensor-parallel ranks, where the namespace has clients cut in several ways",
            rich_help_panel="Prompt",
        ),
    ] = None
    pp_size: Annotated[
        int | None,
        typer.Option(min=1, help="Pipeline-parallel ranks, likewise", rich_help_panel="Prompt"),
    ] = None
