"""What keeps the connector from serving an engine."""

from kvstore.errors import KVStoreError


class UnsupportedError(KVStoreError):
    """The engine is of a kind, or set up in a way, that cannot be served; it runs without the store."""
