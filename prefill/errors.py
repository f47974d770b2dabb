"""Errors of the model side. Each message names the value, what was expected and the fix."""


class PrefillError(Exception):
    """Base of every error that this package raises on purpose."""


class ModelError(PrefillError):
    """A model cannot be found, read or converted."""


class UnsupportedModelError(ModelError):
    """A model's attention or cache is not the standard one that blocks can hold."""


class PromptError(PrefillError):
    """Tokens do not fit the model: none at all, an id out of range. Or no token can be chosen as asked."""


class RequestError(PrefillError):
    """A request cannot be taken as it is: its id is in use, or it asks for what this call cannot do."""


class BusyError(PrefillError):
    """The queue is full. ``retry_after_seconds`` is when there may be a place again."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class HandoffError(PrefillError):
    """A handoff cannot be read, or is of another model than this side runs."""
