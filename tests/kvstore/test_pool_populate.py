"""A client maps the pages of what is stored before anybody reads them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.block import WHOLE
from kvstore.tiers import pool_view
from kvstore.tiers.pool_view import Offsets, PoolView
from tests.support.stores import FakeClock, Rig, RigOptions, make_chain, make_rig, make_spec

SPEC = make_spec(payload_bytes=1 << 19)
CHAIN = make_chain(SPEC, "abcdefgh")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with make_rig(FakeClock(), [(SPEC, (WHOLE,))], RigOptions(3, extent_bytes=4 << 20)) as made:
        made.write(CHAIN)
        yield made


def offsets_of(rig: Rig) -> Offsets:
    host = rig.host
    return host.pool.extents.offsets(host.pool.match(CHAIN.rows(WHOLE)).slots) + host.file.data_at


def open_view(rig: Rig, client: int) -> PoolView:
    return PoolView(rig.host.file.path, rig.host.file.epoch, client)


def faults_of_reading(view: PoolView, offsets: Offsets) -> int:
    """Page faults that this thread takes to read all payloads."""
    payloads = view.views(offsets, SPEC.payload_bytes_on())
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for payload in payloads:
        payload.max()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_who_reads_first_takes_no_page_fault(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = offsets_of(rig)
    with closing(open_view(rig, 1)) as populated, closing(open_view(rig, 2)) as limited:
        populated.populate()
        monkeypatch.setattr(pool_view, "_MOST_POPULATED_BYTES", 2 << 20)
        limited.populate()
        with closing(open_view(rig, 3)) as plain:
            found = [faults_of_reading(each, offsets) for each in (populated, limited, plain)]
    assert found[0] < len(CHAIN) < found[1] < found[2], found


def test_what_nobody_stored_takes_no_memory(rig: Rig) -> None:
    path = rig.host.file.path
    before = path.stat().st_blocks
    with closing(open_view(rig, 1)) as view:
        view.populate()
    assert path.stat().st_blocks == before


def test_it_ends_with_the_view(rig: Rig) -> None:
    view = open_view(rig, 1)
    view.close()
    view.populate()
    open_view(rig, 1).close()
