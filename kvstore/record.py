"""A recording of what was asked, to replay with other policies and sizes: salted names, never tokens.

JSON lines. The first is ``{"recording": 1, "block_size": tokens, "created": ISO time}``; ``block_size`` is
that of the first request. Then one object a settled request that asked for a whole block, in the order in
which they were settled:

    {"time": seconds since the recording began, "namespace": 8 hex digits, "prompt_tokens": n,
     "block_size": tokens, "block_bytes": what a block took of the pool, on all ranks,
     "hashes": [one 64-bit number a whole block], "hit_blocks": h,
     "ended": bool, "priority": int, "idle_seconds": seconds or null}

Numbers and namespaces are keyed BLAKE2 of the real names, with a key that is drawn for this recording and
kept nowhere: equal prefixes have equal numbers within one recording, and nothing else can be learnt from
them.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import blake2b
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

from kvstore.block import HASH_BYTES, MissCause
from kvstore.errors import ConfigError
from kvstore.events import Event, RequestSettled
from kvstore.sideline import Sideline

FORMAT = 1
FLUSH_SECONDS = 1.0

_NAMES_MAX = 1000
_MODE = 0o600

_log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """One request; ``block_bytes`` is what each of its blocks takes of the pool."""

    event: RequestSettled
    block_bytes: int


class Recorder:
    """A listener that writes settled requests to a file, on a thread of its own."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        block_bytes: Callable[[bytes], int],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Creates the file, or where it exists the next of ``name.1.jsonl``, …; ConfigError if it cannot.

        It is packed where the name ends in ``.gz``. At ``max_bytes`` the recording is over, and where the
        disk takes no more. One without a request is removed at its end. ``block_bytes`` says, on the
        owner's thread, what a block of a namespace takes of the pool, all ranks together.
        """
        self.path, raw = _create(path)
        self._raw = raw
        self._file: gzip.GzipFile | BufferedWriter = raw
        if path.suffix == ".gz":
            self._file = gzip.GzipFile(fileobj=raw, mode="wb")
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._began = self._flushed = clock()
        self._clock = clock
        self._created = datetime.fromtimestamp(wall_clock(), UTC).isoformat(timespec="seconds")
        self._key = secrets.token_bytes(16)
        self._headed = self._full = False
        self._sideline: Sideline[_Asked] = Sideline("kvstore-record", self._write, idle=self._flush)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSettled) and not self._full:
            self._sideline.put(_Asked(event, self._block_bytes(event.namespace)), event.nbytes)

    @property
    def dropped(self) -> int:
        """Requests that the file lacks, since they came faster than they could be written."""
        return self._sideline.skipped

    def close(self) -> None:
        """Write what is queued, and close the file. Idempotent."""
        if not self._sideline.close():
            _log.warning("the recording %s lacks the last requests: it was slower than they", self.path)
        elif not self._raw.closed:
            try:
                with self._raw:
                    self._file.close()
            except OSError as error:
                self._give_up(error)
            if not self._headed:
                self.path.unlink(missing_ok=True)

    def _write(self, asked: _Asked) -> None:
        if self._full:
            return
        try:
            self._append(asked.event, asked.block_bytes)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """What is written after a part that is missing could not be read."""
        if not self._full:
            _log.error(
                "the recording %s is over, its last line may be cut (%s): make room, or name another file",
                self.path,
                error.strerror or error,
            )
        self._full = True

    def _append(self, event: RequestSettled, block_bytes: int) -> None:
        blocks = len(event.hashes) // HASH_BYTES
        whole = event.asked_tokens - event.miss_tokens.get(MissCause.TAIL, 0)
        counted = blocks - event.first_block
        if counted <= 0 or not event.hashes:
            return
        block_size = whole // counted
        if not self._headed:
            head = {"recording": FORMAT, "block_size": block_size, "created": self._created}
            self._file.write(json.dumps(head).encode() + b"\n")
            self._headed = True
        line = {
            "time": round(event.time - self._began, 6),
            "namespace": blake2b(event.namespace, digest_size=4, key=self._key).hexdigest(),
            "prompt_tokens": event.asked_tokens + event.first_block * block_size,
            "block_size": block_size,
            "block_bytes": block_bytes or None,
            "hashes": self._salted(event.hashes),
            "hit_blocks": event.first_block + event.hit_blocks,
            "ended": event.hints.ended,
            "priority": event.hints.priority,
            "idle_seconds": event.hints.idle_seconds,
        }
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        if self._raw.tell() >= self._max_bytes:
            self._file.flush()
            self._full = True
            _log.warning("the recording %s is over: it has reached %d bytes", self.path, self._max_bytes)

    def _salted(self, hashes: bytes) -> list[int]:
        key = self._key
        return [
            int.from_bytes(blake2b(hashes[at : at + HASH_BYTES], digest_size=8, key=key).digest())
            for at in range(0, len(hashes), HASH_BYTES)
        ]

    def _flush(self) -> None:
        """So that a server that is killed leaves all but the last second."""
        now = self._clock()
        if now - self._flushed >= FLUSH_SECONDS and not self._full:
            self._flushed = now
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, _MODE)


def _create(path: Path) -> tuple[Path, BufferedWriter]:
    """A new file that only its owner reads: of this name, or of the first numbered one that is free."""
    if path.is_dir():
        raise ConfigError(f"record_path = {path} is a folder, expected a file: name one in it")
    stem, suffixes = path.name.partition(".")[0], "".join(path.suffixes)
    for number in range(_NAMES_MAX):
        free = path.with_name(f"{stem}.{number}{suffixes}") if number else path
        try:
            return free, open(free, "xb", opener=_private)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"record_path = {path} cannot be written ({error.strerror}): name a file in a folder that "
                "exists and that this user may write to"
            ) from error
    raise ConfigError(
        f"record_path = {path} exists, and so do its {_NAMES_MAX - 1} numbered ones: move old recordings away"
    )
