"""Which namespaces are known, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from hashing import Root
from kvstore.block import Shard
from kvstore.service.codec import Parallelism, parallelism_of, require_text
from kvstore.service.errors import InvalidRequestError, Limit, LimitError, UnknownNamespaceError
from kvstore.service.tenants import Tenant
from kvstore.settings import suggestion
from kvstore.spec import NamespaceSpec
from kvstore.v1 import types_pb2

NAMESPACES_MAX = 1024
"""Of one tenant."""
SPACES_MAX = 32_768
"""Of one tenant: ranks over all its namespaces and the ways in which their models are cut."""
CUTS_MAX = 16
"""Ways in which one model is cut over ranks."""


@dataclass(slots=True, eq=False)
class Registered:
    """A namespace, its tenant, and the ways in which its model is cut."""

    spec: NamespaceSpec
    root: Root
    tenant: str
    cuts: list[Parallelism] = field(default_factory=list)


class Namespaces:
    """Every namespace that has been registered since the start. A tenant sees its own only."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[bytes, Registered]] = {}
        # A root has one tenant: the salt in it is that tenant's own.
        self._by_root: dict[bytes, Registered] = {}

    def __len__(self) -> int:
        return len(self._by_root)

    def model_of(self, root: bytes) -> str:
        """The model's name; blocks of a namespace that nobody has registered since the start have none."""
        known = self._by_root.get(root)
        return "" if known is None else known.spec.namespace.model

    def tenant_of(self, root: bytes) -> str | None:
        """Whose namespace it is; None where nobody has registered it since the start."""
        known = self._by_root.get(root)
        return None if known is None else known.tenant

    def all(self) -> list[Registered]:
        return list(self._by_root.values())

    def forget(self, tenant: str) -> None:
        """Forget a tenant's namespaces: whoever is to use one has to register it again."""
        for root in self._by_tenant.pop(tenant, {}):
            del self._by_root[root]

    def admit(self, tenant: Tenant, spec: NamespaceSpec, cut: Parallelism) -> None:
        """LimitError when this would be one more than a tenant, or a namespace, may have."""
        own = self._by_tenant.get(tenant.name, {})
        known = own.get(spec.root.digest)
        if known is not None and cut in known.cuts:
            return
        spaces = sum(len(other.shards) for each in own.values() for other in each.cuts)
        if spaces + len(cut.shards) > SPACES_MAX:
            raise LimitError(
                Limit.NAMESPACES,
                f"the namespaces of this tenant are read by {spaces} ranks, {len(cut.shards)} more are more "
                f"than {SPACES_MAX}; restart the server to forget those that are no longer used",
            )
        if known is not None and len(known.cuts) >= CUTS_MAX:
            raise LimitError(
                Limit.NAMESPACES,
                f"the namespace is registered for {len(known.cuts)} ways of cutting its model, at most "
                f"{CUTS_MAX} are kept; restart the server to forget those that are no longer used",
            )
        if len(own) >= NAMESPACES_MAX and spec.root.digest not in own:
            raise LimitError(
                Limit.NAMESPACES,
                f"this tenant has {len(own)} namespaces, at most {NAMESPACES_MAX} are kept; restart the "
                "server to forget those that are no longer used",
            )

    def add(self, tenant: Tenant, spec: NamespaceSpec, cut: Parallelism) -> Registered:
        """Remember a namespace, and one more way of cutting its model."""
        own = self._by_tenant.setdefault(tenant.name, {})
        root = spec.root
        known = own.get(root.digest)
        if known is None:
            known = own[root.digest] = self._by_root[root.digest] = Registered(spec, root, tenant.name)
        if cut not in known.cuts:
            known.cuts.append(cut)
        return known

    def siblings(self, known: Registered) -> list[NamespaceSpec]:
        """Other namespaces of the same tenant under the same model name."""
        model = known.spec.namespace.model
        own = self._by_tenant[known.tenant].values()
        return [each.spec for each in own if each is not known and each.spec.namespace.model == model]

    def of_prompt(self, tenant: Tenant, prompt: types_pb2.Prompt) -> Registered:
        """The namespace that a prompt names by root, or by a model name that only one has."""
        own = self._by_tenant.get(tenant.name, {})
        if prompt.namespace:
            return self.by_root(tenant, prompt.namespace)
        if not prompt.model:
            raise InvalidRequestError(
                "prompt names no namespace; send the root that RegisterNamespace gave, or model"
            )
        require_text("prompt.model", prompt.model)
        fitting = [each for each in own.values() if each.spec.namespace.model == prompt.model]
        if not fitting:
            models = {each.spec.namespace.model for each in own.values()}
            hint = suggestion(prompt.model, models) if models else "none is registered yet"
            raise UnknownNamespaceError(f"no namespace of this tenant has model {prompt.model!r}; {hint}")
        if len(fitting) > 1:
            kinds = ", ".join(
                f"{each.root.digest.hex()} (block size {each.spec.block_size}, "
                f"{each.spec.namespace.kv_dtype}, adapter {each.spec.namespace.adapter})"
                for each in fitting[:10]
            )
            raise InvalidRequestError(
                f"model {prompt.model!r} has {len(fitting)} namespaces: {kinds}; name one by its root"
            )
        return fitting[0]

    def by_root(self, tenant: Tenant, root: bytes) -> Registered:
        """UnknownNamespaceError where the tenant has none of that root; whether another has is not told."""
        known = self._by_tenant.get(tenant.name, {}).get(bytes(root))
        if known is None:
            raise UnknownNamespaceError(
                f"namespace {root.hex()} is not registered here; register it first (also after a restart)"
            )
        return known


def shards_of(known: Registered, prompt: types_pb2.Prompt) -> tuple[Shard, ...]:
    """The ranks that read a prompt: those it names, or the only ones registered."""
    if prompt.HasField("parallelism"):
        cut = parallelism_of(prompt.parallelism)
        if cut not in known.cuts:
            raise InvalidRequestError(
                f"the namespace is not registered for tp size {cut.tp_size} and pp size {cut.pp_size}, but "
                f"for {_listed(known)}; register it, or correct parallelism"
            )
        return cut.shards
    if len(known.cuts) > 1:
        raise InvalidRequestError(
            f"the namespace is registered for {_listed(known)}; say which in parallelism"
        )
    return known.cuts[0].shards


def _listed(known: Registered) -> str:
    return " and ".join(f"tp size {cut.tp_size}, pp size {cut.pp_size}" for cut in known.cuts)
