"""Writes the pages that list settings and metrics, from the code that has them.

``python docs/generate.py`` writes them; with ``--check`` it fails where a committed page is another.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

import kvstore.metrics
import kvstore.service.tenants
from kvstore.config import PREFILL_ONLY, Config
from kvstore.metric_table import METRICS, Kind, Metric, Source
from kvstore.settings import ENVIRONMENT_PREFIX, load_config

DOCS = Path(__file__).resolve().parent
GENERATED = "<!-- Written by docs/generate.py from {source}. Do not edit. -->\n"

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Memory": ("pool_path", "pool_bytes", "extent_bytes", "eviction_policy"),
    "Redis": (
        "redis_url",
        "redis_prefix",
        "redis_ttl_seconds",
        "redis_connections",
        "redis_probe_seconds",
        "redis_queue_bytes",
    ),
    "Server": ("listen", "http_listen", "drain_seconds", "log_level"),
    "Access": ("tenants_file", "tls_cert", "tls_key", "tls_client_ca"),
    "Promises and limits": (
        "lease_seconds",
        "write_seconds",
        "client_leases",
        "client_staged_bytes",
        "client_streams",
    ),
    "Prefill only": PREFILL_ONLY,
}

CONFIGURATION = """# Configuration

A setting has a default. A TOML file (`--config`) overrides it, an environment variable overrides the file,
and a flag overrides both. A name that does not exist, or a value that does not fit, is an error at the
start: one line for each, with what would fit. `kvstore config` shows what holds, and where it comes from.

- A size is a number of bytes or has a unit: `1GiB`, `512MiB`, `64MB`, `1048576`.
- A duration is a number of seconds or has a unit: `500ms`, `30s`, `5m`, `2h`, `1d`.
- In TOML, text stands in quotes: `pool_bytes = "8GiB"`, `listen = "unix:/run/kvstore.sock, :9471"`. All keys
  stand at the top: there are no tables.
- A unix socket is open to the user who runs the server. A port of the loopback interface is open to every
  user of the machine unless there is a `tenants_file`. An address that other machines reach needs both
  `tenants_file` and `tls_cert`.
- With `tls_cert`, every `host:port` of `listen` speaks TLS; a unix socket never does.
- Nothing is read again while a server runs: a change needs a restart, which keeps the blocks
  ([operations.md](operations.md)).
- A file and the environment may be shared with prefill workers: the settings under "Prefill only" are theirs.
  `kvstore serve` has no flags for them and does nothing with them; what its blocks are, a client says.
"""

METRICS_PAGE = """# Metrics

What `http_listen` serves at `/metrics`, in the text format of Prometheus, or of OpenMetrics for who asks
for that. Labels are bounded, and no hash, salt or root is ever among their values.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pages that list settings and metrics.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = stale_pages(DOCS)
    if check and stale:
        sys.exit(
            "\n".join([*(f"docs/{name}: stale" for name in stale), "run `make generate`, commit the result"])
        )
    if not check:
        for name in stale:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print("\n".join(stale) or "all pages were up to date")


def stale_pages(folder: Path) -> list[str]:
    """Names of the pages in a folder that are missing or not what the code says."""
    return [
        name
        for name, page in PAGES.items()
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != page()
    ]


def configuration_page() -> str:
    defaults = {row.field: row.value for row in load_config(environ={}, overrides={}).describe()}
    parts = [GENERATED.format(source="kvstore/config.py"), CONFIGURATION]
    header = ("setting", "default", "takes", "meaning", "environment variable", "flag")
    for title, names in GROUPS.items():
        rows = [
            (
                f"`{name}`",
                f"`{defaults[name]}`",
                takes(name, Config.model_fields[name]),
                Config.model_fields[name].description or "",
                f"`{ENVIRONMENT_PREFIX}{name.upper()}`",
                "prefill only" if name in PREFILL_ONLY else f"`--{name.replace('_', '-')}`",
            )
            for name in names
        ]
        parts += [f"## {title}\n", table(header, rows)]
    parts += ["## The tenants file\n", f"{_after_summary(kvstore.service.tenants)}\n"]
    return "\n".join(parts)


def takes(name: str, info: FieldInfo) -> str:
    """What a setting takes, with its range."""
    if get_origin(info.annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(info.annotation))
    unit = " s" if name.endswith("_seconds") else ""
    least = next((item.ge for item in info.metadata if isinstance(item, Ge)), None)
    most = next((item.le for item in info.metadata if isinstance(item, Le)), None)
    limits = [f"at least {least}{unit}"] if least is not None else []
    limits += [f"at most {most}{unit}"] if most is not None else []
    return ", ".join([_kind(name, info.annotation), *limits])


def _kind(name: str, annotation: object) -> str:
    if name.endswith("_bytes"):
        return "size"
    if name.endswith("_seconds"):
        return "duration"
    if annotation is int:
        return "whole number"
    if "Path" in str(annotation):
        return "path"
    return "address" if name == "http_listen" else "addresses" if name == "listen" else "text"


def metrics_page() -> str:
    parts = [GENERATED.format(source="kvstore/metric_table.py"), METRICS_PAGE]
    parts += ["## Hit rate\n", f"{_after_summary(kvstore.metrics)}\n"]
    for source in Source:
        rows = [
            (f"`{metric.name}`", metric.kind, labels(metric), metric.help)
            for metric in METRICS.values()
            if metric.source is source
        ]
        parts += [f"## Told by {source}\n", table(("metric", "type", "labels", "meaning"), rows)]
    buckets = [
        (f"`{metric.name}`", ", ".join(f"{bound:g}" for bound in metric.buckets))
        for metric in METRICS.values()
        if metric.kind is Kind.HISTOGRAM
    ]
    parts += ["## Buckets of the histograms\n", table(("metric", "upper bounds, in seconds"), buckets)]
    return "\n".join(parts)


def labels(metric: Metric) -> str:
    """Each label with the values that it may have."""
    return "<br>".join(f"`{label}`: {values.text}" for label, values in metric.labels.items()) or "–"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _after_summary(module: object) -> str:
    """A module's docstring without its first paragraph."""
    return (inspect.getdoc(module) or "").partition("\n\n")[2]


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
}

if __name__ == "__main__":
    main()
