"""What redis may add to a run: when it is asked, and what becomes of a lease when the answer is there."""

from __future__ import annotations

from kvstore.block import MissCause, SlotArray
from kvstore.lease import Lease
from kvstore.store.flights import Flights
from kvstore.store.holding import Holding
from kvstore.store.load_gate import LoadGate
from kvstore.store.parts import Parts
from kvstore.tiers.null import NullTier


class Remote:
    """Asks redis for what a lease lacks, again where the answer was to another prompt's question."""

    def __init__(self, parts: Parts, holding: Holding) -> None:
        self._remote = parts.tiers.remote
        self._holding = holding
        gate = LoadGate(parts.options.recompute_tokens_per_second, parts.clock)
        self._flights = Flights(parts, holding.extend, self._landed, gate)

    def ask(self, lease: Lease) -> None:
        """Begin to promote what follows the run; ``lease.pending`` says whether anything may come."""
        # What comes from redis is kept under its tokens; who has none gets what is here.
        if isinstance(self._remote, NullTier) or not lease.chain.known_by_tokens:
            return
        lease.asked_redis = max(lease.asked_redis, len(lease.chain) - lease.end)
        lease.asked_at, lease.broke = lease.end, None
        for shard in lease.shards:
            self._flights.join(lease, shard)

    def pins(self) -> list[SlotArray]:
        """What flights hold in the host tier until they end."""
        return self._flights.pins()

    def _landed(self, lease: Lease, ended_at: int, cause: MissCause | None) -> None:
        """A flight that the lease waited for is over: it broke for ``cause``, or never did."""
        if cause is not None and (lease.broke is None or ended_at < lease.broke[0]):
            lease.broke = ended_at, cause
        if lease.over or lease.pending:
            return
        broke_here = lease.broke is not None and lease.broke[0] == lease.end
        if lease.broke is not None and broke_here and lease.cause is not MissCause.COLLISION:
            lease.cause = lease.broke[1]
        answered = broke_here or lease.complete
        if not answered and (lease.end > lease.asked_at or self._flights.carry(lease)):
            # It was another prompt's flight, and it went as far as both agree; or another's goes on.
            self.ask(lease)
        if not lease.pending:
            self._holding.tell_policies(lease)
            lease.wake()
