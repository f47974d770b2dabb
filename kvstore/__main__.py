"""``python -m kvstore``."""

from kvstore.cli import main

main()
