"""Eviction policies: one contract, one policy a file."""
