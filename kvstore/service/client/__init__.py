"""The sidecar's client: for threads, and for asyncio. It imports no torch.

``Client(address).namespace(spec)`` gives what an engine needs: ``acquire`` a prompt's cached run,
read it in shared memory (or streamed), ``write`` what was computed.
"""

from kvstore.service.client.aio import AsyncClient, AsyncHeldLease, AsyncNamespace, AsyncStagedWrite
from kvstore.service.client.blocking import BorrowedLease, Client, ClientNamespace, HeldLease, StagedWrite
from kvstore.service.client.messages import LookupResult, PrefetchResult, TierTokens
from kvstore.service.client.options import TLS, AroundMapping, ClientOptions, Outcome
from kvstore.service.client.ticket import Ticket
from kvstore.store.write import BlockStatus

__all__ = [
    "TLS",
    "AroundMapping",
    "AsyncClient",
    "AsyncHeldLease",
    "AsyncNamespace",
    "AsyncStagedWrite",
    "BlockStatus",
    "BorrowedLease",
    "Client",
    "ClientNamespace",
    "ClientOptions",
    "HeldLease",
    "LookupResult",
    "Outcome",
    "PrefetchResult",
    "StagedWrite",
    "Ticket",
    "TierTokens",
]
