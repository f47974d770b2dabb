"""Connectors that engines load into their own processes."""
