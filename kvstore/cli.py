"""The command line of the store: reads arguments and the environment, wires everything, prints.

What a command needs is imported by the command, so that ``kvstore --help`` and a completion load
little.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvstore.commands.groups import grouped
from kvstore.commands.model_options import ModelOptions
from kvstore.commands.options import (
    AsJson,
    ConfigOptions,
    MemoryTiers,
    PromptOptions,
    Rank,
    ServerOptions,
    Since,
    Tiers,
)
from kvstore.commands.output import show
from kvstore.commands.simulate_options import SimulateOptions, Traces
from kvstore.config import Config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.settings import LoadedConfig, load_config

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_messages = Console(stderr=True)
_NOTHING = 1
"""Exit status of a command that was answered, with nothing."""


def main() -> None:
    """Run the command line; an error is one message and status 2, Ctrl-C status 130."""
    try:
        app()
    except KVStoreError as error:
        _messages.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the flag's value
    if wanted:
        from kvstore.version import PACKAGE, installed_version

        sys.stdout.write(f"{PACKAGE} {installed_version()}\n")
        raise typer.Exit


@app.callback()
def _kvstore(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and end"),
    ] = False,
) -> None:
    """A store of the KV cache of prompt prefixes: the server, and what to ask it.

    Exit status: 0 done; 1 answered with nothing, as each command says; 2 an error, in one message on
    stderr; 130 after Ctrl-C.
    """


@app.command()
@grouped
def serve(config: ConfigOptions, *, as_json: AsJson = False) -> None:
    """Keep the store and serve it over gRPC until SIGTERM or Ctrl-C, then drain and end.

    Says where it listens once it serves: on stderr, or with --json on stdout as one object. SIGHUP has it
    read the tenants_file again.
    """
    loaded = _load(config)
    from kvstore.commands.serving import announce, failure_logged, log_settings, redis_beside
    from kvstore.logs import logging_to
    from kvstore.serve import Clocks, run

    told = loaded.config
    with logging_to(told.log_file, level=told.log_level, as_json=told.log_format == "json"):
        log_settings(loaded)
        with failure_logged(told.log_file), redis_beside(loaded) as settings:
            log_is_enough = told.log_format == "json" and told.log_file is None
            tell = partial(announce, as_json=as_json, log_is_enough=log_is_enough)
            run(settings, Clocks(time.monotonic, time.time), tell)


@app.command("config")
@grouped
def show_config(config: ConfigOptions, *, as_json: AsJson = False) -> None:
    """Show the settings that hold, with the source of each. Secrets are masked."""
    from kvstore.commands.settings import describe_config

    show(describe_config(_load(config)), as_json=as_json)


@app.command()
@grouped
def lookup(
    prompt: PromptOptions,
    server: ServerOptions,
    *,
    tier: Tiers = None,
    max_blocks: Annotated[int, typer.Option(min=0, help="Look at no more than these; 0 is no limit")] = 0,
    as_json: AsJson = False,
) -> None:
    """How much of a prompt is cached, and where.

    Changes nothing. Exit status 1: nothing of it is cached.
    """
    from kvstore.commands.connect import connect
    from kvstore.commands.lookup import look_up, parse_tiers
    from kvstore.commands.prompt import read_prompt

    query, tiers = read_prompt(prompt, _tokenizer), parse_tiers(tier)
    with connect(server, _settings_of(server)) as operator:
        matched_tokens, answer = look_up(operator, query, tiers, max_blocks)
    show(answer, as_json=as_json)
    sys.exit(0 if matched_tokens else _NOTHING)


@app.command()
@grouped
def explain(
    prompt: PromptOptions,
    server: ServerOptions,
    *,
    shard: Rank = None,
    as_json: AsJson = False,
) -> None:
    """Block by block, where a prompt is or why it is not.

    Changes nothing.
    """
    from kvstore.commands.connect import connect
    from kvstore.commands.lookup import explain, parse_shard
    from kvstore.commands.prompt import read_prompt

    query, rank = read_prompt(prompt, _tokenizer), parse_shard(shard)
    with connect(server, _settings_of(server)) as operator:
        answer = explain(operator, query, rank)
    show(answer, as_json=as_json)


@app.command()
@grouped
def status(
    server: ServerOptions,
    *,
    seconds: Annotated[
        str | None, typer.Argument(metavar="SECONDS", help="With --watch: how often; 2 when left out")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C; with --json one a line")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """How the server is: tiers, memory, leases, hits and misses.

    Exit status 1: a tier is down.
    """
    if seconds is not None and not watch:
        raise ConfigError(f"SECONDS is {seconds!r} without --watch; add it, or leave the number out")
    from kvstore.commands.connect import connect, seconds_of
    from kvstore.commands.status import Seen, answer_of, is_healthy, watch_status

    every = seconds_of("SECONDS", seconds or "2s")
    with connect(server, _settings_of(server)) as operator:
        if watch:
            watch_status(operator, every, time.sleep, as_json=as_json)
            return
        seen = Seen.of(operator)
    show(answer_of(seen), as_json=as_json)
    sys.exit(0 if is_healthy(seen.status) else _NOTHING)


@app.command()
@grouped
def namespaces(server: ServerOptions, *, as_json: AsJson = False) -> None:
    """List what the server knows: model, KV format, tenant, resident blocks."""
    from kvstore.commands.admin import list_namespaces
    from kvstore.commands.connect import connect

    with connect(server, _settings_of(server)) as operator:
        answer = list_namespaces(operator)
    show(answer, as_json=as_json)


@app.command()
@grouped
def clear(
    server: ServerOptions,
    *,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Root of the one namespace to clear, whosever it is; default: all"),
    ] = None,
    tier: MemoryTiers = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget all blocks in memory that nobody holds.

    Redis is not cleared: it forgets by its time to live. Asks first on a terminal, and needs --yes
    elsewhere. Exit status 1: the answer was no.
    """
    from kvstore.commands.admin import clear, is_agreed, tiers_to_clear
    from kvstore.commands.connect import connect
    from kvstore.commands.prompt import parse_namespace

    tiers, root = tiers_to_clear(tier), b"" if namespace is None else parse_namespace(namespace)
    if not yes and not is_agreed(f"namespace {namespace}" if namespace else "all namespaces"):
        sys.exit(_NOTHING)
    with connect(server, _settings_of(server)) as operator:
        answer = clear(operator, root, tiers)
    show(answer, as_json=as_json)


