"""Which namespaces a store knows, and whether a request fits the one that it names."""

from __future__ import annotations

from kvstore.block import Chain, Shard
from kvstore.errors import NamespaceError
from kvstore.spec import NamespaceSpec
from kvstore.store.parts import Parts


class Registry:
    """Registered namespaces, with a space for each of their shards in each memory tier."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._specs: dict[bytes, NamespaceSpec] = {}

    def register(self, spec: NamespaceSpec, shards: tuple[Shard, ...], group: int) -> None:
        """Make a namespace known. PoolError where its blocks fit no pool; nothing is kept of it then."""
        sizes = {shard: spec.payload_bytes_on(shard) for shard in shards}
        memory = self._parts.tiers.memory
        for tier in memory:
            for size in set(sizes.values()):
                tier.pool.require_fit(size, spec.block_size)
        self._parts.tiers.host.describe(spec)
        for tier in memory:
            for shard, size in sizes.items():
                space = tier.pool.open_space(spec.root.digest, shard, size, spec.block_size, group=group)
                tier.pool.regroup(space, group)  # taken over from an earlier server, it is in none yet
        self._specs[spec.root.digest] = spec

    def require(self, chain: Chain, shards: tuple[Shard, ...]) -> None:
        """NamespaceError where a prompt does not fit the namespace that it names."""
        spec = self._specs.get(chain.namespace)
        if spec is None:
            raise NamespaceError(
                f"namespace {chain.namespace.hex()} is not registered; register its spec first"
            )
        if spec.block_size != chain.root.block_size:
            raise NamespaceError(
                f"the request has block size {chain.root.block_size}, its namespace has "
                f"{spec.block_size}; hash with the namespace's own root"
            )
        if not shards:
            raise NamespaceError("the request names no shard; name those of all ranks that read it")
        for shard in shards:
            self._parts.space(self._parts.tiers.host, chain.namespace, shard)
