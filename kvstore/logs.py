"""How a server logs: for people or as JSON lines, to stderr or a file; repeats are limited."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path

from kvstore.errors import ConfigError

REPEATS_MAX = 10
"""Messages of one kind that are shown in ``WINDOW_SECONDS``."""
WINDOW_SECONDS = 60.0

_KINDS_MAX = 1024
_HIDDEN = re.compile(
    r"""(?<!cmpl-)(?:0x)?[0-9a-fA-F]{32,}  # a root or a hash as text, but not the id of a completion
    | \bb'(?:[^'\\]|\\.){16,}' | \bb"(?:[^"\\]|\\.){16,}"  # as Python shows bytes""",
    re.VERBOSE,
)
_CHATTY = ("asyncio", "grpc")
"""Libraries whose debug messages would bury ours."""
_HUMAN = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Kind = tuple[str, str]


@contextmanager
def logging_to(path: Path | None, *, level: str, as_json: bool) -> Iterator[None]:
    """Log to stderr, or to a file, as long as the context lasts; ConfigError where it cannot be written.

    A file that is moved away is opened anew, as log rotation wants it. Messages are of one kind when
    logger and template are the same; of each kind the first ``REPEATS_MAX`` a minute are shown, and
    the next one after that says how many were left out.
    """
    handler = _handler(path)
    handler.setFormatter(_JSONFormatter() if as_json else _HumanFormatter(_HUMAN))
    throttle = Throttle()
    handler.addFilter(_is_news)
    handler.addFilter(throttle)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
    try:
        yield
    finally:
        for record in throttle.left_out():
            handler.handle(record)
        root.removeHandler(handler)
        root.setLevel(before)
        with suppress(OSError):  # of a full disk, which has been told of
            handler.close()


def _is_news(record: logging.LogRecord) -> bool:
    """False for what gRPC says, as an error with a traceback, of each caller that has given up."""
    return not (record.name.startswith("grpc.") and "ExecuteBatchError" in record.getMessage())


class Throttle(logging.Filter):
    """Lets the first few messages of a kind through in each minute, by the records' own times.

    A record that comes after others were left out has their number as ``left_out``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[Kind, _Count] = OrderedDict()

    def __len__(self) -> int:
        """Kinds that are counted; the oldest is forgotten for a new one when there are many."""
        return len(self._kinds)

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, str(record.msg)
        count = self._kinds.get(kind)
        if count is None:
            count = self._kinds[kind] = _Count(record.created)
            if len(self._kinds) > _KINDS_MAX:
                self._kinds.popitem(last=False)
        if not count.admits(record):
            return False
        record.left_out = count.take_left_out()
        return True

    def left_out(self) -> list[logging.LogRecord]:
        """For each kind of which some were left out and not told of yet, its last record, to be shown."""
        # A copy, since other threads may log on.
        return [last for count in list(self._kinds.values()) if (last := count.end()) is not None]


class _Count:
    """Messages of one kind in the present window."""

    def __init__(self, since: float) -> None:
        self._since = since
        self._shown = self._left_out = 0
        self._last: logging.LogRecord | None = None

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether to show it; counted either way."""
        if record.created - self._since >= WINDOW_SECONDS:
            self._since, self._shown = record.created, 0
        if self._shown >= REPEATS_MAX:
            self._left_out += 1
            self._last = _without_frames(record)
            return False
        self._shown += 1
        return True

    def take_left_out(self) -> int:
        """How many were left out before this one."""
        left_out, self._left_out = self._left_out, 0
        return left_out

    def end(self) -> logging.LogRecord | None:
        """Admit the last one, which is to be shown now; None when nothing was left out."""
        if not self._left_out:
            return None
        self._left_out -= 1
        self._shown = 0
        return self._last


def _without_frames(record: logging.LogRecord) -> logging.LogRecord:
    """To be kept: a traceback would keep alive all that was in reach where the error happened."""
    kept = copy(record)
    kept.exc_info = None
    if isinstance(kept.args, tuple):
        kept.args = tuple(str(each) if isinstance(each, BaseException) else each for each in kept.args)
    return kept


class _HumanFormatter(logging.Formatter):
    """One line, and a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        left_out = getattr(record, "left_out", 0)
        text = super().format(record)
        if left_out:
            text += f" ({left_out} more like this were left out)"
        return _without_names(text)


class _JSONFormatter(logging.Formatter):
    """One object a line: time, level, logger, message; left_out and exception where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _without_names(record.getMessage()),
        }
        if left_out := getattr(record, "left_out", 0):
            told["left_out"] = left_out
        if record.exc_info:
            told["exception"] = _without_names(self.formatException(record.exc_info))
        return json.dumps(told)


def _without_names(text: str) -> str:
    """The text without roots and hashes, which an error's message may hold: they name prompts."""
    return _HIDDEN.sub("(hidden)", text)


class _FileHandler(WatchedFileHandler):
    """Says on stderr what the file does not take, as on a full disk, and never fails whoever logs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._instead = logging.StreamHandler()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it was moved away, and cannot be opened anew
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in logging
        if isinstance(sys.exc_info()[1], OSError):
            self._instead.setFormatter(self.formatter)
            self._instead.emit(record)
        else:
            super().handleError(record)


def _handler(path: Path | None) -> logging.Handler:
    if path is None:
        return logging.StreamHandler()
    try:
        return _FileHandler(path)
    except OSError as error:
        raise ConfigError(
            f"log_file = {path} cannot be written ({error.strerror}): name a file in a folder that exists "
            "and that this user may write to, or none for stderr"
        ) from error
