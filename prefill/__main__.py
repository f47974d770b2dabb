"""``python -m prefill``."""

from prefill.cli import main

main()
