"""The command line of the prefill side: reads the environment, wires everything, prints."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hashing import HashingError
from kvstore.commands.groups import grouped
from kvstore.config import EMBEDDED_REDIS, Config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.settings import LoadedConfig, Source, load_config
from prefill.config import Started, config_for_role, load_serve_config
from prefill.errors import PrefillError
from prefill.options import ServeOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_messages = Console(stderr=True)
_DEMO_STEPS = 11
# A cache that is late costs hits, which is right for a service and would spoil a demonstration.
_DEMO_REDIS_SECONDS = 10.0
# Long enough for a slow machine; then nothing is left in the user's Redis.
_DEMO_TTL_SECONDS = 1800.0


def main() -> None:
    """Run the command line; an error is one message and status 2, SIGTERM an orderly end and status 143."""
    # Read when torch is loaded. Threads that spin while they wait gain nothing on an idle machine, and
    # beside one busy process they make a short step forty times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with _ended_by_sigterm():
            app()
    except (PrefillError, KVStoreError, HashingError) as error:
        _messages.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that files and processes go as they do at any other end."""

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut the clean-up short
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.callback()
def _prefill() -> None:
    """Prefill with cached prefixes."""


@app.command()
def demo(
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face id or local folder; default: the packaged SmolLM2-135M-Instruct"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, nothing else, on stdout")
    ] = False,
    redis_url: Annotated[
        str | None, typer.Option(help="A Redis or Valkey to use instead of one started for the demo, or none")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file of settings; KVSTORE_* and options override it"),
    ] = None,
) -> None:
    """Conversations over one document: hits from device, host and redis, checked against no cache."""
    overrides = {"redis_url": redis_url}
    settings = load_config(toml_path=config_file, environ=os.environ, overrides=overrides)

    from prefill.assemble import load_configured
    from prefill.demo.report import as_json as to_json
    from prefill.demo.report import as_table, is_identical
    from prefill.demo.run import Stage, run_demo

    _quiet_libraries()
    _warn_on_the_console()
    with _pool_folder(settings.config) as pools, _redis(settings) as url, _progress() as tell:
        tell("loading the model")
        loaded = load_configured(model, settings.config, _cache_dir())
        config = settings.config.model_copy(update={"redis_url": url, **_demo_settings(settings)})
        stage = Stage(loaded, model, pools, config, _device_bytes(settings), time.monotonic, tell)
        outcome = run_demo(stage)
    if as_json:
        print(json.dumps(to_json(outcome)))
    else:
        Console().print(as_table(outcome))
    sys.exit(0 if is_identical(outcome) else 1)


@app.command()
@grouped
def serve(
    options: ServeOptions,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where it serves as one JSON object on stdout")
    ] = False,
) -> None:
    """Serve a model over gRPC and an OpenAI-compatible API until SIGTERM or Ctrl-C, then drain and end.

    Every setting of a worker may also come as PREFILL_<NAME>, every one of the store as KVSTORE_<NAME>.
    """
    worker = load_serve_config(options.worker, os.environ)
    settings = load_config(toml_path=options.file, environ=os.environ, overrides=options.store)
    _quiet_libraries()

    from kvstore.commands.serving import log_settings, redis_beside
    from kvstore.logs import logging_to
    from prefill.assemble import load_configured
    from prefill.serve import Clocks, run
    from prefill.sidecar import what_is_not_shared

    told = settings.config
    with (
        logging_to(told.log_file, level=told.log_level, as_json=told.log_format == "json"),
        redis_beside(settings) as with_redis,
    ):
        log_settings(settings)
        unshared = what_is_not_shared(worker, told)
        if unshared is not None:
            logging.getLogger(__name__).warning("%s", unshared)
        config = config_for_role(with_redis, worker.role)
        run(
            config,
            worker,
            lambda: load_configured(worker.model, config, _cache_dir(), worker.dtype),
            Clocks(time.monotonic, time.time),
            partial(_announce, as_json=as_json),
        )


