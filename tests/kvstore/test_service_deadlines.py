"""Writers of a sidecar that map the pool file, and writers that are late."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from kvstore.v1 import block_pb2
from tests.support.sidecars import sidecar
from tests.support.stubs import YOURS, Raw, checksums, dialled, mapping, refused, spec, tokens_of
from tests.support.valkey import eventually

PROMPT = tokens_of(8, tail=3)
SLOT_BYTES = 1024
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def brief() -> Iterator[Raw]:
    """A server that gives a write a second."""
    with sidecar(write_seconds=1) as server, dialled(server.address) as raw:
        yield raw


class TestMapped:
    def test_offsets_are_places_in_the_file(self, brief: Raw) -> None:
        mapped = brief.register(spec("places"), can_map=True)
        with mapping(mapped) as view:
            begun = mapped.begin(PROMPT)
            payloads = mapped.payloads(PROMPT)
            views = view.views(np.frombuffer(begun.offsets, dtype="<i8"), 1024, writable=True)
            for target, payload in zip(views, payloads, strict=True):
                target[:] = np.frombuffer(payload, dtype=np.uint8)
            del target, views
            assert mapped.commit(begun.write_id, checksums(payloads)) == 8
            brief.register(mapped.request.spec).assert_holds(PROMPT)

    def test_it_has_no_use_for_streams(self, brief: Raw) -> None:
        mapped = brief.register(spec("no streams"), can_map=True)
        with mapping(mapped):
            begun = mapped.begin(PROMPT)
            with refused(PRECONDITION, "can_map"):
                mapped.send(begun.write_id, [b"\0" * 8192])
            mapped.abort(begun.write_id)


class TestDeadlines:
    def test_a_streamed_write_loses_its_slots_and_that_is_all(self, brief: Raw) -> None:
        peer = brief.register(spec("late"))
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)
        assert begun.seconds == 1
        peer.send(begun.write_id, [b"".join(payloads)])
        time.sleep(1.3)
        assert brief.await_quiet().writes == 0
        with refused(PRECONDITION, str(begun.write_id), "deadline", "begin another"):
            peer.commit(begun.write_id, checksums(payloads))
        peer.assert_unwritten(PROMPT)

    def test_a_late_stream_writes_nowhere(self, brief: Raw) -> None:
        peer = brief.register(spec("slow"))
        begun = peer.begin(PROMPT)
        payloads = peer.payloads(PROMPT)

        def slow() -> Iterator[block_pb2.WriteBlocksRequest]:
            yield block_pb2.WriteBlocksRequest(**peer.me, write_id=begun.write_id, data=payloads[0])
            time.sleep(1.6)
            assert peer.write(PROMPT) == [YOURS] * 8, "the slots are free for others by now"
            yield block_pb2.WriteBlocksRequest(data=b"\xff" * 1024 * 7)

        with refused(PRECONDITION, str(begun.write_id), "deadline"):
            brief.blocks.WriteBlocks(slow())
        peer.assert_holds(PROMPT)

    def test_slots_of_a_silent_writer_that_maps_wait_for_its_end(self, brief: Raw) -> None:
        """It may wake up and write at any time: nobody gets them before its lock is gone (cases 17, 18)."""
        mapped = brief.register(spec("silent"), can_map=True)
        with mapping(mapped):
            begun = mapped.begin(PROMPT)
            assert eventually(lambda: brief.pool().quarantined_bytes == 8 * SLOT_BYTES)
            with refused(PRECONDITION, "deadline"):
                mapped.commit(begun.write_id, checksums(mapped.payloads(PROMPT)))
            time.sleep(0.5)
            # Its late commit said that it has stopped.
            assert brief.pool().quarantined_bytes == 0
            mapped.begin(PROMPT)
            assert eventually(lambda: brief.pool().quarantined_bytes == 8 * SLOT_BYTES)
            time.sleep(0.8)
            assert brief.pool().quarantined_bytes == 8 * SLOT_BYTES
        mapped.raw.register(mapped.request.spec).assert_unwritten(PROMPT)

    def test_a_late_writer_that_says_so_gives_them_back(self, brief: Raw) -> None:
        mapped = brief.register(spec("late abort"), can_map=True)
        with mapping(mapped):
            begun = mapped.begin(PROMPT)
            assert eventually(lambda: brief.pool().quarantined_bytes == 8 * SLOT_BYTES)
            mapped.abort(begun.write_id)
            assert brief.pool().quarantined_bytes == 0
        mapped.raw.register(mapped.request.spec).assert_unwritten(PROMPT)

    def test_registering_again_without_the_map_frees_nothing(self, brief: Raw) -> None:
        """The process still maps the file, whatever it says of itself."""
        mapped = brief.register(spec("changes"), can_map=True)
        with mapping(mapped):
            mapped.begin(PROMPT)
            unmapped = block_pb2.RegisterNamespaceRequest()
            unmapped.CopyFrom(mapped.request)
            unmapped.can_map = False
            brief.blocks.RegisterNamespace(unmapped)
            assert eventually(lambda: brief.pool().staged_bytes == 0)
            time.sleep(0.5)
            assert brief.pool().quarantined_bytes == 8 * SLOT_BYTES
        brief.register(mapped.request.spec).assert_unwritten(PROMPT)
