"""What a client knows of the server that it registered with: its epoch, the mapped pool, the namespaces."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hashing import Root
from kvstore.block import BlockRows, MissCause, Shard, Uint64Array
from kvstore.errors import NamespaceError, PoolError
from kvstore.service.client.calls import REGISTER, Steps, ask
from kvstore.service.client.messages import Places, sizes_of, specs_of
from kvstore.service.client.options import ClientOptions
from kvstore.service.codec import PROTOCOL_VERSION, Parallelism, spec_message
from kvstore.spec import NamespaceSpec
from kvstore.tiers.base import Payload
from kvstore.tiers.client_lock import MOST_CLIENTS
from kvstore.tiers.pool_view import ClientNumberTaken, PoolView
from kvstore.v1 import block_pb2, types_pb2

_log = logging.getLogger(__name__)
_ROUNDS = 8
"""Registrations before giving up on a server that restarts, or on finding a free number."""


class Session:
    """One server, from its start to its end, as one client number knows it. Safe for threads.

    ``number`` names the client to the server. Without a ``pool`` payloads are streamed.
    """

    def __init__(
        self,
        answer: block_pb2.RegisterNamespaceResponse,
        number: int,
        pool: PoolView | None,
        mapping: ExitStack,
    ) -> None:
        """``mapping`` lets the ``pool`` go when it is closed."""
        self.epoch: int = answer.epoch
        self.number = number
        self.lease_seconds: float = answer.lease_seconds
        self.write_seconds: float = answer.write_seconds
        self.mapped = pool is not None
        self._over = False
        self._pool = pool
        self._mapping = mapping
        self._writes = count(1)
        self._lock = threading.Lock()

    @property
    def current(self) -> bool:
        """False once the client knows the server to be another, or sees it in the mapped header."""
        with self._lock:
            return not self._over and (self._pool is None or self._pool.epoch == self.epoch)

    def name_write(self) -> int:
        """A name that no other write of this session has."""
        return next(self._writes)

    def verify(self, rows: BlockRows, places: Places) -> tuple[int, MissCause | None]:
        """Leading blocks at their generations that agree with ``rows``, and what ends the run."""
        with self._lock:
            if self._pool is None:
                return 0, MissCause.STALE
            found = self._pool.verify(rows, places.offsets, places.generations)
            if found == len(rows):
                return found, None
            same = self._pool.unchanged(places.offsets, places.generations)
            return found, MissCause.COLLISION if same > found else MissCause.STALE

    def unchanged(self, places: Places, blocks: int) -> int:
        """Leading blocks of the first ``blocks`` that are still what was promised; 0 of another epoch."""
        with self._lock:
            if self._pool is None:
                return 0
            found = self._pool.unchanged(places.offsets[:blocks], places.generations[:blocks])
            # After the generations: a server that takes the file over changes the epoch first.
            return found if self._pool.epoch == self.epoch else 0

    def views(self, offsets: NDArray[np.int64], size: int, *, writable: bool = False) -> list[Payload]:
        """Payloads in place; none of a session that is over."""
        with self._lock:
            return [] if self._pool is None else self._pool.views(offsets, size, writable=writable)

    def unread(self, offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(position, checksum) of the blocks whose payload has to be compared before it is used."""
        with self._lock:
            if self._pool is None:
                return []
            positions = self._pool.unverified(offsets)
            sums: Uint64Array = self._pool.checksums(offsets[positions])
            return list(zip(positions.tolist(), sums.tolist(), strict=True))

    def checksums(self, offsets: NDArray[np.int64]) -> list[int]:
        """xxh3_64 of each payload, as its writer gave it; 0 for what is no longer there."""
        with self._lock:
            sums = np.zeros(len(offsets), np.uint64) if self._pool is None else self._pool.checksums(offsets)
        return sums.tolist()  # type: ignore[no-any-return]

    def compared(self, offsets: NDArray[np.int64]) -> int:
        """Leading blocks whose payload need not be compared before it is used."""
        with self._lock:
            unread = () if self._pool is None else self._pool.unverified(offsets).tolist()
        return unread[0] if unread else len(offsets)

    def close(self) -> None:
        """Let go of the mapping; what has been handed out keeps it until it is gone. Idempotent."""
        with self._lock:
            pool, self._pool, self._over = self._pool, None, True
        if pool is not None:
            self._mapping.close()