@app.command()
@grouped
def pin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Names the pin, for unpin")],
    prompt: PromptOptions,
    server: ServerOptions,
    *,
    as_json: AsJson = False,
) -> None:
    """Keep what is resident of a prompt until it is unpinned, or the server ends.

    Exit status 1: nothing of it is resident.
    """
    from kvstore.commands.admin import pin
    from kvstore.commands.connect import connect
    from kvstore.commands.prompt import read_prompt

    query = read_prompt(prompt, _tokenizer)
    with connect(server, _settings_of(server)) as operator:
        tokens, answer = pin(operator, name, query)
    show(answer, as_json=as_json)
    sys.exit(0 if tokens else _NOTHING)


@app.command()
@grouped
def unpin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pin")],
    server: ServerOptions,
    *,
    as_json: AsJson = False,
) -> None:
    """Let go of what a pin keeps.

    Exit status 1: there is no such pin.
    """
    from kvstore.commands.admin import unpin
    from kvstore.commands.connect import connect

    with connect(server, _settings_of(server)) as operator:
        found, answer = unpin(operator, name)
    show(answer, as_json=as_json)
    sys.exit(0 if found else _NOTHING)


@app.command()
@grouped
def quota(
    server: ServerOptions,
    *,
    tenant: Annotated[str | None, typer.Argument(metavar="TENANT", help="Whose share to set")] = None,
    size: Annotated[str | None, typer.Argument(metavar="SIZE", help="Such as 4GiB; 0: no guarantee")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the shares of the pool that tenants are guaranteed, or set one until the server ends."""
    if tenant is not None and size is None:
        raise ConfigError(f"TENANT is {tenant!r} without SIZE; add it, or leave both out to see all shares")
    from kvstore.commands.admin import list_quotas, set_quota
    from kvstore.commands.connect import connect

    with connect(server, _settings_of(server)) as operator:
        answer = list_quotas(operator) if tenant is None else set_quota(operator, tenant, size or "")
    show(answer, as_json=as_json)


@app.command()
@grouped
def events(
    server: ServerOptions,
    *,
    since: Since = None,
    count: Annotated[int, typer.Option(min=0, help="End after so many; 0 is no limit")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show blocks as they are stored and removed, until Ctrl-C; with --json one object a line."""
    from kvstore.commands.connect import connect
    from kvstore.commands.events import parse_cursor, watch_events

    cursor = parse_cursor(since)
    with connect(server, _settings_of(server)) as operator:
        for answer in watch_events(operator, cursor, count):
            show(answer, as_json=as_json)


@app.command()
@grouped
def prefetch(
    prompt: PromptOptions,
    server: ServerOptions,
    *,
    wait: Annotated[
        str | None, typer.Option(help="How long to wait for the blocks, such as 5s; default: not at all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bring a prompt's blocks from Redis into memory ahead of time."""
    from kvstore.commands.admin import prefetch
    from kvstore.commands.connect import connect, seconds_of
    from kvstore.commands.prompt import read_prompt

    query, seconds = read_prompt(prompt, _tokenizer), 0.0 if wait is None else seconds_of("--wait", wait)
    with connect(server, _settings_of(server)) as operator:
        answer = prefetch(operator, query, seconds)
    show(answer, as_json=as_json)


@app.command()
@grouped
def simulate(traces: Traces, options: SimulateOptions, *, as_json: AsJson = False) -> None:
    """Replay a trace and say what share of it would have been hit, for each policy and capacity."""
    from kvstore.commands.simulate import simulate

    draw = None if options.plot is None else _plotter(options.plot)
    answer = simulate(traces, options, os.environ, _messages)
    if draw is not None:
        draw(answer.facts)
    show(answer, as_json=as_json)


@app.command()
@grouped
def size(model: ModelOptions, *, as_json: AsJson = False) -> None:
    """What the KV cache of a model takes: a token, a block, a fleet's pools, and Redis. Asks no server."""
    from kvstore.commands.size import size

    show(size(model, os.environ), as_json=as_json)


def _load(options: ConfigOptions) -> LoadedConfig:
    return load_config(toml_path=options.file, environ=os.environ, overrides=options.overrides)


def _settings_of(server: ServerOptions) -> Callable[[], Config]:
    """The settings of this machine's server, read when they are asked for."""

    def load() -> Config:
        return load_config(toml_path=server.config, environ=os.environ, overrides={}).config

    return load


def _plotter(path: Path) -> Callable[[Mapping[str, Any]], None]:
    with _needing("matplotlib", f"--plot {path}", "leave the option out"):
        from kvstore.commands.plot import plotter
    return plotter(path)


def _tokenizer(name: str) -> Callable[[str], list[int]]:
    with _needing("transformers", f"--tokenizer {name}", "give token ids instead of text"):
        from kvstore.commands.tokenizer import load_tokenizer
    return load_tokenizer(name)


@contextmanager
def _needing(package: str, option: str, otherwise: str) -> Iterator[None]:
    """An import for an option that works only with a package that need not be there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"{option} needs {package}, which is not installed; `pip install {package}`, or {otherwise}"
        ) from error
