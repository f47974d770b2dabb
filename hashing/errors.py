"""Errors of hashing. Each message names the value, what was expected and the fix."""


class HashingError(ValueError):
    """A namespace, root, extras or chain argument is malformed or out of range."""


class TokenError(HashingError):
    """Token ids cannot be packed as uint32."""
