"""A pool file counted from outside, row by row, while nobody changes it: the books that no server keeps."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.table import SlotState, Table
from kvstore.tiers.memory import payload_checksum
from kvstore.tiers.pool_format import HEADER_BYTES, RECORD_BYTES, Record, decode_header, decode_record
from tests.support.crash_blocks import PAYLOAD_BYTES, payload_of


@dataclass(slots=True)
class Census:
    """What the rows of all extents say: slots by state, and what is wrong with any of them."""

    slots: dict[SlotState, int] = field(default_factory=lambda: dict.fromkeys(SlotState, 0))
    slot_bytes: int = 0
    ready: set[bytes] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def bytes_in(self, state: SlotState) -> int:
        return self.slots[state] * self.slot_bytes


def take_census(path: Path) -> Census:
    """Count the file's slots, and compare every READY payload with what its block's writer meant."""
    census = Census()
    with path.open("rb") as file:
        size = decode_header(file.read(HEADER_BYTES)).file_bytes
        memory = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), dtype=np.uint8)
    for record, table, data in _extents(memory):
        census.slot_bytes = record.slot_bytes
        for state in SlotState:
            census.slots[state] += int((table.state == state).sum())
        for row in np.flatnonzero(table.state == SlotState.READY).tolist():
            _examine(census, table, row, data[row * record.slot_bytes :][:PAYLOAD_BYTES])
        odd = np.flatnonzero((table.state != SlotState.READY) & (table.generation % 2 == 0))
        census.wrong += [
            f"row {row} is readable by its generation and not by its state" for row in odd.tolist()
        ]
    return census


def _extents(memory: NDArray[np.uint8]) -> Iterator[tuple[Record, Table, NDArray[np.uint8]]]:
    geometry = decode_header(memory[:HEADER_BYTES].tobytes())
    for number in range(geometry.extents):
        at = geometry.record_at(number)
        record = decode_record(memory[at : at + RECORD_BYTES].tobytes())
        if record is not None and record.rows:
            start = geometry.data_at + number * geometry.extent_bytes
            buffer = memory[start : start + geometry.extent_bytes]
            table = Table(buffer, record.rows, record.block_size)
            yield record, table, memory[geometry.data_at + record.data_offset :]


def _examine(census: Census, table: Table, row: int, payload: NDArray[np.uint8]) -> None:
    name = table.hash[row].tobytes()
    if table.generation[row] % 2:
        census.wrong.append(f"block {name.hex()} is READY and not readable")
    if name in census.ready:
        census.wrong.append(f"block {name.hex()} is there twice")
    census.ready.add(name)
    if not np.array_equal(payload, payload_of(name)):
        census.wrong.append(f"block {name.hex()} does not hold what its writer meant")
    elif table.checksum[row] != payload_checksum(payload):
        census.wrong.append(f"block {name.hex()} has another checksum than its payload")
