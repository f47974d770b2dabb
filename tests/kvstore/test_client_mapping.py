"""What a client lets its owner do with the memory that it maps, such as pinning it for a GPU."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.block import WHOLE
from kvstore.service.client import Client, ClientOptions
from tests.support.clients import put
from tests.support.sidecars import sidecar
from tests.support.stores import make_chain, make_spec, payload_of


def test_the_mapping_has_a_context_of_its_own_for_each_server() -> None:
    """Entered with all of the pool file, left before it is let go; entered anew for the next server."""
    seen: list[str] = []

    @contextmanager
    def around(memory: NDArray[np.uint8]) -> Iterator[None]:
        seen.append(f"in, readable {memory[0] == memory[0]}")
        yield
        seen.append(f"out, {len(memory)} bytes still mapped: {memory[-1] == memory[-1]}")

    spec = make_spec("mapping")
    chain = make_chain(spec, "abc")
    options = ClientOptions(reconnect_seconds=0.05, around_mapping=around)
    with sidecar() as server:
        with Client(server.address, options=options) as client:
            put(client.namespace(spec), chain)
            assert seen == ["in, readable True"]
            with client.namespace(spec).acquire(chain) as lease:
                first = lease.views()[0]
                np.testing.assert_array_equal(first, payload_of(chain.rows(WHOLE), 0, len(first)))
                del first
            assert len(seen) == 1
            server.restart()
            client.namespace(spec).acquire(chain).release()
            client.namespace(spec).acquire(chain).release()
            assert [line.split(",")[0] for line in seen] == ["in", "out", "in"]
        assert [line.split(",")[0] for line in seen] == ["in", "out", "in", "out"]
        assert all(line.endswith("True") for line in seen)


def test_a_context_that_cannot_be_entered_keeps_no_memory_mapped() -> None:
    @contextmanager
    def around(memory: NDArray[np.uint8]) -> Iterator[None]:
        del memory
        raise RuntimeError("no GPU")
        yield

    options = ClientOptions(around_mapping=around)
    with sidecar() as server, Client(server.address, options=options) as client:
        with pytest.raises(RuntimeError, match="no GPU") as raised:
            client.namespace(make_spec("failing")).register()
        assert str(server.pool_path) not in Path("/proc/self/maps").read_text()
        assert raised.tb, "who keeps the error keeps all that its frames name"


def test_a_streaming_client_enters_none() -> None:
    def around(_: NDArray[np.uint8]) -> Iterator[None]:  # pragma: no cover
        raise AssertionError("there is no mapping")

    spec = make_spec("streaming")
    options = ClientOptions(map_pool=False, around_mapping=contextmanager(around))
    with sidecar() as server, Client(server.address, options=options) as client:
        put(client.namespace(spec), make_chain(spec, "ab"))


def test_pages_are_mapped_before_anybody_reads() -> None:
    spec = make_spec("populated", payload_bytes=1 << 18)
    chain = make_chain(spec, "abcdefgh")
    faults = {}
    with sidecar() as server:
        with Client(server.address) as writer:
            put(writer.namespace(spec), chain)
        for populate in (True, False):
            with Client(server.address, options=ClientOptions(populate=populate)) as client:
                client.namespace(spec).register()
                for thread in threading.enumerate():
                    if thread.name == "kvstore-populate":
                        thread.join()
                with client.namespace(spec).acquire(chain) as lease:
                    payloads = lease.views()
                    assert len(payloads) == len(chain)
                    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
                    for payload in payloads:
                        payload.max()
                    faults[populate] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
                    del payload, payloads
    assert faults[True] < len(chain) <= faults[False], faults
