"""``serve``: what stands beside a server, and what it says of itself when it starts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from kvstore.commands.output import Answer, epoch_text, show
from kvstore.config import EMBEDDED_REDIS
from kvstore.errors import KVStoreError
from kvstore.quantity import format_bytes
from kvstore.serve import Serving
from kvstore.settings import LoadedConfig, Source
from kvstore.tiers.redis_kept import KeptRedis

_log = logging.getLogger(__name__)


def log_settings(loaded: LoadedConfig) -> None:
    """Each setting with its source, secrets masked; defaults only where everything is logged."""
    for row in loaded.describe():
        level = logging.DEBUG if row.source is Source.DEFAULT else logging.INFO
        # A template for each, since repeats of one are limited.
        _log.log(level, f"{row.field} = %s (%s)", row.value, row.source)


@contextmanager
def failure_logged(log_file: Path | None) -> Iterator[None]:
    """A log file ends with the error that leaves the context; on stderr that is shown in any case."""
    try:
        yield
    except KVStoreError as error:
        if log_file is not None:
            _log.error("ended: %s", error)
        raise


@contextmanager
def redis_beside(loaded: LoadedConfig) -> Iterator[LoadedConfig]:
    """The configuration, with the URL of a Redis that runs meanwhile where an embedded one is asked for."""
    if loaded.config.redis_url != EMBEDDED_REDIS:
        yield loaded
        return
    with KeptRedis.start() as server:
        config = loaded.config.model_copy(update={"redis_url": server.url})
        yield LoadedConfig(config, loaded.sources)


def announce(serving: Serving, *, as_json: bool, log_is_enough: bool = False) -> None:
    """Where the server is, now that it serves: one object on stdout, or lines on stderr.

    No lines where ``log_is_enough``, which says so, too: whoever reads objects from stderr gets no others.
    """
    if as_json:
        show(Answer({**asdict(serving), "epoch": epoch_text(serving.epoch)}), as_json=True)
    if as_json or log_is_enough:
        return
    lines = [f"serving on {address}" for address in serving.addresses]
    lines.append(f"pool: {serving.pool_path}, {format_bytes(serving.pool_bytes)}; {serving.pool}")
    if serving.http is not None:
        lines.append(f"live page, metrics and health: {serving.http}")
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
