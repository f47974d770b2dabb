"""Those who hold leases and writes: what each may hold, and what becomes of it when they are gone."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.service.codec import require_text
from kvstore.service.errors import InvalidRequestError, Limit, LimitError, NotPossibleError, WrongEpochError
from kvstore.service.remembered import Remembered
from kvstore.service.tenants import Tenant
from kvstore.store import TieredStore, Write
from kvstore.tiers.client_lock import MOST_CLIENTS

_log = logging.getLogger(__name__)

CLIENTS_MAX = 16_384
"""Of one tenant, those counted that hold nothing for the moment too."""
ABORTED_MAX = 1024
"""Names of writes that a client gave up before they began."""
_NAMED_BY_SERVER = 1 << 32
CHAIN_BYTES_MAX = 1 << 29
"""Token ids and hashes that the leases of one client keep."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client may hold at once."""

    leases: int = 4096
    staged_bytes: int = 1 << 30
    streams: int = 16


@dataclass(slots=True, eq=False)
class OpenWrite:
    """A write that a client has begun; ``received`` says whether its bytes came through a stream."""

    id: int
    write: Write
    staged_bytes: int
    streaming: bool = False
    received: bool = False


@dataclass(slots=True, eq=False)
class Client:
    """One process that registered. ``mapped``: it fills and reads slots itself, and holds its file lock."""

    number: int
    tenant: Tenant
    mapped: bool = False
    streams: int = 0
    staged_bytes: int = 0
    aborted: Remembered = field(default_factory=lambda: Remembered(ABORTED_MAX))
    writes: dict[int, OpenWrite] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The owner of its leases. Client numbers of two tenants may be the same."""
        return f"{self.tenant.name}/{self.number}"


class Clients:
    """Every client that may hold something."""

    def __init__(
        self,
        store: TieredStore,
        epoch: int,
        limits: ClientLimits,
        clock: Callable[[], float],
        stageable: Callable[[str], int],
    ) -> None:
        """``stageable`` says how many bytes all clients of a tenant may have staged."""
        self._stageable = stageable
        self._store = store
        self.epoch = epoch
        self._limits = limits
        self._clock = clock
        self._known: dict[tuple[str, int], Client] = {}
        self._numbers: Counter[str] = Counter()
        self._write_ids = itertools.count(_NAMED_BY_SERVER)
        self._staged: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._known.values())

    def register(self, tenant: Tenant, number: int, *, mapped: bool) -> Client:
        """Make a client known, or known again. LimitError when there are too many."""
        client = self._known.get((tenant.name, number))
        if client is None:
            if self._count(tenant) >= CLIENTS_MAX:
                self._forget_idle(tenant)
            if self._count(tenant) >= CLIENTS_MAX:
                raise LimitError(
                    Limit.CLIENTS,
                    f"{CLIENTS_MAX} clients of this tenant hold leases or writes, at most; end some",
                )
            client = self._known[tenant.name, number] = Client(number, tenant)
            self._numbers[tenant.name] += 1
        client.mapped = mapped
        return client

    @staticmethod
    def require_number(number: int) -> None:
        """InvalidRequestError for what no client can be called."""
        if not 1 <= number <= MOST_CLIENTS:
            raise InvalidRequestError(
                f"client is {number}, expected 1 … {MOST_CLIENTS}; choose a random number in that range"
            )

    def get(self, tenant: Tenant, number: int, epoch: int) -> Client:
        """The client that makes a call. WrongEpochError where it does not know that the server is another."""
        client = self._known.get((tenant.name, number))
        if epoch != self.epoch:
            raise WrongEpochError(
                f"epoch {epoch} of client {number} is not this server's, {self.epoch}: it has restarted; "
                "register again, map the pool file again, and acquire again"
            )
        if client is None:
            raise WrongEpochError(f"client {number} is not known, or held nothing for long; register first")
        return client

    def admit_lease(self, client: Client, request_id: str) -> None:
        """LimitError when the client holds as many leases as it may, and this is another."""
        if not request_id:
            raise InvalidRequestError(
                "request_id is empty; name each request, so that asking twice is asking once"
            )
        require_text("request_id", request_id)
        table = self._store.lease_table
        if table.by_request(client.owner, request_id) is not None:
            return
        held = table.held_by(client.owner)
        if table.chain_bytes_of(client.owner) > CHAIN_BYTES_MAX:
            raise LimitError(
                Limit.LEASES,
                f"the prompts of the {held} leases that client {client.number} holds take more than "
                f"{CHAIN_BYTES_MAX} bytes; release some",
            )
        if held >= self._limits.leases:
            raise LimitError(
                Limit.LEASES,
                f"client {client.number} holds {held} leases, at most {self._limits.leases} are allowed; "
                "release some, or raise client_leases",
            )

    def admit_renewal(self, client: Client, leases: int) -> None:
        """LimitError for more leases than a client may hold. Some of those named may have run out."""
        if leases > self._limits.leases:
            raise LimitError(
                Limit.LEASES,
                f"client {client.number} wants to renew {leases} leases, at most {self._limits.leases} are "
                "allowed; name those that it holds, or raise client_leases",
            )

    def may_stage(self, client: Client, staged_bytes: int) -> bool:
        """Whether so many more bytes are within the client's limit, and leave others their shares."""
        of_tenant = self._staged[client.tenant.name] + staged_bytes
        return (
            client.staged_bytes + staged_bytes <= self._limits.staged_bytes
            and of_tenant <= self._stageable(client.tenant.name)
        )

    def admit_write(self, client: Client, staged_bytes: int) -> None:
        """LimitError when the client would stage more bytes than it may."""
        if not self.may_stage(client, staged_bytes):
            raise LimitError(
                Limit.STAGED_BYTES,
                f"client {client.number} has {client.staged_bytes} bytes staged and asks for {staged_bytes} "
                f"more, at most {self._limits.staged_bytes} are allowed, and "
                f"{self._stageable(client.tenant.name)} over all clients of its tenant; commit first, write "
                "fewer blocks at a time, or raise client_staged_bytes",
            )

    @staticmethod
    def admit_name(client: Client, write_id: int) -> None:
        """NotPossibleError for a write that its client has aborted before it began, or has open."""
        if write_id and (write_id in client.aborted or write_id in client.writes):
            raise NotPossibleError(
                f"write {write_id} of client {client.number} is open or aborted already; name each write anew"
            )

    def opened(self, client: Client, write: Write, write_id: int) -> OpenWrite:
        """Keep a write that has begun, under its client's name for it or under one that is free."""
        size = len(write.slots) * write.space.slot_class.slot_bytes
        opened = OpenWrite(write_id or next(self._write_ids), write, size)
        client.writes[opened.id] = opened
        client.staged_bytes += size
        self._staged[client.tenant.name] += size
        return opened

    def abort(self, client: Client, write_id: int) -> None:
        """End a write, or keep it from beginning: its client may have named it and given up."""
        opened = client.writes.get(write_id)
        if opened is None:
            client.aborted.add(write_id)
        else:
            opened.write.abort()
            self.closed(client, opened)

    def closed(self, client: Client, opened: OpenWrite) -> None:
        """Forget a write that is over."""
        if client.writes.pop(opened.id, None) is not None:
            client.staged_bytes -= opened.staged_bytes
            self._staged[client.tenant.name] -= opened.staged_bytes

    @staticmethod
    def write_of(client: Client, write_id: int) -> OpenWrite:
        """NotPossibleError for a write that is over or somebody else's."""
        opened = client.writes.get(write_id)
        if opened is None:
            raise NotPossibleError(
                f"write {write_id} is not open for client {client.number}: it is over, or its deadline has "
                "passed; begin another"
            )
        return opened

    @contextmanager
    def streaming(self, client: Client) -> Iterator[None]:
        """One of the client's streams. LimitError when it has as many as it may."""
        if client.streams >= self._limits.streams:
            raise LimitError(
                Limit.STREAMS,
                f"client {client.number} has {client.streams} streams, at most {self._limits.streams} are "
                "allowed; wait for one to end, or raise client_streams",
            )
        client.streams += 1
        try:
            yield
        finally:
            client.streams -= 1

    def sweep(self, alive: Callable[[int], bool]) -> None:
        """Let go of what the gone have held, and of streamed writes that are late.

        A stopped process that maps the pool is not gone: it may write as soon as it goes on.
        """
        for client in list(self._known.values()):
            holds = client.writes or self._store.lease_table.held_by(client.owner)
            # Who maps the file may have registered again as one that streams: its writes tell.
            maps = client.mapped or any(opened.write.writer for opened in client.writes.values())
            if maps and holds and not alive(client.number):
                self._let_go(client)
            else:
                self._end_late_writes(client)
        self._store.reap(alive)

    def _let_go(self, client: Client) -> None:
        leases = [lease for lease in self._store.lease_table if lease.owner == client.owner]
        _log.info(
            "client %d of tenant %r is gone: %d leases and %d writes are given back",
            client.number,
            client.tenant.name,
            len(leases),
            len(client.writes),
        )
        for lease in leases:
            self._store.release(lease, 0)  # nobody knows what it read
        for opened in list(client.writes.values()):
            opened.write.abort()
            self.closed(client, opened)
        self._forget(client)

    def _end_late_writes(self, client: Client) -> None:
        """Only this loop fills the slots of a streamed write, and it looks first whether that is open."""
        now = self._clock()
        for opened in list(client.writes.values()):
            if not opened.write.writer and now > opened.write.deadline:
                opened.write.abort()
                self.closed(client, opened)

    def _count(self, tenant: Tenant) -> int:
        return self._numbers[tenant.name]

    def _forget(self, client: Client) -> None:
        del self._known[client.tenant.name, client.number]
        self._numbers[client.tenant.name] -= 1

    def _forget_idle(self, tenant: Tenant) -> None:
        for client in [client for client in self._known.values() if client.tenant.name == tenant.name]:
            if not client.writes and not client.streams and not self._store.lease_table.held_by(client.owner):
                self._forget(client)
