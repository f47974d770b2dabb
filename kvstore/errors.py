"""Errors a caller can act on. Each message names the value, what was expected and the fix."""


class KVStoreError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(KVStoreError):
    """A setting is unknown, malformed or out of range."""


class NamespaceError(KVStoreError):
    """A request does not fit the namespace it names, or the namespace is not registered."""


class PoolError(KVStoreError):
    """A pool cannot be made, or cannot ever hold what it was asked to hold."""


class LeaseError(KVStoreError):
    """A lease is unknown, over, or belongs to another owner."""


class HintsError(KVStoreError):
    """What a request says of its own future is out of range."""


class WriteError(KVStoreError):
    """A two-phase write was used out of order, or after its deadline."""


class TierError(KVStoreError):
    """A tier could not be opened. Once open, a tier answers with outcomes, not with errors."""
