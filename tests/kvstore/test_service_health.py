"""Health checks and reflection of a sidecar: what load balancers and generic clients ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvstore.v1 import admin_pb2, block_pb2, lookup_pb2
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import Credentials, Raw, dialled, refused, spec
from tests.support.tenants import Entry, write_tenants

SERVICES = {f"kvstore.v1.{name}" for name in ("LookupService", "BlockService", "AdminService")}
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """With tenants: probes have no token."""
    path = write_tenants(tmp_path_factory.mktemp("tenants") / "tenants.toml", Entry("search"))
    with sidecar(tenants_file=str(path)) as server:
        yield server


@pytest.fixture(scope="module")
def raw(server: Sidecar) -> Iterator[Raw]:
    with dialled(server.address) as raw:
        yield raw


def health(raw: Raw) -> Any:
    return health_pb2_grpc.HealthStub(raw.channel)


class TestHealth:
    @pytest.mark.parametrize("service", ["", *sorted(SERVICES)])
    def test_each_service_and_the_whole(self, raw: Raw, service: str) -> None:
        answer = health(raw).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == SERVING

    def test_a_service_that_is_not_there(self, raw: Raw) -> None:
        with refused(grpc.StatusCode.NOT_FOUND):
            health(raw).Check(health_pb2.HealthCheckRequest(service="kvstore.v2.BlockService"), timeout=5)

    def test_watching(self, raw: Raw) -> None:
        watch = health(raw).Watch(health_pb2.HealthCheckRequest(), timeout=5)
        assert next(watch).status == SERVING
        watch.cancel()


class TestReflection:
    @pytest.fixture(scope="class")
    @classmethod
    def described(cls, raw: Raw) -> ProtoReflectionDescriptorDatabase:
        return ProtoReflectionDescriptorDatabase(raw.channel)

    def test_every_service_is_listed(self, described: ProtoReflectionDescriptorDatabase) -> None:
        listed = set(described.get_services())
        assert listed >= SERVICES | {"grpc.health.v1.Health"}

    def test_descriptions_are_those_of_the_protos(self, described: ProtoReflectionDescriptorDatabase) -> None:
        """A client without our stubs can make every call."""
        pool = DescriptorPool(described)
        for file in (lookup_pb2, block_pb2, admin_pb2):
            for name, known in file.DESCRIPTOR.services_by_name.items():
                found = pool.FindServiceByName(f"kvstore.v1.{name}")
                assert [each.name for each in found.methods] == [each.name for each in known.methods]
                for ours, theirs in zip(found.methods, known.methods, strict=True):
                    assert ours.input_type.full_name == theirs.input_type.full_name
                    fields = [(each.name, each.number) for each in theirs.input_type.fields]
                    assert [(each.name, each.number) for each in ours.input_type.fields] == fields

    def test_it_tells_nothing_of_what_is_stored(self, server: Sidecar) -> None:
        with dialled(server.address, Credentials(Entry("search").token)) as raw:
            raw.register(spec("secret model"))
            described = ProtoReflectionDescriptorDatabase(raw.channel)
            assert not [name for name in described.get_services() if "secret" in name]


def test_a_call_that_does_not_exist(raw: Raw) -> None:
    call: Any = raw.channel.unary_unary("/kvstore.v1.BlockService/Dump")
    with refused(grpc.StatusCode.UNIMPLEMENTED):
        call(b"", timeout=5)