@app.command(hidden=True)
def demo_worker() -> None:
    """Run the job that is on stdin in this process and print its outcome."""
    from prefill.assemble import build_worker, load_configured
    from prefill.demo.job import Counts, Job, Outcome, run_batch, write_outcome

    job = Job.read(sys.stdin.read())
    config = load_config(environ=os.environ, overrides=job.settings).config
    _quiet_libraries()
    _warn_on_the_console()
    # The process that waits for this one has the same Redis, and has warned of it.
    logging.disable(logging.WARNING)
    counts = Counts()
    loaded = load_configured(job.model, config, _cache_dir())
    worker = build_worker(loaded, config, clock=time.monotonic, listeners=(counts,))
    try:
        results = run_batch(worker, job.prompts, time.monotonic, reuse=True)
    finally:
        worker.close(remove_pool=True)
    print(write_outcome(Outcome(results, counts)))


def _demo_settings(settings: LoadedConfig) -> dict[str, object]:
    """What a demonstration wants where the user has not chosen, and keys that meet nobody else's."""
    seconds = ("redis_probe_seconds", "redis_acquire_seconds")
    chosen: dict[str, object] = {
        name: _DEMO_REDIS_SECONDS for name in seconds if settings.sources[name] is Source.DEFAULT
    }
    prefix = f"{settings.config.redis_prefix}-demo-{uuid.uuid4().hex[:12]}"
    return {**chosen, "redis_prefix": prefix, "redis_ttl_seconds": _DEMO_TTL_SECONDS}


def _device_bytes(settings: LoadedConfig) -> int | None:
    """What the user chose, if anything."""
    chosen = settings.sources["device_bytes"] is not Source.DEFAULT
    return settings.config.device_bytes if chosen else None


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefix-kvstore"


@contextmanager
def _pool_folder(config: Config) -> Iterator[Path]:
    """A folder of the demo's own beside where the pool file would be, on the same tmpfs."""
    try:
        folder = tempfile.TemporaryDirectory(dir=config.pool_path.parent, prefix="prefix-kvstore-demo-")
    except OSError as error:
        raise ConfigError(
            f"pool_path is {config.pool_path}, whose folder cannot take files ({error.strerror}); "
            "choose a folder on a tmpfs that can be written to"
        ) from error
    with folder as name:
        yield Path(name)


@contextmanager
def _redis(settings: LoadedConfig) -> Iterator[str | None]:
    """The server that the user chose (None: none), or one for as long as the demo takes."""
    url = settings.config.redis_url
    if url != EMBEDDED_REDIS and settings.sources["redis_url"] is not Source.DEFAULT:
        yield url
        return
    from kvstore.tiers.redis_embedded import EmbeddedRedis

    server = EmbeddedRedis.start()
    try:
        yield server.url
    finally:
        server.close()


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; lines where nobody would see it move."""
    if not _messages.is_terminal:
        yield _tell_in_a_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_messages, transient=True) as progress:
        task = progress.add_task("starting", total=_DEMO_STEPS)

        def tell(step: str) -> None:
            progress.update(task, advance=1, description=step)

        yield tell


def _tell_in_a_line(step: str) -> None:
    _messages.print(step, highlight=False, soft_wrap=True)
    _messages.file.flush()


def _announce(started: Started, *, as_json: bool) -> None:
    """Where the worker serves: one object on stdout, or lines on stderr."""
    if as_json:
        print(json.dumps(asdict(started)), flush=True)
        return
    kind = f"{started.model} in {started.dtype}, role {started.role}"
    _messages.print(f"{kind}, {started.context_tokens} tokens of context", highlight=False)
    for address in started.grpc:
        _messages.print(f"gRPC: {address}", highlight=False)
    if started.http is not None:
        _messages.print(f"OpenAI API, health and metrics: {started.http}", highlight=False)


def _quiet_libraries() -> None:
    """Our own messages are the ones that matter; libraries' bars would fill the screen."""
    from transformers.utils import logging as transformers_logging

    untyped: Any = transformers_logging
    untyped.disable_progress_bar()
    untyped.set_verbosity_error()


def _warn_on_the_console() -> None:
    """For commands that a person watches."""
    handler = RichHandler(console=_messages, show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
