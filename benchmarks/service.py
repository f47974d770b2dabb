"""What does the sidecar cost over gRPC and memory alone?

Server and clients are processes of their own; Redis is attached, metrics are served, every call needs
a token. Each figure stands beside its floor, measured in turn: a handler that receives the same bytes
and does nothing, or a loop that copies the same bytes and does nothing else.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable

from report import Report, parser
from service_load import measure_load
from service_lookups import measure_lookups, measure_residents
from service_processes import Processes, seconds_to_serving
from service_split import measure_split
from service_transfers import measure_transfers

STARTS = 5
START_GOAL = 1.5

Part = Callable[[Report, Processes], None]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    arguments.add_argument(
        "--lmcache-python",
        default=_with_lmcache(),
        help="an interpreter that has lmcache 0.5.6 (default: this)",
    )
    options = arguments.parse_args()
    report = Report("service", ("grpcio", "protobuf", "numpy", "xxhash"))
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with Processes(options.lmcache_python) as processes:
            PARTS[name](report, processes)
    report.finish(json=options.json)


def measure_start(report: Report, processes: Processes) -> None:
    """From exec to SERVING, with a pool file that is not there yet; no import of torch would succeed."""
    seconds = [seconds_to_serving(*processes.command(pool_bytes="1GiB")) for _ in range(STARTS)]
    report.result(part="start", case="1 GiB pool, exec to SERVING", ms=statistics.median(seconds) * 1e3)
    report.goal("seconds from exec to SERVING", statistics.median(seconds), at_most=START_GOAL)


def _with_lmcache() -> str | None:
    return sys.executable if importlib.util.find_spec("lmcache") else None


PARTS: dict[str, Part] = {
    "lookups": measure_lookups,
    "residents": measure_residents,
    "transfers": measure_transfers,
    "load": measure_load,
    "split": measure_split,
    "start": measure_start,
}

if __name__ == "__main__":
    main()
