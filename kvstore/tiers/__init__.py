"""Where bytes live: one contract, one tier a file."""
