"""``python -m tests.soak --minutes 10``: random kills for a while; status 1 if anything was wrong."""

from __future__ import annotations

import argparse
import secrets
import sys

from tests.soak.director import Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of every choice (default: a random one)")
    asked = parser.parse_args()
    seed = secrets.randbelow(2**32) if asked.seed is None else asked.seed
    sys.stdout.write(f"seed {seed}, {asked.minutes:g} minutes\n")
    sys.stdout.flush()
    summary = run(Plan(asked.minutes * 60, seed))
    sys.stdout.write("".join(f"{line}\n" for line in summary.lines()))
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
