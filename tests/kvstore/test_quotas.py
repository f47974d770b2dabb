"""What a status and a scrape ask of namespaces and shares costs a look-up a space, whoever has how many."""

from __future__ import annotations

import pytest

from kvstore.index import Space
from kvstore.pool import BlockPool
from kvstore.service.codec import Parallelism
from kvstore.service.namespaces import Namespaces
from kvstore.service.quotas import Quotas
from kvstore.service.tenants import Tenant, Tenants
from kvstore.spec import NamespaceSpec
from tests.support.stores import PAYLOAD_BYTES, FakeClock, make_chain, make_rig, make_spec

TENANTS = [Tenant(f"tenant-{number}", bytes([number]) * 16) for number in range(1, 6)]


class CountedBytes(bytes):
    """Counts how often it is looked up in a dict."""

    looked_up = 0

    def __hash__(self) -> int:
        self.looked_up += 1
        return super().__hash__()


def spec_of(tenant: Tenant, model: str) -> NamespaceSpec:
    return make_spec(model, tenant_salt=tenant.salt)


def test_the_model_of_a_root_is_one_look_up_however_many_tenants_there_are() -> None:
    namespaces = Namespaces()
    for tenant in TENANTS:
        namespaces.add(tenant, spec_of(tenant, f"of {tenant.name}"), Parallelism(1, 1))
    for tenant in TENANTS:
        root = CountedBytes(spec_of(tenant, f"of {tenant.name}").root.digest)
        assert namespaces.model_of(root) == f"of {tenant.name}"
        assert root.looked_up == 1
        assert namespaces.tenant_of(root) == tenant.name
    namespaces.forget(TENANTS[0].name)
    gone = spec_of(TENANTS[0], f"of {TENANTS[0].name}").root.digest
    assert (namespaces.model_of(gone), namespaces.tenant_of(gone), len(namespaces)) == ("", None, 4)
    assert gone not in {each.root.digest for each in namespaces.all()}


def test_what_tenants_have_is_one_pass_over_the_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants, namespaces = Tenants(), Namespaces()
    for tenant in TENANTS:
        tenants.admit(tenant, [])
    with make_rig(FakeClock(), []) as rig:
        quotas = Quotas(rig.store, namespaces, tenants)
        for number, tenant in enumerate(TENANTS):
            for model in ("a", "b", "c"):
                spec = spec_of(tenant, model)
                rig.store.register(spec)
                namespaces.add(tenant, spec, Parallelism(1, 1))
                rig.write(make_chain(spec, "abcdef"[:number]))
        asked: list[BlockPool] = []
        spaces = BlockPool.spaces

        def counted(pool: BlockPool) -> list[Space]:
            asked.append(pool)
            return spaces(pool)

        monkeypatch.setattr(BlockPool, "spaces", counted)
        has = {use.name: use.ready_bytes for use in quotas.use()}
        assert asked == [rig.host.pool]
        assert has == {tenant.name: 3 * number * PAYLOAD_BYTES for number, tenant in enumerate(TENANTS)}
