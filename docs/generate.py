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
from kvstore.commands.causes import CAUSES
from kvstore.commands.options import flags_of
from kvstore.config import PREFILL_ONLY, Config
from kvstore.metric_table import METRICS, Kind, Metric, Source
from kvstore.settings import ENVIRONMENT_PREFIX, load_config

DOCS = Path(__file__).resolve().parent
GENERATED = "<!-- Written by docs/generate.py from {source}. Do not edit. -->\n"

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Memory": ("pool_path", "pool_bytes", "extent_bytes", "eviction_policy", "idle_ttl_seconds"),
    "Redis": (
        "redis_url",
        "redis_prefix",
        "redis_ttl_seconds",
        "redis_connections",
        "redis_probe_seconds",
        "redis_queue_bytes",
        "redis_demotion",
        "redis_reuse_count",
        "recompute_tokens_per_second",
    ),
    "Server": ("listen", "http_listen", "drain_seconds"),
    "Access": ("tenants_file", "tls_cert", "tls_key", "tls_client_ca"),
    "Logs and recordings": ("log_level", "log_format", "log_file", "record_path", "record_max_bytes"),
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


CAUSES_PAGE = """\
What ended a request's hits is the cause of all that follows: of what was not looked at, no more is
known. Where tiers just do not have the rest, each block has a cause of its own, by what the server
remembers of blocks that left. It remembers 8 bytes of each, and 4 for when or why, in a 64th of the pool's
size, at least 256 KiB and at most 64 MiB. That is decided when the request is answered, before it stores the
rest itself.

- A block that was never here proves that none behind it was.
- Where that memory has overflowed, what is not remembered is `unknown`, not `cold`. So is what an earlier
  server may have evicted, in a namespace whose blocks were taken over.
- A block that Redis was given and lost before its time to live was over is `evicted`.

`kvstore explain` says the same of one prompt, block by block.
"""

WHAT_IF_PAGE = """\
`kvstore_whatif_…` tell what memory alone would hit if the pool were a quarter to four times as
large. Small ghosts of the pool run the same eviction policy on a sample of the blocks that are asked for; the
hit rate is `1 - missed / asked`. Compare them with the ghost of scale 1 and not with the hit rate of the
server: a ghost keeps every prompt that was asked for, hears of an answer only when it is part of the next
prompt, and has no Redis. On the conversation trace of `tests/data` the error was at most 0.6 points with
`lru` and 1.5 points with `reuse`, with pools of 5,000 to 50,000 blocks. Where traffic is low, so is the
number of samples: look at some thousand requests. After a restart ghosts begin with the blocks that were
taken over; the larger ones would have had more, and are low until they have filled. Requests that come faster
than ghosts follow are left out and counted in `kvstore_skipped_requests_total`.
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
                "prefill only" if name in PREFILL_ONLY else ", ".join(f"`{flag}`" for flag in flags_of(name)),
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
    causes = [(f"`{cause}`", words.why, words.remedy) for cause, words in CAUSES.items()]
    parts += ["## Why tokens were missed\n", table(("cause", "it means", "what to do"), causes), CAUSES_PAGE]
    parts += ["## Other sizes of the pool\n", WHAT_IF_PAGE]
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