@dataclass(frozen=True, slots=True)
class Registration:
    """A namespace as the server of ``session`` knows it.

    ``payload_bytes`` are of one block, by shard; ``siblings`` are other namespaces of the model.
    """

    session: Session
    root: Root
    payload_bytes: dict[Shard, int]
    siblings: tuple[NamespaceSpec, ...]


class Sessions:
    """The session of the moment, and the way to the next one. Safe for threads.

    ``ended`` is called with a session that is over because the server is another.
    """

    def __init__(self, options: ClientOptions, ended: Callable[[Session], None]) -> None:
        self._options = options
        self._ended = ended
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._number = _draw()
        self._maps = options.map_pool

    @property
    def current(self) -> Session | None:
        return self._session

    def register(self, spec: NamespaceSpec, cut: Parallelism) -> Steps[Registration]:
        """Make a namespace known, under a new session where the server is another than before."""
        for _ in range(_ROUNDS):
            with self._lock:
                number, maps = self._number, self._maps
            request = block_pb2.RegisterNamespaceRequest(
                protocol_version=PROTOCOL_VERSION,
                client=number,
                spec=spec_message(spec),
                parallelism=types_pb2.Parallelism(**cut._asdict()),
                can_map=maps,
            )
            answer = yield from ask(REGISTER, request, self._options.rpc_seconds)
            session = self._session_of(answer, number)
            if session is not None:
                root = Root(answer.namespace, spec.block_size, spec.namespace.algorithm)
                return Registration(session, root, sizes_of(answer, cut.shards), specs_of(answer.siblings))
        raise NamespaceError(
            f"{spec.namespace.model} was registered {_ROUNDS} times, and each time the server was another or "
            "the client's number was taken; see whether the server keeps restarting"
        )

    def close(self) -> None:
        """End the session of the moment. Idempotent."""
        session = self._session
        if session is not None:
            self.end(session)

    def end(self, session: Session) -> None:
        """``session`` is over: what it had leased or begun is lost."""
        with self._lock:
            if session is self._session:
                self._renew_identity()
                self._session = None
        session.close()
        self._ended(session)

    def _session_of(self, answer: block_pb2.RegisterNamespaceResponse, number: int) -> Session | None:
        """The session that an answer belongs to; None when the client has to register again."""
        with self._lock:
            known = self._session
            if number != self._number:
                return None
            if known is None:
                self._session = self._open(answer)
                return self._session
            # Whether a tenant may map the pool can change while the server runs.
            if known.epoch == answer.epoch and known.mapped == bool(answer.pool_path):
                return known
        self.end(known)
        return None

    def _open(self, answer: block_pb2.RegisterNamespaceResponse) -> Session | None:
        if not answer.pool_path:
            return Session(answer, self._number, None, ExitStack())
        try:
            pool = PoolView(Path(answer.pool_path), answer.epoch, self._number)
        except ClientNumberTaken:
            self._number = _draw()
            return None
        except PoolError as error:
            _log.warning("payloads are streamed, since the pool file cannot be mapped: %s", error)
            # Under a new number, too: a registration of the old one that says otherwise may be on its way.
            self._number, self._maps = _draw(), False
            return None
        with ExitStack() as mapping:
            mapping.callback(pool.close)
            if self._options.around_mapping is not None:
                mapping.enter_context(self._options.around_mapping(pool.memory))
            elif self._options.populate:
                with suppress(RuntimeError):  # no thread to be had: readers map pages as they come
                    threading.Thread(target=pool.populate, name="kvstore-populate", daemon=True).start()
            return Session(answer, self._number, pool, mapping.pop_all())

    def _renew_identity(self) -> None:
        # Slots that the old number was writing stay out of use as long as its lock is held, which is
        # until the last view of the old mapping is gone. A server that heard of the number again
        # could not tell.
        self._number = _draw()
        self._maps = self._options.map_pool


def _draw() -> int:
    return 1 + secrets.randbelow(MOST_CLIENTS)
